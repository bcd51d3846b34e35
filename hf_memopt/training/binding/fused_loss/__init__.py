"""The loss of a language model, computed from the hidden states in slices, without the logits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
