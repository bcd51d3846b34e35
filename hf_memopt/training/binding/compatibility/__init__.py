"""What cannot be used together, why, and what to do instead; what a ``Trainer`` uses of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
