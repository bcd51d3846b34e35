"""Operators as one row each: what is called, with tensors of one device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def inputs(device: str) -> SimpleNamespace:
    """Return fresh tensors of a device; ``x`` and ``w`` ask for gradients."""
    draw = torch.Generator().manual_seed(0)
    t = {
        "x": torch.randn(6, 10, generator=draw),
        "w": torch.randn(7, 10, generator=draw),
        "i": torch.tensor([0, 2, 2, 5]),
        "y": torch.tensor([1, 2, -100, 3, 0, 6]),
        "image": torch.randn(2, 4, 8, 8, generator=draw),
        "q": torch.randn(2, 4, 5, 8, generator=draw),
        "k": torch.randn(2, 2, 5, 8, generator=draw),
        "c": torch.rand(6, 10, generator=draw) + 0.5,
    }
    moved = {name: tensor.clone().to(device) for name, tensor in t.items()}
    for name in ("x", "w", "image", "q", "k"):
        moved[name].requires_grad_()
    return SimpleNamespace(**moved, device=device)


def in_place(change: Callable[[torch.Tensor, SimpleNamespace], Any]) -> Callable[[SimpleNamespace], torch.Tensor]:
    """Return the row of an operator that changes a copy of ``x``."""

    def call(t: SimpleNamespace) -> torch.Tensor:
        changed = t.x.clone()
        change(changed, t)
        return changed

    return call


def filled(call: Callable[[SimpleNamespace, torch.Tensor], Any], *shape: int) -> Callable[[SimpleNamespace], Any]:
    """Return the row of an operator that writes into ``out=``."""

    def run(t: SimpleNamespace) -> torch.Tensor:
        out = torch.empty(shape, device=t.device)
        with torch.no_grad():
            call(t, out)
        return out

    return run


def attention(backend: SDPBackend, dtype: torch.dtype, **settings: Any) -> Callable[[SimpleNamespace], Any]:
    """Return the row of one kind of attention; the CPU computes it the plain way."""

    def run(t: SimpleNamespace) -> torch.Tensor:
        kinds = [backend] if t.device == "cuda" else [SDPBackend.MATH]
        k = t.k.repeat_interleave(2, 1)
        masks = {"attn_mask": (t.c[None, None, :5, :5] > 0.7).expand(2, 4, 5, 5)} if settings.get("mask") else {}
        with sdpa_kernel(kinds):
            q, k = t.q.to(dtype), k.to(dtype)
            return F.scaled_dot_product_attention(q, k, k, is_causal=settings.get("causal", False), **masks)

    return run


def _histogram(numbers: torch.Tensor) -> torch.Tensor:
    """Return a histogram; the CPU has none of integers."""
    return torch.histc(numbers if numbers.is_cuda else numbers.float(), 4, 0, 6).to(numbers.dtype)


ROWS: dict[str, Callable[[SimpleNamespace], Any]] = {
    # products
    "linear": lambda t: F.linear(t.x, t.w),
    "linear with bias": lambda t: F.linear(t.x, t.w, torch.ones(7, device=t.device)),
    "linear in half": lambda t: F.linear(t.x.half(), t.w.half()),
    "linear in bfloat16": lambda t: F.linear(t.x.bfloat16(), t.w.bfloat16()),
    "mm": lambda t: t.x @ t.w.t(),
    "mm out": filled(lambda t, out: torch.mm(t.x, t.w.t(), out=out), 6, 7),
    "addmm out": filled(lambda t, out: torch.addmm(torch.ones(7, device=t.device), t.x, t.w.t(), out=out), 6, 7),
    "addmm_": in_place(lambda x, t: x.addmm_(t.x[:, :7], t.w, beta=0.5)),
    "mv": lambda t: t.x @ torch.ones(10, device=t.device),
    "dot": lambda t: torch.dot(t.x[0], t.w[0]),
    "outer": lambda t: torch.outer(t.x[0], t.w[0]),
    "bmm": lambda t: torch.bmm(t.x[None], t.w.t()[None]),
    "baddbmm": lambda t: torch.baddbmm(torch.ones(1, 6, 7, device=t.device), t.x[None], t.w.t()[None], beta=0.5),
    "einsum": lambda t: torch.einsum("ab,cb->ac", t.x, t.w),
    "convolution": lambda t: F.conv2d(t.image, torch.ones(3, 4, 3, 3, device=t.device), padding=1),
    "convolution in 1 dimension": lambda t: F.conv1d(t.x[None], torch.ones(3, 6, 3, device=t.device)),
    "depthwise convolution": lambda t: F.conv2d(t.image, torch.ones(4, 1, 3, 3, device=t.device), groups=4),
    # losses and softmax
    "cross entropy": lambda t: F.cross_entropy(F.linear(t.x, t.w), t.y),
    "cross entropy in half": lambda t: F.cross_entropy(F.linear(t.x.half(), t.w.half()), t.y),
    "cross entropy, sum": lambda t: F.cross_entropy(F.linear(t.x, t.w), t.y, reduction="sum"),
    "cross entropy, smooth": lambda t: F.cross_entropy(F.linear(t.x, t.w), t.y, label_smoothing=0.1),
    "mse": lambda t: F.mse_loss(t.x, t.c),
    "bce": lambda t: F.binary_cross_entropy_with_logits(t.x, (t.c > 1).float()),
    "kl": lambda t: F.kl_div(t.x.log_softmax(-1), t.c, reduction="batchmean"),
    "softmax": lambda t: t.x.softmax(-1),
    "softmax of half in float32": lambda t: t.x.half().softmax(-1, dtype=torch.float32),
    "log softmax of half in float32": lambda t: t.x.half().log_softmax(-1, dtype=torch.float32),
    "logsumexp": lambda t: t.x.logsumexp(-1),
    "log sigmoid": lambda t: F.logsigmoid(t.x),
    # norms and attention
    "layer norm": lambda t: F.layer_norm(t.x, (10,), t.w[0]),
    "rms norm": lambda t: F.rms_norm(t.x, (10,), t.w[0], 1e-5),
    "rms norm in bfloat16": lambda t: F.rms_norm(t.x.bfloat16(), (10,), t.w[0].bfloat16(), 1e-5),
    "rms norm without weight": lambda t: F.rms_norm(t.x, (10,)),
    "group norm": lambda t: F.group_norm(t.image, 2),
    "batch norm": lambda t: F.batch_norm(t.image, t.c[0, :4].clone(), t.c[1, :4].clone(), training=True),
    "efficient attention": attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "efficient attention, causal": attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32, causal=True),
    "efficient attention with mask": attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32, mask=True),
    "flash attention": attention(SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "flash attention, causal": attention(SDPBackend.FLASH_ATTENTION, torch.float16, causal=True),
    # pointwise
    "gelu": lambda t: F.gelu(t.x),
    "gelu, tanh": lambda t: F.gelu(t.x, approximate="tanh"),
    "silu": lambda t: F.silu(t.x),
    "silu_": in_place(lambda x, t: F.silu(x, inplace=True)),
    "relu_": in_place(lambda x, t: x.relu_()),
    "tanh": lambda t: t.x.tanh(),
    "sigmoid": lambda t: t.x.sigmoid(),
    "softplus": lambda t: F.softplus(t.x),
    "exp": lambda t: t.x.exp(),
    "sqrt": lambda t: t.c.sqrt(),
    "rsqrt": lambda t: t.c.rsqrt(),
    "abs": lambda t: t.x.abs(),
    "clamp": lambda t: t.x.clamp(-1, 1),
    "clamp_min_": in_place(lambda x, t: x.clamp_min_(0.5)),
    "lerp": lambda t: torch.lerp(t.x, t.c, 0.3),
    "addcmul": lambda t: torch.addcmul(t.x, t.c, t.c, value=0.5),
    "addcdiv_": in_place(lambda x, t: x.addcdiv_(t.c, t.c, value=-0.1)),
    "maximum": lambda t: torch.maximum(t.x, t.c),
    "where": lambda t: torch.where(t.x > 0, t.x, t.c),
    "masked_fill": lambda t: t.x.masked_fill(t.x > 0, 5.0),
    "nan_to_num": lambda t: (t.x / 0).nan_to_num(0.0, 1.0, -1.0),
    "isfinite": lambda t: (t.x / 0).isfinite(),
    "bitwise": lambda t: (t.x > 0) & ~(t.c > 1),
    "compare out": filled(lambda t, out: torch.gt(t.x, t.c, out=out), 6, 10),
    "add out": filled(lambda t, out: torch.add(t.x, t.c, alpha=2, out=out), 0),
    "foreach add_": in_place(lambda x, t: torch._foreach_add_([x, x[0]], 1.0)),
    "foreach mul": lambda t: torch._foreach_mul([t.c, t.x], 0.5),
    "foreach norm": lambda t: torch.stack(torch._foreach_norm([t.x, t.w])),
    # wrapped numbers
    "times a number": lambda t: t.x * 2.1,
    "half times a number": lambda t: t.x.half() * 2.1,
    "bfloat16 plus a number": lambda t: t.x.bfloat16() + 1e-3,
    "integers times a number": lambda t: t.i * 2.5,
    "float64 where number": lambda t: torch.where(t.x > 0, t.x.double(), 0.1),
    "number where number": lambda t: torch.where(t.x > 0, 1, 0),
    "number minus": lambda t: 1 - t.x,
    "number over": lambda t: 1 / t.c,
    "number to the power": lambda t: 2.0**t.x,
    "1 to the power": lambda t: 1**t.i,
    "to the power of a number": lambda t: t.c**2.5,
    "times no dimension": lambda t: t.x.half() * torch.tensor(2.1),
    "div_ by a number": in_place(lambda x, t: x.div_(3)),
    "floor division": lambda t: t.i // 2,
    "remainder": lambda t: t.i % 3,
    # sums and searches
    "sum": lambda t: t.x.sum(0),
    "sum of half": lambda t: t.x.half().sum(),
    "mean": lambda t: t.x.mean(-1, keepdim=True),
    "std": lambda t: t.x.std(),
    "var_mean": lambda t: torch.var_mean(t.x, -1),
    "norm": lambda t: t.x.norm(),
    "cumsum": lambda t: t.x.cumsum(1),
    "max": lambda t: t.x.max(-1),
    "amax": lambda t: t.x.amax(-1),
    "argmax": lambda t: t.x.argmax(-1),
    "median": lambda t: t.x.median(-1),
    "topk": lambda t: t.x.topk(3),
    "sort": lambda t: t.x.sort(),
    "argsort": lambda t: t.x.argsort(dim=-1, stable=True),
    "all": lambda t: (t.x > -9).all(),
    "any": lambda t: (t.x > 9).any(-1),
    "equal": lambda t: torch.tensor([torch.equal(t.x, t.x + 0), torch.equal(t.x, t.c)]),
    "isin": lambda t: torch.isin(t.y, t.i),
    "searchsorted": lambda t: torch.searchsorted(torch.arange(10.0, device=t.device), t.x),
    "histc": lambda t: torch.histc(t.x.detach(), 4, -1, 1),
    "histc of integers": lambda t: _histogram(t.i.int()),
    # shapes that depend on values
    "nonzero": lambda t: (t.x > 0).nonzero(),
    "where alone": lambda t: torch.where(t.x > 0),
    "masked_select": lambda t: t.x.masked_select(t.x > 0),
    "select by mask": lambda t: t.x[t.y != -100],
    "set by mask": in_place(lambda x, t: x.__setitem__(t.y != -100, 7.0)),
    "unique": lambda t: torch.unique(t.i, return_inverse=True, return_counts=True),
    "unique rows": lambda t: torch.unique(t.x.detach()[t.i], dim=0),
    "unique_consecutive": lambda t: torch.unique_consecutive(t.i),
    "bincount": lambda t: torch.bincount(t.i),
    "repeat_interleave": lambda t: torch.repeat_interleave(t.x[:4], t.i, 0),
    # indices and shapes
    "index": lambda t: t.x[t.i],
    "index_select": lambda t: t.x.index_select(0, t.i),
    "index_add_": in_place(lambda x, t: x.index_add_(0, t.i, t.c[:4])),
    "index_put_": in_place(lambda x, t: x.index_put_((t.i,), t.c[:4], accumulate=True)),
    "set a part": in_place(lambda x, t: x.__setitem__((slice(1, 3), slice(2, 5)), 7.0)),
    "gather": lambda t: t.x.gather(1, t.i[:, None].expand(4, 3)),
    "scatter_": in_place(lambda x, t: x.scatter_(1, t.y.clamp(min=0)[:, None], 1.0)),
    "scatter_add_": in_place(lambda x, t: x.scatter_add_(1, t.y.clamp(min=0)[:, None], t.c)),
    "embedding": lambda t: F.embedding(t.i, t.x, padding_idx=2),
    "one_hot": lambda t: F.one_hot(t.i, 8),
    "cat": lambda t: torch.cat([t.x, t.c]),
    "stack": lambda t: torch.stack([t.x, t.c], -1),
    "pad": lambda t: F.pad(t.x, (1, 2)),
    "roll": lambda t: t.x.roll(1, 0),
    "flip": lambda t: t.x.flip(0),
    "tril": lambda t: t.x.tril(),
    "triu_": in_place(lambda x, t: x.triu_(1)),
    "arange": lambda t: torch.arange(2, 12, 3, device=t.device),
    "linspace": lambda t: torch.linspace(0, 1, 5, device=t.device),
    "full": lambda t: torch.full((2, 3), float("-inf"), device=t.device),
    "copy to strides": lambda t: torch.empty(10, 6, device=t.device).t().copy_(t.x),
    "to another dtype": lambda t: t.x.to(torch.float64),
    "contiguous": lambda t: t.x.t().contiguous(),
    "by vmap": lambda t: torch.vmap(lambda a, b: a * b.sum())(t.x, t.c),
    "interpolate": lambda t: F.interpolate(t.image, scale_factor=2, mode="bilinear"),
    "max pooling": lambda t: F.max_pool2d(t.image, 2),
    "average pooling": lambda t: F.adaptive_avg_pool2d(t.image, 1),
}
