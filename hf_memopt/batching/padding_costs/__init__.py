"""What padding costs: the lengths in data files, and the strategies compared."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
