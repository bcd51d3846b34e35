"""Rows of mixed lengths: which go into a batch, in which order, how they are padded, and what padding costs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
