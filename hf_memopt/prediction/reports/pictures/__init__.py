"""Pictures that several reports share: bars of memory, and memory against time."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
