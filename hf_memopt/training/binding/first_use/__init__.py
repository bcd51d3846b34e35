"""Before a Trainer is used for the first time: who is building it, and what waits until it is used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
