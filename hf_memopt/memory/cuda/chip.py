"""What the rules of the kernels share: the chip they run on, torch's release, rounding, the size of a copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hf_memopt.devices.gpu_table import most_multiprocessors

__all__ = ["Chip", "copy_bytes", "divide_up", "round_up", "torch_release"]


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a GPU by which kernels split their work; a ``Gpu`` has more, and may lack the count."""

    capability: tuple[int, int]
    multiprocessors: int

    @classmethod
    def of(cls, capability: tuple[int, int], multiprocessors: int | None = None) -> Chip:
        """Return a chip; without a count, the largest of its capability, or of all if that one is unknown."""
        if multiprocessors is None:
            multiprocessors = most_multiprocessors(capability)
        return cls(capability, multiprocessors)

    @property
    def threads_per_multiprocessor(self) -> int:
        """The number of threads that may be resident on a multiprocessor.

        Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; torch's own copy,
        torch/headeronly/macros/Macros.h, ``CUDA_MAX_THREADS_PER_SM``, has no 11.0 and no 12.1.
        """
        if self.capability == (7, 5):
            return 1024
        fewer = self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability[0] in (11, 12)
        return 1536 if fewer else 2048

    @property
    def wide_shared_memory(self) -> bool:
        """Whether tiles of 128 queries fit a block's shared memory in memory-efficient attention.

        Assumed of the chips whose blocks may have 96 KB (7.0, 7.2), 163 KB (8.0, 8.7) or 227 KB (9.0, 10.x), and not of
        those with 64 KB (7.5) or 99 KB (8.6, 8.9, 12.x): generate_kernels.py names 7.5 and 8.6 as too small. torch
        compares the size of the kernel's own struct, which only a compiler knows.

        Source: CUDA C++ Programming Guide, the same table (older editions for 7.x); generate_kernels.py.
        """
        return self.capability in ((7, 0), (7, 2), (8, 0), (8, 7)) or self.capability[0] in (9, 10)


@cache
def torch_release() -> tuple[int, int]:
    """Return major and minor of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def divide_up(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``a``."""
    return divide_up(a, multiple) * multiple


def copy_bytes(tensor: Tensor) -> int:
    """Return what ``tensor.contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()
