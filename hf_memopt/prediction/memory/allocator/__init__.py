"""torch's caching allocator, simulated: what a recorded step reserves on a GPU."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
