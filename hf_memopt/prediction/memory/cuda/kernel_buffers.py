"""The memory that a CUDA kernel allocates inside one ATen operator, and that the cuBLAS handles keep.

A tracker sees the inputs and outputs of operators only. The buffers inside one operator are computed here from its
arguments, by the rules of the CUDA source; each rule names its file and function. The figures are requested bytes,
which the allocator rounds up to 512 bytes for each block.

Seen: the headers of torch 2.13 (memory-efficient attention, reductions, cub) and the ``.cu`` files of main between 2.8
and 2.14. Where releases differ, ``hidden_bytes`` gives 2.13, but for the linear layers before 2.9;
``attention_kernel`` and ``workspace_bytes`` follow the installed release.

An operator without a rule is in ``no_buffers.csv``, with the line of torch 2.6.0 from which on to read what it
allocates: its outputs, and what else is known and not counted. Of one that is in neither an estimate says so.

Limitations: what that table says is not counted, above all the workspace that cuDNN chooses for convolutions and
attention; the deterministic mode (``torch.use_deterministic_algorithms``).

The rules of attention are in ``attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hf_memopt.plain_data import packaged_rows
from hf_memopt.prediction.memory.cuda.attention import (
    TORCH_RELEASE,
    copy_bytes,
    divide_up,
    efficient_backward,
    efficient_forward,
    flash_backward,
    flash_forward,
)
from hf_memopt.training.devices import Chip

_HALF = (torch.float16, torch.bfloat16)
_LT_WORKSPACE_BYTES = 2**20


def hidden_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, *, chip: Chip) -> tuple[int, ...]:
    """Return the blocks that the CUDA kernel of one operator allocates and frees before it returns.

    Where the kernel works in phases, these are the blocks of the phase that holds most. Of tensors only shape, strides
    and dtype are read. Reductions and flash attention split their work by the multiprocessors of the chip.
    """
    rule = _RULES.get(func)
    return () if rule is None else tuple(size for size in rule(chip, out, *args, **kwargs) if size)


# ---- softmax


def _softmax_backward(chip: Chip, out: Any, grad: Tensor, output: Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """Return the product of gradient and output, as large as the gradient: of attention's scores a whole tensor.

    Source: SoftMax.cu, ``softmax_backward_cuda_out``, ``host_softmax_backward``, which copies what is not contiguous.
    """
    return grad.numel() * grad.element_size(), copy_bytes(grad), copy_bytes(output)


def _safe_softmax(chip: Chip, out: Tensor, source: Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """Return the plain softmax, and what is masked. Source: transformers/attention.cpp, ``_safe_softmax`` (2.5)."""
    return out.numel() * out.element_size(), source.numel(), source.numel() // max(source.shape[-1], 1)


def _logsumexp(chip: Chip, out: Tensor, source: Tensor, *_: Any, **__: Any) -> tuple[int, ...]:
    """Return the exponentials, and the largest of each sum. Source: ReduceOps.cpp, ``logsumexp_out_impl``."""
    return source.numel() * out.element_size(), out.numel() * out.element_size()


# ---- norms and embeddings


def _norm_backward(
    chip: Chip, out: Any, grad: Tensor, source: Tensor, normalized_shape: Sequence[int], *_: Any
) -> tuple[int, ...]:
    """Return the partial sums of the weights' gradients by groups of rows: only for very many narrow rows.

    Source: layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel`` (2.8 and later; none before).
    """
    columns = math.prod(normalized_shape)
    rows = source.numel() // columns
    copies = (copy_bytes(grad), copy_bytes(source))
    of_weights = [gradient for gradient in out[1:] if gradient is not None]
    if not of_weights or rows <= 64 * 1024 or columns // 32 >= chip.multiprocessors // 2:
        return copies
    groups = min(32 * 1024 // divide_up(columns, 32), divide_up(rows, 32))
    size = of_weights[0].element_size()
    summed = _reduction_bytes(chip, Layout((groups, columns), (columns, 1), 1), size=4, vector=4)
    return (*copies, *(len(of_weights) * (groups * columns * size,)), columns * size, *summed)


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


def _masked_scatter(chip: Chip, out: Any, source: Tensor, mask: Tensor, *_: Any) -> tuple[int, ...]:
    """Return where each element comes from, and the mask in full. Source: IndexKernel.cpp, ``masked_scatter__cuda``."""
    is_full = mask.shape == source.shape and mask.is_contiguous()
    return (8 * source.numel(), *(() if is_full else (source.numel(),)))


def _masked_select(chip: Chip, out: Tensor, source: Tensor, mask: Tensor, *_: Any) -> tuple[int, ...]:
    """Return the positions of what is chosen. Source: IndexKernel.cpp, ``masked_select_out_cuda_impl``: ``nonzero``."""
    return (8 * max(mask.dim(), 1) * out.numel(),)


def _scatter_mean(
    chip: Chip, out: Tensor, source: Tensor, dim: int, index: Tensor, values: Tensor, reduce: str, **_: Any
) -> tuple[int, ...]:
    """Return ones, their count and where it is zero, of a mean. Source: TensorAdvancedIndexing.cpp:1945 (2.6)."""
    ones, count = (each.numel() * out.element_size() for each in (values, out))
    return (ones, count, out.numel()) if reduce == "mean" else ()


def _ctc_loss_backward(chip: Chip, out: Any, *given: Any, **_: Any) -> tuple[int, ...]:
    """Return a second table of the size of ``log_alpha``. Source: LossCTC.cu, ``ctc_loss_backward_gpu_template``."""
    return (given[6].numel() * given[6].element_size(),)


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


# ---- sums, means, norms and extrema

# A reduction with few outputs would keep only a few multiprocessors busy. So several blocks of threads share an output:
# each writes its partial result into a staging buffer in global memory, and the last one, found by a semaphore, adds
# them up. The rules are those of native/cuda/Reduce.cuh. Softmax, sorts and scans have other kernels.


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


def _reduce_sum(
    chip: Chip, out: Tensor, source: Tensor, dim: Any = None, *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> tuple[int, ...]:
    """Return a copy in the result's dtype, unless 16 bits give float32, and the buffers of ``_reduction_bytes``.

    Source: ReduceOpsUtils.h, ``make_reduction``; ReduceSumProdKernel.cu (vectors of 8 for 16 bits since 2.10).
    """
    kept_type = source.dtype is out.dtype or (source.dtype in _HALF and out.dtype is torch.float32)
    cast = 0 if kept_type else source.numel() * out.element_size()
    size = 8 if out.element_size() == 8 else 4
    vector = 8 if source.dtype in _HALF else 4
    return (cast, *_reduction_bytes(chip, Layout.of(source, _dims(dim)), size=size, vector=vector))


def _convolution_backward(chip: Chip, out: Any, grad: Tensor, *_: Any) -> tuple[int, ...]:
    """Return the buffers of the bias's gradient, a sum over all but the channels. Source: Convolution.cpp."""
    return () if out[2] is None else _reduce_sum(chip, out[2], grad, [dim for dim in range(grad.dim()) if dim != 1])


def _reduce_norm(
    chip: Chip, out: Tensor, source: Tensor, ord: Any = 2, dim: Any = None, *_: Any, **__: Any
) -> tuple[int, ...]:
    size = 8 if out.dtype is torch.float64 else 4
    return _reduction_bytes(chip, Layout.of(source, _dims(dim)), size=size, vector=4)


def _reduce_extreme(chip: Chip, out: Tensor, source: Tensor, dim: Any = (), *_: Any, **__: Any) -> tuple[int, ...]:
    return _reduction_bytes(chip, Layout.of(source, _dims(dim)), size=source.element_size(), vector=4)


def _dims(dim: Any) -> Sequence[int]:
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


def _reduction_bytes(chip: Chip, layout: Layout, *, size: int, vector: int) -> tuple[int, ...]:
    """Return the staging buffer and the semaphores of a reduction whose outputs are too few to fill the GPU.

    The buffer is generous: torch sizes it for every output times the threads of a block. The gradient of a bias of
    4,096 elements over 4,096 tokens takes 108 MiB on an A100.

    An accumulator has ``size`` bytes, a vector load along reduced elements ``vector`` elements.

    Source: native/cuda/Reduce.cuh, ``setReduceConfig``, ``ReduceConfig::global_memory_size``, ``semaphore_size``
    (2.13 and 2.14; reductions of more than 2**31 bytes, which torch cuts first, are not cut here).
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
    large = {9} if TORCH_RELEASE < (2, 12) else {9, 10, 12} if TORCH_RELEASE < (2, 14) else {9, 10, 11, 12}
    size = 32 * 2**20 if capability[0] in large else 2 * 4096 * 1024 + 8 * 16 * 1024
    size = size if chosen is None else chosen
    return (size, size, _LT_WORKSPACE_BYTES) if (2, 9) <= TORCH_RELEASE < (2, 11) else (size, size)


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
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "logsumexp": _logsumexp,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,  # 2.9 and later
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _masked_scatter),
    **dict.fromkeys(("masked_select", "masked_scatter_backward"), _masked_select),
    "scatter_reduce.two": _scatter_mean,
    **dict.fromkeys(("_ctc_loss_backward", "_ctc_loss_backward.Tensor"), _ctc_loss_backward),
    "_foreach_norm.Scalar": _foreach_norm,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("sum", "sum.dim_IntList", "mean", "mean.dim"), _reduce_sum),
    "linalg_vector_norm": _reduce_norm,
    **dict.fromkeys(("all", "all.dim", "amax", "amin", "any", "any.dim", "max", "min"), _reduce_extreme),
}
_KERNELS_BEFORE_2_9: dict[str, _Rule] = {"addmm": _linear}
_RULES = _overloads(_KERNELS if TORCH_RELEASE >= (2, 9) else _KERNELS | _KERNELS_BEFORE_2_9)


# ---- operators without a rule

_NO_BUFFERS = frozenset(row["operator"] for row in packaged_rows("hf_memopt.prediction.memory.cuda", "no_buffers.csv"))


def unknown_operators(functions: Iterable[Any]) -> list[str]:
    """Return the names of operators of which nothing is known that their kernels allocate beside the outputs.

    Known are those with a rule or in ``no_buffers.csv``, the package's own, and what torch tags as pointwise: on CUDA
    that allocates its output alone (TensorIterator.cpp, ``compute_types``, ``allocate_or_resize_outputs``).
    """
    unknown = (func for func in functions if func not in _RULES and torch.Tag.pointwise not in func.tags)
    names = {func._schema.name.partition("::")[2] for func in unknown if func.namespace == "aten"}
    return sorted(name for name in names if name.rstrip("_") not in _NO_BUFFERS)
