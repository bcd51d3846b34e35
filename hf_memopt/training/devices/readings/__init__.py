"""Memory as the GPU, the driver and the operating system report it, and running out of it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
