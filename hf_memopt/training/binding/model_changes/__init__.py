"""What techniques and estimates both do to a model: adapters, quantised weights, tied embeddings, input gradients."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
