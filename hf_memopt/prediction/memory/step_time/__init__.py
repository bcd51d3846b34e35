"""Seconds of a step: what its operations cost, and what they take on a GPU."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
