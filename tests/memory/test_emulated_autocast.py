"""Emulated autocast against torch's own on the CPU, call by call: the dtype of what each returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_semantics import HostSemantics
from torch import nn

BF16 = torch.bfloat16


def draw(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.1


def square() -> torch.Tensor:
    return draw(4, 4) + 4 * torch.eye(4)


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "_addmm_activation": (torch._addmm_activation, (draw(4), draw(4, 4), draw(4, 4))),
    "addmm": (torch.addmm, (draw(4), draw(4, 4), draw(4, 4))),
    "Tensor.addmm": (torch.Tensor.addmm, (draw(4), draw(4, 4), draw(4, 4))),
    "bmm": (torch.bmm, (draw(2, 4, 4), draw(2, 4, 4))),
    "conv1d": (F.conv1d, (draw(1, 4, 8), draw(4, 4, 3))),
    "conv1d.padding": (lambda x, w: F.conv1d(x, w, padding="same"), (draw(1, 4, 8), draw(4, 4, 3))),
    "conv_tbc": (torch.conv_tbc, (draw(8, 1, 4), draw(3, 4, 4), draw(4))),
    "conv_transpose2d": (F.conv_transpose2d, (draw(1, 4, 8, 8), draw(4, 4, 3, 3))),
    "linalg_vecdot": (torch.linalg.vecdot, (draw(4, 4), draw(4, 4))),
    "linear": (F.linear, (draw(4, 4), draw(4, 4), draw(4))),
    "nn.Linear": (lambda x: nn.Linear(4, 4)(x), (draw(4, 4),)),
    "matmul": (torch.matmul, (draw(4, 4), draw(4, 4))),
    "@": (lambda a, b: a @ b, (draw(4, 4), draw(4, 4))),
    "prelu": (F.prelu, (draw(2, 4), draw(4))),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (draw(1, 2, 4, 8),) * 3),
    "binary_cross_entropy": (F.binary_cross_entropy, (draw(4).clamp(0, 1), draw(4).clamp(0, 1))),
    "cdist": (torch.cdist, (draw(4, 4), draw(4, 4))),
    "cross_entropy_loss": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)), (draw(4, 4),)),
    "grid_sampler": (lambda x, g: F.grid_sample(x, g, align_corners=False), (draw(1, 2, 4, 4), draw(1, 4, 4, 2))),
    "linalg_inv": (torch.linalg.inv, (square(),)),
    "linalg_svd": (torch.linalg.svd, (square(),)),
    "inverse": (torch.inverse, (square(),)),
    "Tensor.inverse": (torch.Tensor.inverse, (square(),)),
    "mse_loss": (F.mse_loss, (draw(4), draw(4))),
    "nll_loss2d": (lambda x: F.nll_loss(x, torch.zeros(1, 4, 4, dtype=torch.int64)), (draw(1, 2, 4, 4),)),
    "polar": (torch.polar, (draw(4), draw(4))),
    "prod": (torch.prod, (draw(4),)),
    "prod.dim_int": (lambda x: x.prod(0), (draw(4, 4),)),
    "quantile": (lambda x: torch.quantile(x, 0.5), (draw(4),)),
    "reflection_pad1d": (lambda x: torch._C._nn.reflection_pad1d(x, (1, 1)), (draw(1, 4, 4),)),
    "view_as_complex": (torch.view_as_complex, (draw(4, 2),)),
    "cat": (lambda *x: torch.cat(x), (draw(4), draw(4))),
    "stack": (lambda *x: torch.stack(x), (draw(4), draw(4))),
    "index_copy": (lambda x, y: x.index_copy(0, torch.tensor([1]), y), (draw(4, 4), draw(1, 4))),
    # on no list of the CPU
    "softmax": (lambda x: F.softmax(x, -1), (draw(4, 4),)),
    "sum": (torch.sum, (draw(4),)),
    "pow": (lambda x: x**2, (draw(4),)),
    "add": (torch.add, (draw(4), draw(4))),
    "layer_norm": (lambda x: F.layer_norm(x, [4]), (draw(4, 4),)),
    "gelu": (F.gelu, (draw(4),)),
}
MIXED = {"add", "cat", "stack", "matmul", "linear"}  # whose arguments may differ in dtype under autocast


def dtypes(result: Any) -> list[torch.dtype]:
    return [item.dtype for item in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", CALLS)
def test_output_has_the_dtype_that_real_autocast_gives(name: str, cache: bool) -> None:
    call, tensors = CALLS[name]
    given = [tensors, tuple(tensor.to(BF16) for tensor in tensors)]
    if name in MIXED:
        given.append((tensors[0], *(tensor.to(BF16) for tensor in tensors[1:])))
    for arguments in given:
        semantics = HostSemantics(autocast=BF16, cache=cache)
        try:
            with torch.autocast("cpu", dtype=BF16, cache_enabled=cache):
                expected = call(*arguments)
        except RuntimeError as error:  # polar and the like take no mixed or 16-bit arguments anywhere
            message = re.escape(str(error).splitlines()[0])
            with semantics, semantics.autocast_region(), pytest.raises(RuntimeError, match=message):
                call(*arguments)
            continue
        with semantics, semantics.autocast_region():
            found = call(*arguments)
        assert dtypes(found) == dtypes(expected)
