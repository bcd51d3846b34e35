"""Which rows share a batch, and in which order, as arrays of indices: nothing here reads a row."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
