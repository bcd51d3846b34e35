"""The search for the fastest set-up that fits a GPU, and why it was chosen."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
