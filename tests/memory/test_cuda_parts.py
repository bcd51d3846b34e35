"""Parts of ``CudaSemantics``: functions of listed operators, the spelled-out cross entropy, the end of a region."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from blocks import A100, BF16, FP32, H100, L4, P100, RTX_3090, T4, V100, header
from blocks import empty as meta
from host_semantics import CPU_LISTS
from recorded import Operators
from torch import nn

from hf_memopt.devices import Chip
from hf_memopt.memory.cuda import CudaSemantics, attention
from hf_memopt.memory.cuda.autocast import OPERATORS, functions_of
from hf_memopt.memory.cuda.semantics import cross_entropy
from hf_memopt.memory.recording.step import recording
from hf_memopt.memory.tracking import StorageTracker


def draw(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.1


WITHOUT_A_FUNCTION = {
    "_thnn_fused_gru_cell",  # inside torch.gru_cell
    "_thnn_fused_lstm_cell",  # inside torch.lstm_cell
    *(f"fft_{name}{n}" for name in ("fft", "ifft", "rfft", "irfft") for n in ("", "2", "n")),  # torch.fft.fft and so on
    *("fft_hfft", "fft_ihfft"),
    "multilabel_margin_loss_forward",  # inside F.multilabel_margin_loss, which is on the list as well
}


def test_every_listed_operator_has_its_python_functions() -> None:
    names = {*OPERATORS, *(name for names in CPU_LISTS.values() for name in names)}
    assert {name for name in names if not functions_of(name)} == WITHOUT_A_FUNCTION


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


def test_a_region_ends_with_its_cache_and_torchs_flags_after_errors_too() -> None:
    """Model code may ask ``torch.is_autocast_enabled("cuda")``; afterwards the answer is the user's again."""
    told = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    weight, x = nn.Parameter(meta(8, 8)), meta(2, 8, dtype=BF16)
    tracker = StorageTracker()
    semantics = CudaSemantics(autocast=BF16, tracker=tracker)
    tracker.add(x)
    tracker.add(weight)

    def fail() -> None:
        with semantics.autocast_region():
            assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == (True, BF16)
            assert F.linear(x, weight).dtype == BF16
            assert [delta for _, delta in tracker.events[2:]] == [128, 32, -32]
            raise KeyError("a model's error")

    with recording(tracker, semantics), torch.no_grad():
        with pytest.raises(KeyError):
            fail()
        assert [delta for _, delta in tracker.events[2:]] == [128, 32, -32, -128]
        assert F.linear(x.float(), weight).dtype == FP32
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == told


def test_mode_is_as_before_after_an_error_within_a_function_that_is_looked_into() -> None:
    semantics = CudaSemantics(autocast=BF16)
    with semantics, semantics.autocast_region():
        with pytest.raises(NotImplementedError):
            F.interpolate(meta(1, 1, 4), scale_factor=2.0, mode="bilinear")
        stack = torch.overrides._get_current_function_mode_stack()
        assert F.linear(meta(4, 4), meta(4, 4)).dtype == BF16
    assert stack[-1:] == [semantics]
    assert semantics not in torch.overrides._get_current_function_mode_stack()


def test_pinned_memory_is_the_hosts_and_everything_else_is_not() -> None:
    tracker = StorageTracker()
    semantics = CudaSemantics(tracker=tracker)
    with recording(tracker, semantics):
        pinned, even = torch.empty(9, pin_memory=True), torch.empty(8, pin_memory=True)
        assert semantics.host_bytes == 64 + 32  # torch pins powers of two
        assert tracker.events == []
        back = pinned.to("meta")
        assert [delta for _, delta in tracker.events] == [36]
        del pinned, even
        assert semantics.host_bytes == 0
    assert semantics.peak_host_bytes == 96
    assert back.is_meta


@pytest.mark.parametrize("capability", [P100, V100, T4, A100, RTX_3090, L4, H100, (12, 0)])
@pytest.mark.parametrize("dtype", ["half_t", "float"])
@pytest.mark.parametrize("dropout", [False, True])
def test_tiles_are_those_of_torchs_own_kernels(capability: tuple[int, int], dtype: str, dropout: bool) -> None:
    text = header("ATen", "native", "transformers", "cuda", "mem_eff_attention", "kernels", "cutlassB.h")
    arch = max(sm for sm in (50, 70, 75, 80) if sm <= capability[0] * 10 + capability[1])
    pattern = rf"cb\(AttentionBackwardKernel<cutlass::arch::Sm{arch}, (?:cutlass::)?{dtype}, true, "
    pattern += rf"{str(dropout).lower()}, \w+, (\d+), (\d+), (\d+)"
    tiles = {tuple(map(int, match)) for match in re.findall(pattern, text)}
    chip = Chip(capability, 1)
    for width in (32, 64, 96, 128, 256):
        queries, keys, in_registers = attention._efficient_tile(chip, dtype == "half_t", width, dropout)
        widths = {most for i, j, most in tiles if (i, j) == (queries, keys) and most >= width}
        assert widths
        assert in_registers is (dtype == "half_t" and min(widths) <= queries)
