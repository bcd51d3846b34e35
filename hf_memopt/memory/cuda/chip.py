"""What the rules of the kernels share: the chip they run on, torch's release, rounding, the size of a copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

__all__ = ["MOST_MULTIPROCESSORS", "Chip", "copy_bytes", "divide_up", "round_up", "torch_release"]

# The multiprocessors of the largest GPU of each compute capability, by the GPU's specification: its CUDA cores over
# those of a multiprocessor (the rule of ``devices/gpu_table.py``), or what the driver reported where a report is named.
MOST_MULTIPROCESSORS = {
    (5, 0): 5,  # GTX 750 Ti, 640 cores: https://github.com/PointCloudLibrary/pcl/issues/880
    (5, 2): 24,  # Titan X, report: https://github.com/gpgpu-sim/gpgpu-sim_distribution/issues/169
    (6, 0): 56,  # P100, 3584 cores: NVIDIA Tesla V100 GPU Architecture (whitepaper), table 1
    (6, 1): 30,  # P40, 3840 cores: https://sysrqmts.com/pl/gpus/compare/nvidia-a100-pcie-vs-nvidia-tesla-p40
    (7, 0): 80,  # V100, 5120 cores: the table of P100
    (7, 5): 72,  # Quadro RTX 8000, 4608: https://technicalcity.b-cdn.net/en/video/Quadro-RTX-8000-vs-Tesla-K40d
    (8, 0): 108,  # A100, 6912 cores: NVIDIA A100 Tensor Core GPU Architecture (whitepaper), page 19
    (8, 6): 84,  # RTX A6000, 10752: NVIDIA's whitepaper by https://github.com/NVIDIA/cudnn-frontend/pull/1164
    (8, 7): 16,  # Jetson AGX Orin, report: https://github.com/tmcdonell/cuda/issues/77
    (8, 9): 142,  # RTX 6000 Ada, 18176 cores: the table of RTX A6000
    (9, 0): 132,  # H100 SXM5, 16896 cores: https://glennklockwood.com/garden/processors/h100
    (10, 0): 148,  # B200: https://github.com/0xSero/blackwell-gpu-wiki/issues/2
    (12, 0): 188,  # RTX PRO 6000, 24064 cores: the table of RTX A6000
}


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a GPU by which kernels split their work; a ``Gpu`` has more, and may lack the count."""

    capability: tuple[int, int]
    multiprocessors: int

    @classmethod
    def of(cls, capability: tuple[int, int], multiprocessors: int | None = None) -> Chip:
        """Return a chip; without a count, the largest of its capability, or of all if that one is unknown."""
        if multiprocessors is None:
            multiprocessors = MOST_MULTIPROCESSORS.get(capability, max(MOST_MULTIPROCESSORS.values()))
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
