"""Activations computed again in the backward pass, of the layers that a policy chooses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
