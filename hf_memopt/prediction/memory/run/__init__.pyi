from .callback import MemoryReportCallback as MemoryReportCallback
