"""A step of the stock ``Trainer`` is run on the meta device and its allocations are recorded; recordings are kept."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
