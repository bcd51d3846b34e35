"""Questions that several rooms ask about a model: its task, what is inside its wrappers, what its loss ignores."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
