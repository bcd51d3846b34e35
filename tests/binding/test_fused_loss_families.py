"""The fused cross entropy on every family: stock's loss and gradients, and no real logits made."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from slow_cases import slow_except

from hf_memopt.techniques import fuse_cross_entropy
from language_models import ENCODERS, FAMILIES, FEW, LOW, VOCABULARY, batch, build, distance, gradients

CHUNK_BYTES = VOCABULARY * 4 * 16  # 16 rows of float32, so that there are several chunks
float_of_torch = torch.Tensor.float


def float_but_for_logits(tensor: torch.Tensor) -> torch.Tensor:
    """Stand in for ``Tensor.float`` where logits are to stay in float64, which stock rounds to float32."""
    is_kept = tensor.dtype == torch.float64 and tensor.shape[-1:] == (VOCABULARY,)
    return tensor if is_kept else float_of_torch(tensor)


def trained(model: Any, inputs: dict[str, Any], precision: str = "", scale: float = 1.0) -> tuple[torch.Tensor, Any]:
    """Return loss and gradients of one forward and backward pass."""
    dtype = torch.float16 if precision.endswith("float16") and "b" not in precision else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=precision.startswith("autocast")):
        loss = model(**inputs).loss
    found = gradients(loss * scale, model)
    return loss.detach(), {name: gradient / scale for name, gradient in found.items()}


def counted_batch(family: str, dtype: torch.dtype, items: int | None) -> dict[str, Any]:
    return {**batch(family, dtype), **({} if items is None else {"num_items_in_batch": torch.tensor(items)})}


def stock_and_fused(model: Any, data: dict[str, Any], *how: Any) -> tuple[Any, Any]:
    """Return what ``trained`` gives for stock and for the fused model, once it is certain that it was fused."""
    stock = trained(model, data, *how)
    handle = fuse_cross_entropy(model, chunk_bytes=CHUNK_BYTES)
    fused = trained(model, data, *how)
    assert (handle.record.fused, dict(handle.record.real)) == (1, {})
    assert fused[0].dtype == stock[0].dtype
    return stock, fused


@pytest.mark.parametrize("items", [None, 37], ids=["mean", "items"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_in_float64(family: str, items: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", float_but_for_logits)
    data = counted_batch(family, torch.float64, items)
    (expected_loss, expected), (loss, found) = stock_and_fused(build(family, torch.float64), data)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-14)
    assert distance(found, expected) <= 1e-12


FAST = [*product(FEW, LOW, (37,), [False]), *product(("llama", "bert"), LOW, [37], [True])]


@pytest.mark.parametrize(
    ("family", "precision", "items", "frozen"), slow_except(FAST, product(FAMILIES, LOW, (None, 37), (False, True)))
)
def test_sixteen_bits_err_no_more_than_stocks(family, precision, items, frozen, monkeypatch) -> None:
    """Against the same model in float64, with a gradient scaler's factor for float16.

    ``items``: the loss is divided by another number than its own labels, as accumulation does; no power of two times
    it, so that a gradient in 16 bits that is scaled afterwards is rounded twice. ``frozen``: a frozen head is rounded
    as often as in stock, at another scale; a random model's probabilities are nearly equal, and so is what they lose,
    up to 14 % more or less than at stock's scale.
    """
    model = build(family)
    if frozen:
        model.get_output_embeddings().requires_grad_(False)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "float", float_but_for_logits)
        _, exact = trained(copy.deepcopy(model).double(), counted_batch(family, torch.float64, items))
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    how = (precision, 2.0**16 if precision == "autocast float16" else 1.0)
    (stocks_loss, stocks), (loss, found) = stock_and_fused(model.to(dtype), counted_batch(family, dtype, items), *how)
    # A bfloat16 loss is rounded to 8 bits, in stock each row's too.
    assert float(loss) == pytest.approx(float(stocks_loss), rel=2e-2 if loss.dtype == torch.bfloat16 else 1e-6)
    assert distance(found, exact) <= (1.2 if frozen else 1.1) * distance(stocks, exact)


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
