"""What changed between two plans, runs, measurements or estimates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
