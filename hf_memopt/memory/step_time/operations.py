"""What the ATen operations of a step cost a GPU: floating-point operations, bytes, kernels and launches.

``StorageTracker`` calls ``operation_of`` for each operation of a forward and backward pass while it records their
allocations, so one recording gives bytes and seconds. The order of operations does not matter to their price
(``prices``), and a pass of many layers has 50 to 300 different ones: it is kept as a ``Counter``.

Rules for the bytes that a kernel moves: each input is read once (a dimension that is expanded is not counted), each
output is written once, and what is written in place is read as well. Embeddings and gathers read the rows that they
return and not the table. The backward of a layer norm reads its inputs twice, for the input's gradient and again for
those of weight and bias. Causal fused attention skips half of the products.

Limitations: bytes that a later kernel finds in the GPU's cache; the workspace of split sums; of float32 experts, whose
product is recorded as one for all rows, the weights of all but one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["FOREACH_CHUNK", "FOREACH_CHUNKS_PER_KERNEL", "Operation", "operation_of"]

FOREACH_CHUNK = 65_536  # elements, aten/src/ATen/native/cuda/MultiTensorApply.cuh
FOREACH_CHUNKS_PER_KERNEL = 320
_LAUNCHES_PER_TENSOR = 0.05  # of a foreach call: it builds its list of addresses in C++
_LAUNCHES_OF_EXTENSIONS = 3  # an operation of bitsandbytes: Python, checks, ctypes

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_int_mm", "convolution", "convolution_backward", "_grouped_mm"}
_NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view"}
_BY_ROWS = {"embedding", "index", "gather", "index_select", "nll_loss_forward"}
_WITHOUT_READING = {"fill_", "zero_", "copy_"}  # overwrite what they are called on
_CREATE = ("new_", "zeros_like", "ones_like", "full_like")  # use an input for its dtype and shape only
_IS_CAUSAL = {"flash_attention": 4, "efficient_attention": 6, "cudnn_attention": 6}  # its place among the arguments
_IS_CAUSAL_BACKWARD = {"flash_attention": 11, "efficient_attention": 11, "cudnn_attention": 14}


class Operation(NamedTuple):
    """The cost of one operation.

    Attributes:
        kind: ``"product"``, ``"attention"`` (fused), ``"memory"``, ``"view"`` or ``"pcie"`` (a copy from or to the
            host).
        dtype: of its first tensor: ``"fp16"``, ``"bf16"``, ``"int8"``, and ``"fp32"`` for all others.
        in_backward: whether C++ code of the backward pass launches it, and not Python.
        flops: floating-point operations of products; 0 for other operations.
        moved_bytes: read and written in the GPU's memory, or over PCIe.
        kernels: that it starts on the GPU.
        launches: what it costs the host, in launches of one kernel.
    """

    kind: str
    dtype: str = "fp32"
    in_backward: bool = False
    flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 1
    launches: float = 1.0


VIEW = (Operation("view", kernels=0), Operation("view", kernels=0, in_backward=True))
"""The cost of a view: by ``in_backward``."""


class _Traits(NamedTuple):
    """The properties of an operator that do not depend on its arguments."""

    name: str
    is_view: bool  # or allocates without a kernel
    written: tuple[int, ...]  # places of the arguments that are written in place
    reads_written: bool
    by_rows: bool
    creates: bool
    kind: str
    is_causal: int  # place of the argument; -1 without
    launches: int


@cache
def _traits(func: Any) -> _Traits:
    name, schema = func._overloadpacket.__name__, func._schema
    arguments = enumerate(schema.arguments)
    written = tuple(place for place, item in arguments if item.alias_info is not None and item.alias_info.is_write)
    views = not written and any(item.alias_info is not None for item in schema.returns)
    kernel, is_causal = "memory", -1
    if name in _PRODUCTS:
        kernel = "product"
    elif name.startswith("_scaled_dot_product_") and "attention" in name:
        kernel, which = "attention", name.removeprefix("_scaled_dot_product_").removesuffix("_backward")
        is_causal = (_IS_CAUSAL_BACKWARD if name.endswith("_backward") else _IS_CAUSAL).get(which, -1)
    return _Traits(
        name=name,
        is_view=views or name in _NO_KERNEL,
        written=written,
        reads_written=name not in _WITHOUT_READING,
        by_rows=name in _BY_ROWS,
        creates=name.startswith(_CREATE),
        kind=kernel,
        is_causal=is_causal,
        launches=1 if func.namespace == "aten" else _LAUNCHES_OF_EXTENSIONS,
    )


def operation_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    *,
    flops: int = 0,
    in_backward: bool = False,
    on_host: frozenset[int] | set[int] = frozenset(),
) -> Operation:
    """Return the cost of an operation that has just run on meta tensors.

    Args:
        func: the ATen operator.
        args: its arguments.
        kwargs: those given by name.
        out: what it returned.
        flops: floating-point operations, by torch's formulas.
        in_backward: whether autograd's C++ code called it.
        on_host: the addresses (``_cdata``) of storages that represent memory of the host.
    """
    traits = _traits(func)
    if traits.is_view and not (on_host and traits.name in _NO_KERNEL):
        return VIEW[in_backward]
    tensors = _tensors((*args, *kwargs.values()) if kwargs else args)
    if on_host:
        moved = sum(_bytes(tensor) for tensor in tensors if tensor.untyped_storage()._cdata in on_host)
        if moved:
            return Operation("pcie", in_backward=in_backward, moved_bytes=moved)
    results = _tensors(out if isinstance(out, (tuple, list)) else (out,))
    first = tensors[0] if tensors else results[0] if results else None
    if traits.is_view or first is None or (tensors and not any(t.is_meta for t in (*tensors, *results))):
        return VIEW[in_backward]
    written_bytes = 0 if traits.written else sum(map(_bytes, results))
    if traits.by_rows:
        moved = 2 * written_bytes + sum(map(_bytes, tensors[1:]))
    elif traits.creates:
        moved = written_bytes
    else:
        moved = sum({id(tensor): _bytes(tensor) for tensor in tensors}.values()) + written_bytes
        if traits.reads_written:
            moved += sum(map(_bytes, _tensors(args[place] for place in traits.written if place < len(args))))
        if traits.name == "native_layer_norm_backward":
            moved += sum(map(_bytes, tensors[:2]))
    kernels, launches = 1, float(traits.launches)
    if traits.name.startswith("_foreach"):
        chunks = sum(-(-tensor.numel() // FOREACH_CHUNK) for tensor in args[0])
        kernels = -(-chunks // FOREACH_CHUNKS_PER_KERNEL)
        launches = kernels + _LAUNCHES_PER_TENSOR * len(args[0])
    work = float(flops) if traits.kind != "memory" else 0.0
    if traits.kind == "attention" and args[traits.is_causal : traits.is_causal + 1] == (True,):
        work /= 2
    dtype = _DTYPES.get(first.dtype, "fp32")
    return Operation(traits.kind, dtype, in_backward, work, moved, kernels, launches)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the values and in the lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that there are to read: an expanded dimension, whose stride is 0, counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, strides, strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()
