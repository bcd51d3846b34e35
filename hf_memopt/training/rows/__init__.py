"""Rows of a data set as a model of a task takes them: formats, labels by their type, metrics."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
