from .callback import MemoryReportCallback as MemoryReportCallback
from .callback import PhasePeaks as PhasePeaks
from .run_report import name_of as name_of
