"""What of a training step an estimate depends on, and the lengths of its batches."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
