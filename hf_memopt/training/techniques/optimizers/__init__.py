"""Optimizers with less memory: embeddings in 32 bits, 16-bit weights, a step within the backward pass."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
