"""Memory of a real run: the callback that reads it, and the report it leaves."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
