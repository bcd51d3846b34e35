"""``attach``, and what it does to a ``Trainer`` that all techniques share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
