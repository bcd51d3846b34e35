"""Where CUDA's operators allocate in another order than meta tensors do, or in place: tables by operator."""

from __future__ import annotations

import torch

_aten = torch.ops.aten

COPY = -1  # of the first argument, where that is not contiguous; freed when the operator returns
ORDERS: dict[object, tuple[int, ...]] = {
    _aten.native_dropout.default: (1, 0),  # Dropout.cu, ``dropout_cuda``
    _aten.native_layer_norm.default: (COPY, 0, 1, 2),  # layer_norm_kernel.cu, ``layer_norm_cuda``
}
"""By operator, which of its results it allocates first, second, and so on; of all others in the order of results."""

PRODUCTS = frozenset(getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"))
"""What cuBLAS computes: a thread's first one allocates the workspace of its handle, after the result."""

_OF_GRADIENTS = _aten.add.Tensor
IN_PLACE = frozenset(
    {
        _OF_GRADIENTS,  # input_buffer.cpp, ``accumulate``
        _aten.scatter_add.default,  # FunctionsManual.cpp, ``gather_backward``; the others are named alike
        _aten.scatter.src,
        _aten.index_add.default,
        _aten.masked_scatter.default,
        _aten._unsafe_index_put.default,
    }
)
"""What autograd's engine does in place. With tensors that are not plain, or under a mode, it does so out of place:
``isTensorSubclassLike`` is true of meta tensors, and of all tensors while a mode is on (TensorSubclassLikeUtils.h)."""


def takes_the_block(func: object, operand: torch.Tensor, result: torch.Tensor, *, is_of_this_node: bool) -> bool:
    """Return whether a plain operand of autograd's engine would hold the result, if nothing else refers to it.

    A view does not: its base is alive. What is dense does: the result has the same strides then. The engine adds the
    gradients of several uses after the node that gives the last of them, so the first operand is another node's.
    """
    if operand._is_view() or (func is _OF_GRADIENTS and is_of_this_node):
        return False
    strides = zip(operand.shape, operand.stride(), result.stride(), strict=True)
    return all(own == others for length, own, others in strides if length > 1)
