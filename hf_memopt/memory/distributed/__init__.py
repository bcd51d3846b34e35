"""One process's share of a step of FSDP2 or ZeRO."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
