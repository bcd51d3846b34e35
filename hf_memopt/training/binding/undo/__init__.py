"""Changes that are taken back: of a method, of an attribute, of what a model keeps, of random numbers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
