"""What CUDA's kernels allocate and in which dtype they compute, where the CPU and the meta device differ."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
