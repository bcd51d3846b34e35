"""Stand-ins for the layers of bitsandbytes, with their bytes and without their kernels."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
