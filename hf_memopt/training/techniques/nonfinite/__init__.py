"""Steps that are not finite are dropped, and the module that was first is named."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
