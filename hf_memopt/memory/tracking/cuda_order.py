"""Where CUDA's operators allocate in another order than meta tensors show, or in place: tables by operator."""

import torch

_aten = torch.ops.aten
COPY = -1  # of the first argument, where that is not contiguous; freed when the operator returns
ORDERS = {  # of the results of an operator; all others allocate them from the first to the last
    _aten.native_dropout.default: (1, 0),  # Dropout.cu, ``dropout_cuda``
    _aten.native_layer_norm.default: (COPY, 0, 1, 2),  # layer_norm_kernel.cu, ``layer_norm_cuda``
}
PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}  # of cuBLAS
# Autograd's engine adds gradients up in place (input_buffer.cpp, ``accumulate``), and so do the nodes of gather, topk,
# index_select, masked_select and indexing (FunctionsManual.cpp), except where ``isTensorSubclassLike`` says that a
# tensor is not plain: a meta tensor, and any tensor while a mode is on (TensorSubclassLikeUtils.h).
IN_PLACE = {_aten.add, _aten.scatter_add, _aten.scatter, _aten.index_add, _aten.masked_scatter, _aten.index_put}
