"""The memory that a CUDA kernel allocates inside one ATen operator, and that the cuBLAS handles keep.

A tracker sees the inputs and outputs of operators only. The buffers inside one operator are computed here from its
arguments, by the rules of the CUDA source; each rule names its file and function. The figures are requested bytes,
which the allocator rounds up to 512 bytes for each block.

Seen: the headers of torch 2.13 (memory-efficient attention, reductions, cub) and the ``.cu`` files of main between 2.8
and 2.14. Where releases differ, ``hidden_bytes`` gives 2.13, but for the linear layers before 2.9;
``attention_kernel`` and ``workspace_bytes`` follow the installed release.

Without a rule, since they allocate little or nothing: softmax and log_softmax with their backwards,
nll_loss, dropout, cat, gather, scatter, masked_fill, cumsum along a dimension, the fused optimizers, the unscaling of
gradients, random numbers, and the matrix products, whose workspace is kept (``workspace_bytes``).

Limitations: convolutions and cuDNN attention, whose workspace is decided by the machine's cuDNN library; sort, topk,
nonzero and unique, whose temporaries depend on cub's version (integers, as many as the input has elements); the
deterministic mode (``torch.use_deterministic_algorithms``).

The rules of attention are in ``attention``, those of sums, means, norms and extrema in ``reductions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hf_memopt.memory.cuda.attention import efficient_backward, efficient_forward, flash_backward, flash_forward
from hf_memopt.memory.cuda.chip import Chip, copy_bytes, divide_up, torch_release
from hf_memopt.memory.cuda.reductions import Layout, reduce_extreme, reduce_norm, reduce_sum, reduction_bytes

__all__ = ["hidden_bytes", "workspace_bytes"]

_LT_WORKSPACE_BYTES = 2**20


def hidden_bytes(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
    capability: tuple[int, int],
    *,
    multiprocessors: int | None = None,
) -> tuple[int, ...]:
    """Return the blocks that the CUDA kernel of one operator allocates and frees before it returns.

    Where the kernel works in phases, these are the blocks of the phase that holds most.

    Args:
        func: the overload, as a ``TorchDispatchMode`` sees it.
        args: its arguments; only shape, strides and dtype of tensors are read, so meta tensors suffice.
        kwargs: its arguments by keyword.
        out: what it returned.
        capability: of the GPU.
        multiprocessors: of the GPU; reductions and flash attention split their work by it. None for the largest GPU
            of that capability, which is an upper bound: the buffer of a large sum grows in proportion.
    """
    rule = _RULES.get(func)
    if rule is None:
        return ()
    blocks = rule(Chip.of(capability, multiprocessors), out, *args, **kwargs)
    return tuple(size for size in blocks if size)


# ---- norms and embeddings


def _layer_norm_backward(
    chip: Chip,
    out: Any,
    grad: Tensor,
    source: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[int, ...]:
    wanted = sum(1 for tensor, mask in zip((weight, bias), output_mask[1:], strict=True) if mask and tensor is not None)
    return _norm_backward(chip, grad, source, normalized_shape, weight, wanted)


def _rms_norm_backward(
    chip: Chip,
    out: Any,
    grad: Tensor,
    source: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[int, ...]:
    wanted = int(weight is not None and output_mask[1])
    return _norm_backward(chip, grad, source, normalized_shape, weight, wanted)


def _norm_backward(
    chip: Chip, grad: Tensor, source: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, wanted: int
) -> tuple[int, ...]:
    """Return the partial sums of the weights' gradients by groups of rows: only for very many narrow rows.

    Source: layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel`` (2.8 and later; none before).
    """
    columns = math.prod(normalized_shape)
    rows = source.numel() // columns
    copies = (copy_bytes(grad), copy_bytes(source))
    if weight is None or not wanted or rows <= 64 * 1024 or columns // 32 >= chip.multiprocessors // 2:
        return copies
    groups = min(32 * 1024 // divide_up(columns, 32), divide_up(rows, 32))
    size = weight.element_size()
    summed = reduction_bytes(chip, Layout((groups, columns), (columns, 1), 1), size=4, vector=4)
    return (*copies, *(wanted * (groups * columns * size,)), columns * size, *summed)


def _embedding_backward(
    chip: Chip,
    out: Any,
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[int, ...]:
    """Return the sorted indices, the bounds of their runs, and a float32 row for each part of at most 10 equal indices.

    Source: Embedding.cu, ``embedding_dense_backward_cuda`` (no buffers up to 3072 indices); EmbeddingBackwardKernel.cu,
    ``embedding_backward_cuda_kernel``. The sort before it holds less.
    """
    grad_copy, count, size = copy_bytes(grad), indices.numel(), indices.element_size()
    if count <= 3072 and not scale_grad_by_freq:
        return (grad_copy,)
    runs = min(count, num_weights)
    parts = count // 10 + runs
    return (
        grad_copy,
        *((4 if scale_grad_by_freq else 3) * (count * size,)),  # sorted, original, (frequency,) bounds of runs
        *(2 * (runs * size,)),  # parts of each run, and their running sum
        *(2 * (8,)),  # the numbers of runs and of parts
        parts * size,
        parts * grad.shape[-1] * max(4, grad.element_size()),
    )


def _index_put(
    chip: Chip, out: Any, source: Tensor, indices: Sequence[Tensor | None], values: Tensor, *rest: Any, **named: Any
) -> tuple[int, ...]:
    """Return linear, sorted and original indices, the range, and the two buffers that cub's sort alternates with.

    Source: Indexing.cu, ``index_put_with_sort_kernel``: only when accumulating, as the backward of indexing does;
    cub's ``DeviceRadixSort`` (without its counters, below 1 MiB). A bool index counts with its full length.
    """
    if not (rest[0] if rest else named.get("accumulate", False)):
        return ()
    shapes = (reversed(index.shape) for index in indices if index is not None)
    count = math.prod(max(sizes) for sizes in zip_longest(*shapes, fillvalue=1))  # as they broadcast
    return (copy_bytes(values), *(6 * (count * 8,)))


def _foreach_norm(chip: Chip, out: Any, tensors: Sequence[Tensor], *_: Any, **named: Any) -> tuple[int, ...]:
    """Return a partial norm of every 65,536 elements, as many for each tensor as the largest has.

    Source: ForeachReduceOp.cu, ``foreach_tensor_norm_cuda``.
    """
    chunks = max((divide_up(tensor.numel(), 65536) for tensor in tensors), default=0)
    return (len(tensors) * chunks * (8 if out and out[0].dtype is torch.float64 else 4),)


# ---- linear layers, and what stays


def _linear(
    chip: Chip, out: Tensor, bias: Tensor, source: Tensor, weight: Tensor, *, beta: float = 1, **_: Any
) -> tuple[int, ...]:
    """Return the workspace of cuBLASLt, which adds the bias of a linear layer: before 2.9 each call allocated its own.

    Source: native/cuda/Blas.cpp, ``addmm_out_cuda_impl`` (``useLtInterface``, built with CUDA 12); cuda/CUDABlas.cpp,
    ``gemm_and_bias``, ``_parseChosenWorkspaceSize``. Pull request 151163 of pytorch/pytorch made sharing the block of
    cuBLAS an option, off by default; 156495 (2.9) keeps the workspace.
    """
    fused = beta == 1 and bias.dim() == 1 and bias.shape[0] == weight.shape[1] and min(weight.shape) > 1
    fits = bias.is_contiguous() and out.is_contiguous() and bias.dtype.is_floating_point
    return (_LT_WORKSPACE_BYTES,) if fused and fits else ()


def workspace_bytes(capability: tuple[int, int], chosen: int | None = None) -> tuple[int, ...]:
    """Return the blocks that the cuBLAS handles keep after a training step.

    Each thread has a handle of its own, and each (handle, stream) a block from torch's allocator, taken with its first
    matrix product: the first block with the first of the forward pass, on the main thread; the second with the first of
    the backward pass, on the autograd engine's thread of the device. In 2.9 and 2.10 cuBLASLt, which computes a linear
    layer with bias, keeps 1 MiB more for each thread that runs such a layer: the third block, on the main thread (with
    checkpointing the autograd thread runs them too). Before 2.9 it took that 1 MiB inside each call (``hidden_bytes``
    gives it); since 2.11 it shares the block of cuBLAS.

    Without ``chosen`` the size is 2 x 4 MiB + 8 x 16 KiB, or 32 MiB on 9.0, since 2.12 on 10.x and 12.x, and since 2.14
    on 11.x. The environment variables ``CUBLAS_WORKSPACE_CONFIG`` and ``CUBLASLT_WORKSPACE_SIZE`` change it; they are
    not read.

    Source: cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``, ``setWorkspaceForHandle``,
    ``getCUDABlasLtWorkspace``; cuda/detail/DeviceThreadHandles.h. Pull requests 156495 (2.9), 168175 (2.11), 175344
    (2.12) and 189312 (2.14) of pytorch/pytorch.
    """
    release = torch_release()
    large = {9} if release < (2, 12) else {9, 10, 12} if release < (2, 14) else {9, 10, 11, 12}
    size = 32 * 2**20 if capability[0] in large else 2 * 4096 * 1024 + 8 * 16 * 1024
    size = size if chosen is None else chosen
    return (size, size, _LT_WORKSPACE_BYTES) if (2, 9) <= release < (2, 11) else (size, size)


# ---- the table

_Rule = Callable[..., tuple[int, ...]]


def _overloads(rules: Mapping[str, _Rule]) -> dict[Any, _Rule]:
    """Return the rules by overload, without operators that this torch does not have (fused RMS norm before 2.9).

    ``tests/memory/test_kernel_buffers.py`` pins each private name; seen in 2.6 to 2.14 unless said otherwise.
    """
    found = {}
    for name, rule in rules.items():
        operator, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, operator, None)
        if packet is not None:
            found[getattr(packet, overload or "default")] = rule
    return found


_KERNELS: dict[str, _Rule] = {
    "_scaled_dot_product_flash_attention": flash_forward,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,  # 2.9 and later
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "_unsafe_index_put": _index_put,
    "_foreach_norm.Scalar": _foreach_norm,
    "sum": reduce_sum,
    "sum.dim_IntList": reduce_sum,
    "mean": reduce_sum,
    "mean.dim": reduce_sum,
    "linalg_vector_norm": reduce_norm,
    "amax": reduce_extreme,
    "amin": reduce_extreme,
}
_KERNELS_BEFORE_2_9: dict[str, _Rule] = {"addmm": _linear}
_RULES = _overloads(_KERNELS if torch_release() >= (2, 9) else _KERNELS | _KERNELS_BEFORE_2_9)
