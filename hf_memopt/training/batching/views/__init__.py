"""What the ``Trainer`` reads in place of the data: rows in bucketed or sorted order."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
