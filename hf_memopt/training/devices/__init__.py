"""GPUs: the table of their sizes and rates, the one of this machine, and the precisions it computes in."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
