from .callback import MemoryReportCallback as MemoryReportCallback
from .callback import PhasePeaks as PhasePeaks
