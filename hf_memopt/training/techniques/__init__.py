"""The techniques: each a function, and the callback that calls it in a ``Trainer``. ``technique_list`` names them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
