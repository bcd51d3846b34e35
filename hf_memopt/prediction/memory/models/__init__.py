"""Models on the meta device, by name, configuration or module, and a batch of the right shape."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
