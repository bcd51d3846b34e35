"""A GPU that is not there: torch's own CUDA code runs on it, and its allocator says what a step needs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
