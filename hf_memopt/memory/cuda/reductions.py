"""The memory that a reduction on CUDA allocates inside its operator: a staging buffer for partial results.

A reduction with few outputs would keep only a few multiprocessors busy. So several blocks of threads share an output:
each writes its partial result into a staging buffer in global memory, and the last one, found by a semaphore, adds them
up. The rules are those of native/cuda/Reduce.cuh, which sums, means, norms and extrema share. Limitations: softmax,
sorts and scans, which have other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_memopt.memory.cuda.chip import Chip, divide_up

__all__ = ["Layout", "reduce_extreme", "reduce_norm", "reduce_sum", "reduction_bytes"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Layout:
    """A reduction as TensorIterator orders it: the ``reduced`` dimensions first, merged where strides allow it."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    reduced: int

    @classmethod
    def of(cls, source: Tensor, dims: Sequence[int]) -> Layout:
        """Source: TensorIterator.cpp, ``reorder_dimensions``, ``coalesce_dimensions``."""
        gone = {dim % source.dim() for dim in dims} if dims and source.dim() else set(range(source.dim()))
        order = [dim for dim in reversed(range(source.dim())) if source.shape[dim] != 1]
        reduced = _merge(
            sorted(((source.stride(dim), source.shape[dim]) for dim in order if dim in gone), key=lambda pair: pair[0])
        )
        kept = _merge([(source.stride(dim), source.shape[dim]) for dim in order if dim not in gone])
        pairs = (*reduced, *kept)
        return cls(tuple(size for _, size in pairs), tuple(stride for stride, _ in pairs), len(reduced))


def _merge(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for stride, size in pairs:
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def reduce_sum(
    chip: Chip, out: Tensor, source: Tensor, dim: Any = None, *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> tuple[int, ...]:
    """Return a copy in the result's dtype, unless 16 bits give float32, and the buffers of ``reduction_bytes``.

    Source: ReduceOpsUtils.h, ``make_reduction``; ReduceSumProdKernel.cu (vectors of 8 for 16 bits since 2.10).
    """
    kept_type = source.dtype is out.dtype or (source.dtype in _HALF and out.dtype is torch.float32)
    cast = 0 if kept_type else source.numel() * out.element_size()
    size = 8 if out.element_size() == 8 else 4
    vector = 8 if source.dtype in _HALF else 4
    return (cast, *reduction_bytes(chip, Layout.of(source, _dims(dim)), size=size, vector=vector))


def reduce_norm(
    chip: Chip, out: Tensor, source: Tensor, ord: Any = 2, dim: Any = None, *_: Any, **__: Any
) -> tuple[int, ...]:
    size = 8 if out.dtype is torch.float64 else 4
    return reduction_bytes(chip, Layout.of(source, _dims(dim)), size=size, vector=4)


def reduce_extreme(chip: Chip, out: Tensor, source: Tensor, dim: Any = (), *_: Any, **__: Any) -> tuple[int, ...]:
    return reduction_bytes(chip, Layout.of(source, _dims(dim)), size=source.element_size(), vector=4)


def _dims(dim: Any) -> Sequence[int]:
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


def reduction_bytes(chip: Chip, layout: Layout, *, size: int, vector: int) -> tuple[int, ...]:
    """Return the staging buffer and the semaphores of a reduction whose outputs are too few to fill the GPU.

    The buffer is generous: torch sizes it for every output times the threads of a block. The gradient of a bias of
    4,096 elements over 4,096 tokens takes 108 MiB on an A100.

    Source: native/cuda/Reduce.cuh, ``setReduceConfig``, ``ReduceConfig::global_memory_size``, ``semaphore_size``
    (2.13 and 2.14; reductions of more than 2**31 bytes, which torch cuts first, are not cut here).

    Args:
        chip: what it runs on.
        layout: the reduction's dimensions.
        size: bytes of an accumulator.
        vector: elements of a vector load along reduced elements.
    """
    inputs, outputs = math.prod(layout.sizes[: layout.reduced]), math.prod(layout.sizes[layout.reduced :])
    if inputs < 256 or outputs == 0:  # a thread that has fewer never shares an output with another block
        return ()
    # Threads of a warp (across) follow the fastest dimension in memory, reduced or kept; the rest of the block (along)
    # takes the other one. A thread loads a vector of neighbours where the fastest stride is 1.
    inner = outputs == 1 or layout.strides[0] < layout.strides[layout.reduced]
    across, along, output_vector = (inputs, outputs, 1) if inner else (outputs, inputs, 1)
    if layout.strides[0 if inner else layout.reduced] == 1:
        if not inner:
            others = [*layout.strides[: layout.reduced], *layout.strides[layout.reduced + 1 :]]
            output_vector = math.gcd(4, layout.sizes[layout.reduced], *others)
            across //= output_vector
        elif across >= 128 and layout.reduced == 1:
            across //= vector
    threads = 512 // output_vector
    across, along = (1 << (min(extent, threads).bit_length() - 1) for extent in (across, along))
    height = min(along, threads // min(across, 32))
    width = min(across, threads // height)
    step_input, step_output = (width, 1) if inner else (1, width)
    if divide_up(inputs, step_input) < min(height * 16, 256):
        return ()
    # Blocks share an output only while the grid does not fill the GPU and each thread keeps 16 or more elements.
    step_input *= height
    grid = divide_up(outputs // output_vector, step_output)
    per_thread = divide_up(inputs, step_input)
    target = chip.multiprocessors * (chip.threads_per_multiprocessor // (width * height))
    if per_thread < 256 or grid > target:
        return ()
    shares = max(min(divide_up(target, grid), divide_up(per_thread, 16)), divide_up(per_thread, 256))
    if shares == 1:
        return ()
    return size * outputs * shares * (1 if inner else width * output_vector), 4 * grid
