"""What CUDA does differently: autocast against torch's own, dropout, softmax, cross entropy, attention, offload."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_semantics import CPU_LISTS, HostSemantics
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from hf_memopt.binding import versions as compat
from hf_memopt.memory.cuda import CudaSemantics, run_backward
from hf_memopt.memory.cuda.attention import TORCH_RELEASE
from hf_memopt.memory.cuda.autocast import OPERATORS, functions_of
from hf_memopt.memory.cuda.semantics import OPENED, cross_entropy
from hf_memopt.memory.recording.step import record_step, recording
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def meta(*shape: int, dtype: torch.dtype = FP32, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def allocated(run: Callable[[], Any], *given: torch.Tensor, in_region: bool = True, **options: Any) -> list[int]:
    """Return the deltas of a call under CUDA's semantics, whose inputs are counted before; its result stays alive."""
    tracker = StorageTracker()
    semantics = CudaSemantics(tracker=tracker, **options)
    for tensor in given:
        tracker.add(tensor)
    before = len(tracker.events)
    with recording(tracker, semantics):
        if in_region:
            with semantics.autocast_region():
                kept = run()
                end = len(tracker.events)
        else:
            kept = run()
            end = len(tracker.events)
    del kept
    return [delta for _, delta in tracker.events[before:end]]


class Operators(TorchDispatchMode):
    """The operators that run, by their names without namespace and overload."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


# ---- Autocast against torch's own on the CPU ------------------------------------------------------------------------


def draw(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.1


def square() -> torch.Tensor:
    return draw(4, 4) + 4 * torch.eye(4)


CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "_addmm_activation": (torch._addmm_activation, (draw(4), draw(4, 4), draw(4, 4))),
    "addbmm": (torch.addbmm, (draw(4, 4), draw(2, 4, 4), draw(2, 4, 4))),
    "addmm": (torch.addmm, (draw(4), draw(4, 4), draw(4, 4))),
    "Tensor.addmm": (torch.Tensor.addmm, (draw(4), draw(4, 4), draw(4, 4))),
    "baddbmm": (torch.baddbmm, (draw(2, 4, 4), draw(2, 4, 4), draw(2, 4, 4))),
    "bmm": (torch.bmm, (draw(2, 4, 4), draw(2, 4, 4))),
    "conv1d": (F.conv1d, (draw(1, 4, 8), draw(4, 4, 3))),
    "conv1d.padding": (lambda x, w: F.conv1d(x, w, padding="same"), (draw(1, 4, 8), draw(4, 4, 3))),
    "conv2d": (F.conv2d, (draw(1, 4, 8, 8), draw(4, 4, 3, 3))),
    "conv2d.padding": (lambda x, w: F.conv2d(x, w, padding="same"), (draw(1, 4, 8, 8), draw(4, 4, 3, 3))),
    "conv3d": (F.conv3d, (draw(1, 4, 4, 4, 4), draw(4, 4, 3, 3, 3))),
    "conv3d.padding": (lambda x, w: F.conv3d(x, w, padding="same"), (draw(1, 4, 4, 4, 4), draw(4, 4, 3, 3, 3))),
    "conv_tbc": (torch.conv_tbc, (draw(8, 1, 4), draw(3, 4, 4), draw(4))),
    "conv_transpose1d": (F.conv_transpose1d, (draw(1, 4, 8), draw(4, 4, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (draw(1, 4, 8, 8), draw(4, 4, 3, 3))),
    "conv_transpose3d": (F.conv_transpose3d, (draw(1, 4, 4, 4, 4), draw(4, 4, 3, 3, 3))),
    "linalg_vecdot": (torch.linalg.vecdot, (draw(4, 4), draw(4, 4))),
    "linear": (F.linear, (draw(4, 4), draw(4, 4), draw(4))),
    "nn.Linear": (lambda x: nn.Linear(4, 4)(x), (draw(4, 4),)),
    "matmul": (torch.matmul, (draw(4, 4), draw(4, 4))),
    "@": (lambda a, b: a @ b, (draw(4, 4), draw(4, 4))),
    "mm": (torch.mm, (draw(4, 4), draw(4, 4))),
    "prelu": (F.prelu, (draw(2, 4), draw(4))),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (draw(1, 2, 4, 8),) * 3),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (draw(1, 2, 4, 4, 4),)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (draw(1, 2, 4, 4, 4),)),
    "binary_cross_entropy": (F.binary_cross_entropy, (draw(4).clamp(0, 1), draw(4).clamp(0, 1))),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, (draw(4), draw(4))),
    "cdist": (torch.cdist, (draw(4, 4), draw(4, 4))),
    "cholesky_inverse": (torch.cholesky_inverse, (square(),)),
    "cosine_embedding_loss": (F.cosine_embedding_loss, (draw(4, 4), draw(4, 4), torch.ones(4))),
    "cross_entropy_loss": (lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)), (draw(4, 4),)),
    "grid_sampler": (lambda x, g: F.grid_sample(x, g, align_corners=False), (draw(1, 2, 4, 4), draw(1, 4, 4, 2))),
    "hinge_embedding_loss": (F.hinge_embedding_loss, (draw(4), torch.ones(4))),
    "huber_loss": (F.huber_loss, (draw(4), draw(4))),
    "kl_div": (lambda a, b: F.kl_div(a, b, reduction="sum"), (draw(4), draw(4))),
    "l1_loss": (F.l1_loss, (draw(4), draw(4))),
    "linalg_cond": (torch.linalg.cond, (square(),)),
    "linalg_eigvals": (torch.linalg.eigvals, (square(),)),
    "linalg_inv": (torch.linalg.inv, (square(),)),
    "linalg_qr": (torch.linalg.qr, (square(),)),
    "linalg_solve": (torch.linalg.solve, (square(), draw(4, 4))),
    "linalg_svd": (torch.linalg.svd, (square(),)),
    "linalg_svdvals": (torch.linalg.svdvals, (square(),)),
    "inverse": (torch.inverse, (square(),)),
    "Tensor.inverse": (torch.Tensor.inverse, (square(),)),
    "margin_ranking_loss": (F.margin_ranking_loss, (draw(4), draw(4), torch.ones(4))),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (draw(1, 2, 4, 4, 4),)),
    "mse_loss": (F.mse_loss, (draw(4), draw(4))),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, torch.zeros(4, dtype=torch.int64)), (draw(4, 4),)),
    "nanquantile": (lambda x: torch.nanquantile(x, 0.5), (draw(4),)),
    "nll_loss": (lambda x: F.nll_loss(x, torch.zeros(4, dtype=torch.int64)), (draw(4, 4),)),
    "nll_loss2d": (lambda x: F.nll_loss(x, torch.zeros(1, 4, 4, dtype=torch.int64)), (draw(1, 2, 4, 4),)),
    "pinverse": (torch.pinverse, (square(),)),
    "poisson_nll_loss": (F.poisson_nll_loss, (draw(4), draw(4))),
    "polar": (torch.polar, (draw(4), draw(4))),
    "prod": (torch.prod, (draw(4),)),
    "prod.dim_int": (lambda x: x.prod(0), (draw(4, 4),)),
    "quantile": (lambda x: torch.quantile(x, 0.5), (draw(4),)),
    "reflection_pad1d": (lambda x: torch._C._nn.reflection_pad1d(x, (1, 1)), (draw(1, 4, 4),)),
    "replication_pad2d": (lambda x: torch._C._nn.replication_pad2d(x, (1, 1, 1, 1)), (draw(1, 1, 4, 4),)),
    "smooth_l1_loss": (F.smooth_l1_loss, (draw(4), draw(4))),
    "soft_margin_loss": (F.soft_margin_loss, (draw(4), torch.ones(4))),
    "trace": (torch.trace, (square(),)),
    "triplet_margin_loss": (F.triplet_margin_loss, (draw(4, 4), draw(4, 4), draw(4, 4))),
    "view_as_complex": (torch.view_as_complex, (draw(4, 2),)),
    "cat": (lambda *x: torch.cat(x), (draw(4), draw(4))),
    "stack": (lambda *x: torch.stack(x), (draw(4), draw(4))),
    "index_copy": (lambda x, y: x.index_copy(0, torch.tensor([1]), y), (draw(4, 4), draw(1, 4))),
    # on no list of the CPU
    "softmax": (lambda x: F.softmax(x, -1), (draw(4, 4),)),
    "sum": (torch.sum, (draw(4),)),
    "exp": (torch.exp, (draw(4),)),
    "pow": (lambda x: x**2, (draw(4),)),
    "add": (torch.add, (draw(4), draw(4))),
    "layer_norm": (lambda x: F.layer_norm(x, [4]), (draw(4, 4),)),
    "gelu": (F.gelu, (draw(4),)),
}
MIXED = {"add", "cat", "stack", "matmul", "linear", "mm"}  # whose arguments may differ in dtype under autocast


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


def test_outside_of_a_region_nothing_is_cast() -> None:
    semantics = HostSemantics(autocast=BF16)
    x, w = draw(4, 4), draw(4, 4)
    with semantics:
        assert F.linear(x, w).dtype == FP32
        with semantics.autocast_region():
            assert F.linear(x, w).dtype == BF16
        assert F.linear(x, w).dtype == FP32


@pytest.mark.parametrize("cache", [True, False])
def test_cache_holds_the_copy_of_a_trainable_float32_leaf_and_of_nothing_else(cache: bool) -> None:
    """A weight used twice is cast once; frozen weights, activations and views are cast every time, as C++ does."""
    weight, frozen = nn.Parameter(meta(8, 8)), meta(8, 8)
    x = meta(2, 8, dtype=BF16)
    options = {"autocast": BF16, "cache": cache}
    times = 1 if cache else 2
    copies = {
        "trainable": (lambda: (F.linear(x, weight), F.linear(x, weight)), times),
        "frozen": (lambda: (F.linear(x, frozen), F.linear(x, frozen)), 2),
        "view": (lambda: (F.linear(x, weight[:]), F.linear(x, weight[:])), 2),
        "activation": (lambda: (F.linear(x, weight * 1), F.linear(x, weight * 1)), 2),
    }
    for run, count in copies.values():
        assert allocated(run, x, weight, frozen, **options).count(8 * 8 * 2) == count


def test_cache_is_gone_at_the_end_of_a_region() -> None:
    weight, x = nn.Parameter(meta(8, 8)), meta(2, 8, dtype=BF16)
    tracker = StorageTracker()
    semantics = CudaSemantics(autocast=BF16, tracker=tracker)
    tracker.add(x)
    tracker.add(weight)
    with recording(tracker, semantics), torch.no_grad():
        with semantics.autocast_region():
            F.linear(x, weight)
            assert [delta for _, delta in tracker.events[2:]] == [128, 32, -32]
        assert [delta for _, delta in tracker.events[2:]] == [128, 32, -32, -128]


def test_torch_is_told_of_the_region_and_forgets_it_after_errors() -> None:
    """Model code may ask ``torch.is_autocast_enabled("cuda")``; afterwards the answer is the user's again."""
    told = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    semantics = CudaSemantics(autocast=BF16)

    def fail() -> None:
        with semantics, semantics.autocast_region():
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == BF16
            raise KeyError("a model's error")

    with pytest.raises(KeyError):
        fail()
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == told


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_forgets_the_region_of_a_recomputation(reentrant: bool) -> None:
    told = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.device("meta"):
        model = tiny.bert()
    compat.enable_checkpointing(model, {"use_reentrant": reentrant})
    record_step(model, bert_batch(), StepSettings(precision="fp16"))
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == told


def bert_batch() -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask")
    return {**{name: meta(2, 12, dtype=torch.int64) for name in names}, "labels": meta(2, dtype=torch.int64)}


# ---- The lists of CUDA ----------------------------------------------------------------------------------------------

WITHOUT_A_FUNCTION = {
    "_thnn_fused_gru_cell",  # inside torch.gru_cell
    "_thnn_fused_lstm_cell",  # inside torch.lstm_cell
    *(f"fft_{name}{n}" for name in ("fft", "ifft", "rfft", "irfft") for n in ("", "2", "n")),  # torch.fft.fft and so on
    *("fft_hfft", "fft_ihfft"),
    "multilabel_margin_loss_forward",  # inside F.multilabel_margin_loss, which is on the list as well
}


def test_every_listed_operator_has_its_python_functions() -> None:
    names = {*OPERATORS, *(name for names in CPU_LISTS for name in names)}
    assert {name for name in names if not functions_of(name)} == WITHOUT_A_FUNCTION


CUDA_DTYPES: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, torch.dtype]] = [
    # call, dtype of the result for float32, for bfloat16
    (lambda x: x @ x, BF16, BF16),
    (lambda x: torch.matmul(x, x), BF16, BF16),
    (lambda x: x.mm(x), BF16, BF16),
    (lambda x: torch.einsum("ij,jk->ik", x, x), BF16, BF16),
    (lambda x: torch.addmm(x, x, x), BF16, BF16),
    (lambda x: F.layer_norm(x, [8]), FP32, FP32),
    (lambda x: F.softmax(x, -1), FP32, FP32),
    (lambda x: x.softmax(-1), FP32, FP32),
    (lambda x: torch.softmax(x, -1), FP32, FP32),
    (lambda x: F.softmax(x, -1, dtype=BF16), BF16, BF16),
    (lambda x: F.log_softmax(x, -1), FP32, FP32),
    (lambda x: x.pow(2), FP32, FP32),
    (lambda x: x**2, FP32, FP32),
    (lambda x: 2**x, FP32, FP32),
    (lambda x: x.exp(), FP32, FP32),
    (lambda x: torch.rsqrt(x), FP32, FP32),
    (lambda x: 1.0 / x, FP32, FP32),
    (lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"), FP32, FP32),
    (lambda x: x.norm(), FP32, FP32),
    (lambda x: F.normalize(x), FP32, FP32),
    (lambda x: F.gumbel_softmax(x), FP32, FP32),
    (lambda x: x.sum(), FP32, FP32),
    (lambda x: x.sum(-1), FP32, FP32),
    (lambda x: x.sum(dtype=BF16), BF16, BF16),
    (lambda x: torch.cumsum(x, -1), FP32, FP32),
    (lambda x: x.prod(), FP32, FP32),
    (lambda x: torch.linalg.vector_norm(x), FP32, FP32),
    (lambda x: F.mse_loss(x, x), FP32, FP32),
    (lambda x: F.softplus(x), FP32, FP32),
    (lambda x: torch.addcmul(x, x, x), FP32, BF16),
    (lambda x: torch.addcmul(x, x.float(), x.to(BF16)), FP32, FP32),
    # on no list
    (lambda x: x.mean(), FP32, BF16),
    (lambda x: F.gelu(x), FP32, BF16),
    (lambda x: x + x, FP32, BF16),
    (lambda x: torch.cat([x, x]), FP32, BF16),
]


@pytest.mark.parametrize("index", range(len(CUDA_DTYPES)))
def test_dtypes_of_cudas_policies(index: int) -> None:
    call, *expected = CUDA_DTYPES[index]
    semantics = CudaSemantics(autocast=BF16)
    with semantics, semantics.autocast_region():
        found = [call(meta(8, 8, dtype=dtype)).dtype for dtype in (FP32, BF16)]
    assert found == expected


def test_float64_and_integers_are_left_alone() -> None:
    semantics = CudaSemantics(autocast=BF16)
    wide, whole = meta(4, 4, dtype=torch.float64), meta(4, dtype=torch.int64)
    with semantics, semantics.autocast_region():
        assert (wide @ wide).dtype == torch.float64
        assert whole.sum().dtype == torch.int64


def test_sum_in_float32_makes_no_copy_of_its_input() -> None:
    x = meta(64, dtype=BF16)
    assert allocated(lambda: x.sum(), x, autocast=BF16) == [4]
    assert allocated(lambda: torch.exp(x), x, autocast=BF16) == [256, 256, -256]


# ---- Dropout, softmax, cross entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda x: F.dropout(x, 0.1), lambda x: torch.dropout(x, 0.1, True), nn.Dropout(0.1)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_mask_of_dropout_has_one_byte_per_element(call: Callable[[Any], Any], dtype: torch.dtype) -> None:
    x = meta(4, 8, dtype=dtype, requires_grad=True)
    assert allocated(lambda: call(x), x) == [4 * 8 * x.element_size(), 4 * 8]


def test_dropout_that_drops_nothing_allocates_nothing() -> None:
    x = meta(4, 8, requires_grad=True)
    assert allocated(lambda: F.dropout(x, 0.0), x) == []
    assert allocated(lambda: F.dropout(x, 0.1, training=False), x) == []
    assert allocated(lambda: torch.dropout(x, 0.1, train=False), x) == []


@pytest.mark.parametrize(("p", "inplace"), [(1.0, False), (0.1, True)])
def test_dropout_of_all_or_in_place_is_not_the_fused_kernel(p: float, inplace: bool) -> None:
    with Operators() as operators, CudaSemantics():
        F.dropout(meta(4, 8), p, True, inplace)
    assert "native_dropout" not in operators.seen
    with operators, CudaSemantics():
        F.dropout(meta(4, 8), 0.1, True)
    assert "native_dropout" in operators.seen


@pytest.mark.parametrize("softmax", [F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax])
def test_softmax_reads_float16_and_writes_float32_in_one_kernel(softmax: Callable[..., Any]) -> None:
    """bfloat16 is copied to float32 first; so is either where the caller asks for float32 outside of autocast."""
    half, brain = meta(4, 8, dtype=FP16), meta(4, 8, dtype=BF16)
    assert allocated(lambda: softmax(half, -1), half, autocast=FP16) == [128]
    assert allocated(lambda: softmax(brain, -1), brain, autocast=BF16) == [128, 128, -128]
    assert allocated(lambda: softmax(half, dim=-1, dtype=FP32), half) == [128]
    assert allocated(lambda: softmax(brain, dim=-1, dtype=FP32), brain) == [128, 128, -128]
    assert allocated(lambda: softmax(half, -1), half) == [64]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cross_entropy_of_16_bit_logits(dtype: torch.dtype) -> None:
    """Log-softmax in 16 bits, its copy in float32, loss and total weight."""
    logits, labels = meta(6, 10, dtype=dtype, requires_grad=True), meta(6, dtype=torch.int64)
    expected = [6 * 10 * 2, 6 * 10 * 4, 4, 4]
    assert allocated(lambda: F.cross_entropy(logits, labels), logits, labels, autocast=dtype)[:4] == expected
    module = nn.CrossEntropyLoss()
    assert allocated(lambda: module(logits, labels), logits, labels, autocast=dtype)[:4] == expected


def test_cross_entropy_without_autocast_or_of_float32_is_the_operators_own() -> None:
    labels = meta(6, dtype=torch.int64)
    for dtype, autocast in ((FP32, BF16), (FP32, None), (BF16, None)):
        logits = meta(6, 10, dtype=dtype, requires_grad=True)
        size = logits.element_size()
        found = allocated(lambda x=logits: F.cross_entropy(x, labels), logits, labels, autocast=autocast)
        assert found[:3] == [60 * size, size, size]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("shape", [(6, 10), (2, 10, 3), (10,)], ids=["rows", "rows of rows", "one"])
@pytest.mark.parametrize("soft", [False, True], ids=["classes", "probabilities"])
def test_cross_entropy_is_spelled_out_as_in_c(
    reduction: str, smoothing: float, weighted: bool, shape: tuple[int, ...], soft: bool
) -> None:
    """The same loss and gradient as the operator's own, and of plain classes by the same operators."""
    logits = draw(*shape).requires_grad_()
    target = draw(*shape) if soft else torch.zeros(*shape[:1], *shape[2:], dtype=torch.int64)
    if not soft:
        target = target[0] if len(shape) == 1 else target
        target.view(-1)[0] = 3
    weight = draw(10) if weighted else None
    number = ("none", "mean", "sum").index(reduction)
    results, seen = [], []
    for run in (torch._C._nn.cross_entropy_loss, cross_entropy):
        with Operators() as operators:
            loss = run(logits, target, weight, number, -100, smoothing)
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        results.append((loss.detach(), gradient))
        seen.append([name for name in operators.seen if name not in ("view", "detach", "_to_copy")])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)
    if not (weighted and smoothing and reduction == "mean" and not soft):  # C++ gathers by masked_select there
        assert sorted(seen[1]) == sorted(seen[0])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_cross_entropy_of_16_bit_logits_with_smoothing_or_weights(dtype: torch.dtype) -> None:
    """The sum over classes is told float32 and copies nothing; class weights widen a product, which autocast keeps."""
    logits, labels, weight = meta(6, 10, dtype=dtype, requires_grad=True), meta(6, dtype=torch.int64), meta(10)
    low, high = 6 * 10 * 2, 6 * 10 * 4
    given = (logits, labels, weight)

    def wide(**options: Any) -> list[int]:
        found = allocated(lambda: F.cross_entropy(logits, labels, **options), *given, autocast=dtype)
        return [delta for delta in found if abs(delta) in (low, high)]

    assert wide() == [low, high]
    assert wide(weight=weight) == [low, high]
    assert wide(label_smoothing=0.1) == [low, high]
    assert wide(label_smoothing=0.1, weight=weight) == [low, high, high, -high]
    soft = meta(6, 10)
    found = allocated(lambda: F.cross_entropy(logits, soft), logits, soft, autocast=dtype)
    assert [delta for delta in found if abs(delta) in (low, high)] == [low, high, -high]


# ---- Functions that torch writes in Python --------------------------------------------------------------------------


def test_python_functions_of_torch_are_looked_into() -> None:
    """Multi-head attention under autocast: projections, attention and dropout are those of CUDA."""
    with torch.device("meta"):
        layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    x = meta(2, 16, 32)
    for weights, kernel in ((False, "_scaled_dot_product_flash_attention"), (True, "bmm")):
        with Operators() as operators, CudaSemantics(autocast=BF16) as semantics, semantics.autocast_region():
            out = layer(x, x, x, need_weights=weights)[0]
        assert out.dtype == BF16
        assert kernel in operators.seen
        assert ("native_dropout" in operators.seen) == weights


def test_cache_of_weights_outlives_a_function_that_is_looked_into() -> None:
    weight, x = nn.Parameter(meta(8, 8)), meta(2, 8, dtype=BF16)
    found = allocated(lambda: (F.linear(x, weight), F.normalize(x), F.linear(x, weight)), x, weight, autocast=BF16)
    assert found.count(8 * 8 * 2) == 1


def test_mode_is_as_before_after_an_error_within_a_function_that_is_looked_into() -> None:
    semantics = CudaSemantics(autocast=BF16)
    with semantics, semantics.autocast_region():
        with pytest.raises(NotImplementedError):
            F.interpolate(meta(1, 1, 4), scale_factor=2.0, mode="bilinear")
        stack = torch.overrides._get_current_function_mode_stack()
        assert F.linear(meta(4, 4), meta(4, 4)).dtype == BF16
    assert stack[-1:] == [semantics]
    assert semantics not in torch.overrides._get_current_function_mode_stack()


def test_norms_are_told_float32_and_copy_nothing() -> None:
    """``Tensor.norm`` calls ``linalg.vector_norm``, whose kernel reads 16 bits."""
    x = meta(64, 8, dtype=BF16)
    assert allocated(lambda: x.norm(dim=-1), x, autocast=BF16) == [64 * 4]


# ---- Grouped products -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.10 and later")
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("turned", [False, True])
def test_grouped_product_of_other_types_than_bfloat16(dtype: torch.dtype, turned: bool) -> None:
    """One row of the result for each row; the gradient of the weights has their layout."""
    weights = meta(4, 16, 32, dtype=dtype, requires_grad=True)
    rows, offsets = meta(24, 32 if turned else 16, dtype=dtype, requires_grad=True), meta(4, dtype=torch.int32)
    shape = (24, 16 if turned else 32)
    given = weights.transpose(-2, -1) if turned else weights
    assert allocated(lambda: F.grouped_mm(rows, given, offs=offsets), rows, weights) == [
        shape[0] * shape[1] * dtype.itemsize
    ]
    tracker = StorageTracker()
    with recording(tracker, CudaSemantics()):
        out = F.grouped_mm(rows, given, offs=offsets)
        with tracker.backward():
            run_backward(out, torch.ones_like(out))
    assert rows.grad is not None
    assert weights.grad is not None
    assert (weights.grad.shape, weights.grad.stride()) == (weights.shape, weights.stride())
    assert tracker.flops == 3 * 2 * 24 * 16 * 32


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.10 and later")
def test_grouped_product_of_bfloat16_is_the_operators_own() -> None:
    rows, weights, offsets = meta(24, 16, dtype=BF16), meta(4, 16, 32, dtype=BF16), meta(4, dtype=torch.int32)
    with Operators() as operators, CudaSemantics():
        assert F.grouped_mm(rows, weights, offs=offsets).shape == (24, 32)
    assert "_grouped_mm" in operators.seen


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.10 and later")
def test_operations_of_a_grouped_product_are_counted() -> None:
    """No formula of torch's does it; each row meets the weights of one expert alone."""
    weights = meta(4, 16, 32, dtype=BF16, requires_grad=True)
    rows, offsets = meta(24, 16, dtype=BF16, requires_grad=True), meta(4, dtype=torch.int32)
    batches = meta(4, 8, 16, dtype=BF16), meta(4, 16, 32, dtype=BF16)
    tracker = StorageTracker()
    with recording(tracker, CudaSemantics()):
        out = F.grouped_mm(rows, weights, offs=offsets)
        with tracker.backward():
            run_backward(out, torch.ones_like(out))
        assert tracker.flops == 3 * 2 * 24 * 16 * 32
        F.grouped_mm(*batches)
        assert tracker.flops == 3 * 2 * 24 * 16 * 32 + 2 * 4 * 8 * 16 * 32


# ---- Attention ------------------------------------------------------------------------------------------------------


def attention(
    capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    length: int = 16,
    width: int = 32,
    key_heads: int = 4,
    mask: torch.dtype | None = None,
    **options: Any,
) -> tuple[list[int], list[str], torch.Tensor]:
    """Return what attention of 2 rows and 4 heads allocates in its forward pass, the operators of both, the result."""
    query = meta(2, 4, length, width, dtype=dtype, requires_grad=True)
    key, value = (meta(2, key_heads, length, width, dtype=dtype, requires_grad=True) for _ in range(2))
    given = None if mask is None else meta(2, 1, length, length, dtype=mask)
    tracker, operators = StorageTracker(), Operators()
    for tensor in (query, key, value, given):
        if tensor is not None:
            tracker.add(tensor)
    start = len(tracker.events)
    with recording(tracker, operators, CudaSemantics(capability=capability, tracker=tracker)):
        out = F.scaled_dot_product_attention(query, key, value, given, **options)
        end = len(tracker.events)
        with tracker.backward():
            run_backward(out, torch.ones_like(out))
    assert [t.grad is not None and t.grad.shape == t.shape for t in (query, key, value)] == [True] * 3
    seen = [name for name in operators.seen if name.startswith("_scaled_dot_product")]
    return [delta for _, delta in tracker.events[start:end] if delta], seen, out


def pair(kernel: str) -> list[str]:
    return [f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"]


def test_flash_attention_keeps_its_result_and_a_float32_per_row() -> None:
    found, operators, out = attention((8, 0), BF16)
    assert operators == pair("flash")
    assert found == [2 * 4 * 16 * 32 * 2, 2 * 4 * 16 * 4, 16, 8]  # result, log-sum-exp, random state
    assert (out.shape, out.dtype) == ((2, 4, 16, 32), BF16)


def test_flash_attention_pads_heads_to_a_multiple_of_8() -> None:
    found, operators, out = attention((8, 0), BF16, width=20, is_causal=True)
    assert operators == pair("flash")
    assert found == [2 * 4 * 16 * 24 * 2] * 4 + [2 * 4 * 16 * 4, 16, 8]  # query, key and value padded, result
    assert out.shape == (2, 4, 16, 20)


def test_flash_attention_of_grouped_heads_repeats_nothing() -> None:
    found, operators, _ = attention((8, 0), BF16, key_heads=2, enable_gqa=True)
    assert operators == pair("flash")
    assert found == [2 * 4 * 16 * 32 * 2, 2 * 4 * 16 * 4, 16, 8]


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), FP32), ((7, 5), FP16), ((7, 5), FP32)])
def test_efficient_attention_pads_its_log_sum_exp_to_32_rows(capability: tuple[int, int], dtype: torch.dtype) -> None:
    found, operators, out = attention(capability, dtype)
    assert operators == pair("efficient")
    assert found == [2 * 4 * 16 * 32 * dtype.itemsize, 2 * 4 * 32 * 4, 8, 8]
    assert out.dtype == dtype


@pytest.mark.parametrize(("length", "padded"), [(16, 16), (20, 24), (13, 16)])
def test_bool_mask_becomes_a_bias_whose_rows_are_padded_to_8(length: int, padded: int) -> None:
    found, operators, _ = attention((8, 0), BF16, length=length, mask=torch.bool)
    assert operators == pair("efficient")
    bias, wide = 2 * length * length * 2, 2 * length * padded * 2
    made = [2, 2, bias, *([] if padded == length else [wide, -bias]), -2, -2]
    assert sorted(found[: len(made)]) == sorted(made)
    assert found[len(made) :] == [2 * 4 * length * 32 * 2, 2 * 4 * 32 * 4, 8, 8]


def test_bias_that_is_given_is_padded_but_not_copied_otherwise() -> None:
    assert attention((8, 0), BF16, mask=BF16)[0] == [2 * 4 * 16 * 32 * 2, 2 * 4 * 32 * 4, 8, 8]
    assert attention((8, 0), BF16, mask=BF16, length=20)[0][0] == 2 * 20 * 24 * 2


def test_cudnn_attention_on_hopper_keeps_no_padding() -> None:
    found, operators, _ = attention((9, 0), BF16, width=64)
    assert operators == pair("cudnn")
    assert found == [2 * 4 * 16 * 64 * 2, 2 * 4 * 16 * 4, 8, 8]
    assert 2 * 16 * 16 * 2 in attention((9, 0), BF16, width=64, mask=torch.bool)[0]


def test_attention_without_a_fused_kernel_computes_in_float32() -> None:
    """Turing has none for bfloat16; grouped heads with a mask have none before torch 2.14."""
    grouped = [((8, 0), {"mask": torch.bool, "key_heads": 2, "enable_gqa": True})] if TORCH_RELEASE < (2, 14) else []
    for capability, options in (((7, 5), {}), *grouped):
        found, operators, out = attention(capability, BF16, **options)
        assert operators == []
        assert 2 * 4 * 16 * 16 * 4 in found  # probabilities
        assert 2 * 4 * 16 * 32 * 4 in found  # query in float32
        assert out.dtype == BF16


def test_autocast_lowers_the_inputs_of_attention() -> None:
    """Rotary embeddings leave query and key in float32."""
    query, value = meta(2, 4, 16, 32), meta(2, 4, 16, 32, dtype=BF16)
    found = allocated(
        lambda: F.scaled_dot_product_attention(query, query, value), query, value, autocast=BF16, capability=(8, 0)
    )
    assert [size for size in found if size > 0][:2] == [8192, 8192]
    assert 16384 not in found


class AttentionDtypes(TorchDispatchMode):
    """The dtypes of all that an attention operator is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            given = (*args, *(kwargs or {}).values())
            self.seen += [value.dtype for value in given if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_autocast_lowers_the_mask_of_attention() -> None:
    """C++ autocast casts every argument of a listed operator, T5's bias of positions among them."""
    query, bias = meta(2, 4, 16, 32, dtype=BF16), meta(1, 4, 16, 16)
    size = 4 * 16 * 16 * 2
    found = allocated(
        lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=bias), query, bias, autocast=BF16
    )
    assert found[0] == size
    with AttentionDtypes() as emulated, CudaSemantics(autocast=BF16) as semantics, semantics.autocast_region():
        F.scaled_dot_product_attention(query, query, query, attn_mask=bias)
    with AttentionDtypes() as real, torch.autocast("cpu", dtype=BF16):
        x = draw(2, 4, 16, 32)
        F.scaled_dot_product_attention(x, x, x, attn_mask=draw(1, 4, 16, 16))
    assert emulated.seen == real.seen == [BF16] * 4


def test_learned_bias_is_not_for_cudnn() -> None:
    """T5 without dropout on a Hopper GPU: cuDNN takes no mask that requires a gradient."""
    query = meta(2, 4, 16, 64, dtype=BF16, requires_grad=True)
    bias = meta(1, 4, 16, 16, dtype=BF16, requires_grad=True)
    for mask, kernel in ((bias.detach(), "cudnn"), (bias, "efficient")):
        with Operators() as operators, CudaSemantics(capability=(9, 0)):
            out = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
            run_backward(out, torch.ones_like(out))
        assert [name for name in operators.seen if name.startswith("_scaled")] == pair(kernel)
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


# ---- Offload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")], ids=["build for the CPU", "build for CUDA"])
def test_offloaded_activations_are_on_the_host_and_come_back_in_the_backward_pass(
    accelerator: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a build for CUDA names its accelerator on a machine without a GPU too, where save_on_cpu pins no memory
    monkeypatch.setattr("transformers.modeling_utils.get_current_accelerator", lambda: accelerator, raising=False)
    steps = {}
    for offload in (False, True):
        with torch.device("meta"):
            model = tiny.bert()
        if not hasattr(model, "activation_checkpointing_enable") and offload:
            pytest.skip("this version of transformers has no offload")
        compat.enable_checkpointing(model, {"use_reentrant": False, **({"offload": True} if offload else {})})
        steps[offload] = record_step(model, bert_batch(), StepSettings(precision="fp32"))
    hidden = 2 * 12 * 32 * 4
    assert steps[False].host_bytes == 0
    assert steps[True].host_bytes >= 2 * hidden  # the input of each of 2 layers
    kept, moved = (
        [
            number
            for number, size in enumerate(step.tracker.sizes)
            if size == hidden and alive_at(step.tracker, number, step.micro_batches[0].forward_end)
        ]
        for step in (steps[False], steps[True])
    )
    assert len(kept) - len(moved) == 2
    births = [
        sum(1 for number, delta in part_events(step, "backward") if delta == hidden)
        for step in (steps[False], steps[True])
    ]
    assert births[1] == births[0] + 2  # copied back to the GPU
    for device_wide in steps.values():
        assert device_wide.tracker.ignored == set()  # nothing of the host is left


def alive_at(tracker: StorageTracker, number: int, event: int) -> bool:
    died = [index for index, (other, delta) in enumerate(tracker.events) if other == number and delta < 0]
    return tracker.allocated_at[number] < event <= (died[0] if died else len(tracker.events))


def part_events(step: Any, phase: str) -> list[tuple[int, int]]:
    part = step.micro_batches[0]
    border = (part.start, part.forward_end) if phase == "forward" else (part.forward_end, part.end)
    return list(step.tracker.events[border[0] : border[1]])


def test_pinned_memory_is_the_hosts_and_everything_else_is_not() -> None:
    tracker = StorageTracker()
    semantics = CudaSemantics(tracker=tracker)
    with recording(tracker, semantics):
        pinned = torch.empty(8, pin_memory=True)
        assert semantics.host_bytes == 32
        assert tracker.events == []
        back = pinned.to("meta")
        assert [delta for _, delta in tracker.events] == [32]
        del pinned
        assert semantics.host_bytes == 0
    assert semantics.peak_host_bytes == 32
    assert back.is_meta


# ---- Private names of torch -----------------------------------------------------------------------------------------


def test_mode_is_off_while_it_handles_tensor_backward_but_not_in_run_backward() -> None:
    """``torch.autograd.graph._engine_run_backward``: why ``run_backward`` exists."""
    seen: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            calls.clear()
            torch.mul(grad, 2)
            seen.append(bool(calls))
            return grad

    calls: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    gradient = torch.ones(2)
    with Mode():
        Asks.apply(x).backward(gradient)
        run_backward(Asks.apply(x), gradient)
    assert seen == [False, True]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_reentrant_backward_keeps_the_mode() -> None:
    """``torch.autograd.backward`` inside a backward pass, as reentrant checkpointing calls it."""
    x = meta(4, 8, requires_grad=True)
    tracker = StorageTracker()
    with recording(tracker, CudaSemantics(tracker=tracker)):
        out = torch.utils.checkpoint.checkpoint(lambda t: F.dropout(t, 0.1) * 2, x, use_reentrant=True)
        with tracker.backward():
            run_backward(out, torch.ones_like(out))
    masks = [delta for _, delta in tracker.events if delta == 32]
    assert len(masks) == 2  # of the forward pass and of its recomputation


def test_number_of_the_graph_task_tells_a_backward_pass() -> None:
    """``torch._C._current_graph_task_id``."""
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    y.sum().backward()
    assert seen[0] >= 0
    assert torch._C._current_graph_task_id() == -1


def test_c_nn_holds_the_functions_that_functional_calls() -> None:
    """``torch._C._nn``: F's functions of C++ origin are its members."""
    assert F.gelu is torch._C._nn.gelu
    assert F.linear is torch._C._nn.linear
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert torch._C._nn.cross_entropy_loss in functions_of("cross_entropy_loss")


def test_python_functions_of_functional_ask_for_overrides_by_these_names() -> None:
    """``has_torch_function`` and its two fast forms, as globals of ``torch.nn.functional``."""
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        assert callable(vars(F)[name])
    functions = (F.multi_head_attention_forward, F.normalize, F.gumbel_softmax, F.interpolate, F.cross_entropy)
    assert set(functions) <= set(OPENED)
    calls: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        F.normalize(torch.ones(2, 2))
        assert F.normalize in calls
        calls.clear()
        OPENED[F.normalize](torch.ones(2, 2))
    assert F.normalize not in calls
    assert torch.Tensor.norm in calls


def test_is_view_tells_views_of_other_tensors() -> None:
    """``Tensor._is_view``."""
    x = torch.ones(4)
    assert not x._is_view()
    assert x[:2]._is_view()
    assert not (x + 1)._is_view()


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_fused_attention_operators_run_on_meta_with_their_backward(kernel: str) -> None:
    """``aten._scaled_dot_product_*_attention``: a shape and a derivative in builds without CUDA too."""
    query = meta(1, 2, 16, 64, dtype=BF16, requires_grad=True)
    if kernel == "flash":
        out = aten._scaled_dot_product_flash_attention(query, query, query, 0.1, True, False, scale=0.1)[0]
    elif kernel == "efficient":
        out = aten._scaled_dot_product_efficient_attention(query, query, query, None, True, 0.1, True, scale=0.1)[0]
    else:
        out = aten._scaled_dot_product_cudnn_attention(query, query, query, None, True, 0.1, True, False, scale=0.1)[0]
    assert out.shape == query.shape
    out.backward(torch.empty_like(out))
    assert query.grad is not None
    assert query.grad.shape == query.shape


def test_nothing_of_the_users_is_changed_by_the_mode() -> None:
    random_state = torch.get_rng_state()
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()
    attention((8, 0), BF16, mask=torch.bool, dropout_p=0.1)
    allocated(lambda: F.dropout(meta(4), 0.1), autocast=BF16)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert flags == (torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled(), torch.get_default_dtype())
