"""The estimate of a training step without a GPU, and the largest batch that fits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
