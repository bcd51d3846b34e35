"""The fused cross entropy on every family: stock's loss and gradients, and no real logits made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from slow_cases import slow_except

from hf_memopt import fuse_cross_entropy
from language_models import ENCODERS, FAMILIES, VOCABULARY, batch, build, distance, gradients

CHUNK_BYTES = VOCABULARY * 4 * 16  # 16 rows of float32, so that there are several chunks
FEW = ("llama-tied", "gemma2", "bert", "t5", "whisper")
"""Families that differ in what happens between head and loss, for the default run."""
LOW = ("autocast bfloat16", "autocast float16", "bfloat16")
float_of_torch = torch.Tensor.float


def float_but_for_logits(tensor: torch.Tensor) -> torch.Tensor:
    """Stand in for ``Tensor.float`` where logits are to stay in float64."""
    is_kept = tensor.dtype == torch.float64 and tensor.shape[-1:] == (VOCABULARY,)
    return tensor if is_kept else float_of_torch(tensor)


@pytest.fixture
def keeps_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``.float()`` keep the logits in float64, which stock rounds to float32."""
    monkeypatch.setattr(torch.Tensor, "float", float_but_for_logits)


def trained(model: Any, inputs: dict[str, Any], precision: str = "", scale: float = 1.0) -> tuple[torch.Tensor, Any]:
    """Return loss and gradients of one forward and backward pass."""
    dtype = torch.float16 if precision.endswith("float16") and "b" not in precision else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=precision.startswith("autocast")):
        loss = model(**inputs).loss
    found = gradients(loss * scale, model)
    return loss.detach(), {name: gradient / scale for name, gradient in found.items()}


def fused_and_stock(family: str, dtype: torch.dtype, **inputs: Any) -> tuple[Any, Any]:
    """Return what ``trained`` gives for a fused model and for stock, once it is certain that it was fused."""
    model = build(family, dtype)
    data = {**batch(family, dtype), **inputs}
    stock = trained(model, data)
    handle = fuse_cross_entropy(model, chunk_bytes=CHUNK_BYTES * dtype.itemsize // 4)
    fused = trained(model, data)
    assert (handle.record.fused, dict(handle.record.real)) == (1, {})
    return fused, stock


@pytest.mark.usefixtures("keeps_float64")
@pytest.mark.parametrize("items", [None, 37], ids=["mean", "items"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_float64(family: str, items: int | None) -> None:
    counted = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    (loss, found), (expected_loss, expected) = fused_and_stock(family, torch.float64, **counted)
    assert loss.dtype == expected_loss.dtype
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-14)
    assert distance(found, expected) <= 1e-12


@pytest.mark.parametrize("items", [None, 37], ids=["mean", "items"])
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("family", slow_except(FEW, FAMILIES))
def test_sixteen_bits_err_no_more_than_stocks(
    family: str, precision: str, items: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same model in float64, with a gradient scaler's factor for float16.

    ``items``: the loss is divided by another number than its own labels, as accumulation does; no power of two times
    it, so that a gradient in 16 bits that is scaled afterwards is rounded twice.
    """
    stocks, fused = errors(family, precision, items, monkeypatch)
    assert fused <= 1.1 * stocks


@pytest.mark.parametrize("items", slow_except((37,), (None, 37)))
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("family", slow_except(("llama", "bert"), FAMILIES))
def test_a_frozen_head_in_sixteen_bits_errs_no_more_than_stocks(
    family: str, precision: str, items: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded as often as in stock, at another scale; a random model's probabilities are nearly equal, and so is what
    they lose, up to 14 % more or less than at stock's scale.
    """
    stocks, fused = errors(family, precision, items, monkeypatch, frozen=True)
    assert fused <= 1.2 * stocks


def with_frozen_head(model: Any) -> None:
    for parameter in model.get_output_embeddings().parameters():
        parameter.requires_grad_(False)


def errors(
    family: str,
    precision: str,
    items: int | None,
    monkeypatch: pytest.MonkeyPatch,
    frozen: bool = False,
) -> tuple[float, float]:
    """Return how far stock's and the fused gradients are from those in float64, once it is sure that it was fused."""
    counted = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    model = build(family)
    if frozen:
        with_frozen_head(model)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "float", float_but_for_logits)
        data = {**batch(family, torch.float64), **counted}
        _, exact = trained(copy.deepcopy(model).double(), data)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = model.to(dtype)
    data = {**batch(family, dtype), **counted}
    scale = 2.0**16 if precision == "autocast float16" else 1.0
    stocks_loss, stocks = trained(model, data, precision, scale)
    handle = fuse_cross_entropy(model, chunk_bytes=VOCABULARY * 4 * 16)
    loss, found = trained(model, data, precision, scale)
    assert (handle.record.fused, dict(handle.record.real)) == (1, {})
    assert loss.dtype == stocks_loss.dtype
    # A bfloat16 loss is rounded to 8 bits, in stock each row's too.
    assert float(loss) == pytest.approx(float(stocks_loss), rel=2e-2 if loss.dtype == torch.bfloat16 else 1e-6)
    return distance(stocks, exact), distance(found, exact)


@pytest.mark.parametrize("family", ENCODERS)
def test_only_rows_with_a_label_are_computed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    linear = torch.nn.functional.linear

    def counting(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.shape[0] == VOCABULARY:
            rows.append(hidden.numel() // hidden.shape[-1])
        return linear(hidden, weight, bias)

    model, data = build(family), batch(family)
    fuse_cross_entropy(model)
    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    model(**data)
    assert rows == [int((data["labels"] != -100).sum())]


def test_the_families_are_those_of_the_documentation() -> None:
    assert len(FAMILIES) == 19
    assert set(FEW) <= set(FAMILIES)
