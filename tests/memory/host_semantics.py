"""``CudaSemantics`` with the operations and the autocast lists of the CPU, for comparisons with real runs on a CPU.

Source of the lists: torch 2.13, ``aten/src/ATen/autocast_mode.h`` and ``autocast_mode.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.cuda.autocast import Policy, casts_of

_LOWER_PRECISION = """
    _addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
    conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu
    scaled_dot_product_attention
"""
_FLOAT32 = """
    _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
    binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
    cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
    fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn
    fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d
    fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss huber_loss
    inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig
    linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
    linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss
    multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile nanquantile.scalar
    nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod prod.dim_int qr quantile
    quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
    smooth_l1_loss soft_margin_loss stft stft.center svd trace triangular_solve triplet_margin_loss
    view_as_complex
"""  # softmax, sums, norms and layer_norm are not in it
_PROMOTE = "cat index_copy stack"
CPU_LISTS = {
    Policy.LOWER_PRECISION: _LOWER_PRECISION.split(),
    Policy.FLOAT32: _FLOAT32.split(),
    Policy.PROMOTE: _PROMOTE.split(),
}
CPU_CASTS = casts_of({operator: policy for policy, operators in CPU_LISTS.items() for operator in operators})


class HostSemantics(CudaSemantics):
    """Dropout and attention as the device has them, autocast by the lists of the CPU."""

    def __init__(self, *, autocast: torch.dtype | None = None, **options: Any) -> None:
        super().__init__(autocast=autocast, **options)
        # lists of numbers become tensors as everywhere: model code reads them again
        self._handlers = {torch.autograd.backward: self._backward, torch.tensor: self._tensor}
        self._casts = CPU_CASTS if autocast is not None else {}

    def _enable_torchs_autocast(self, dtype: torch.dtype) -> None:
        """Leave torch's own answers about CUDA alone."""


class RealAutocast(HostSemantics):
    """Torch's own autocast of the CPU in place of the emulated one."""

    def __init__(self, *, autocast: torch.dtype | None, cache: bool, **options: Any) -> None:
        super().__init__(**options)
        self._real = {"dtype": autocast, "cache_enabled": cache}

    @contextmanager
    def autocast_region(self) -> Iterator[None]:
        with torch.autocast("cpu", **self._real):
            yield
