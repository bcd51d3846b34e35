"""What a fused head multiplies, and the loss of an evaluation without logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_except

from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding.fused_loss import DeferredLogits, fuse_cross_entropy, loss_alone
from language_models import FAMILIES, FEW, LOW, VOCABULARY, batch, build

CHUNKS = VOCABULARY * 4 * 16  # bytes of 16 rows of float32, so that there are several chunks


@pytest.mark.parametrize(("dtype", "more"), [(torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 0)])
def test_a_frozen_head_takes_as_many_products_as_stocks(dtype: torch.dtype, more: int) -> None:
    """One for the logits, one for the gradient of the hidden states; float16 computes the logits twice."""
    model, data = build("llama", dtype), batch("llama", dtype)
    data["labels"] = data["input_ids"]
    model.get_output_embeddings().requires_grad_(False)

    def flops() -> int:
        with StorageTracker(device_type="cpu") as tracker:
            model(**data, shift_labels=data["labels"]).loss.backward()
        return tracker.flops

    stock = flops()
    record = fuse_cross_entropy(model, chunk_bytes=CHUNKS).record
    of_a_product, of_one_logit = 2 * data["labels"].numel() * VOCABULARY * 64, 2 * 64  # which tells the dtype
    assert flops() - stock == more * of_a_product + of_one_logit
    assert (record.fused, dict(record.real)) == (1, {})


@pytest.mark.parametrize("items", [None, 37], ids=["mean", "items"])
@pytest.mark.parametrize("precision", ["float32", *LOW])
@pytest.mark.parametrize("family", slow_except(FEW, FAMILIES))
def test_the_loss_of_an_evaluation_is_stocks_bit_for_bit(family: str, precision: str, items: int | None) -> None:
    """In chunks too: on a CPU a product of several rows has the bits that they have in the product of all."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = build(family, dtype).eval()
    data = {**batch(family, dtype), **({} if items is None else {"num_items_in_batch": torch.tensor(items)})}
    low = torch.float16 if precision.endswith(" float16") else torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", low, enabled=precision.startswith("autocast")):
        stock = model(**data).loss
        record = fuse_cross_entropy(model, chunk_bytes=CHUNKS).record
        with loss_alone():
            found = model(**data)
        assert type(found.logits) is DeferredLogits
        assert not record.real
        assert (found.loss.dtype, float(found.loss)) == (stock.dtype, float(stock))
        assert torch.equal(model(**data).loss, stock)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 0, 7])
def test_any_label_can_be_the_one_that_an_evaluation_ignores(ignored: int, reduction: str) -> None:
    model, labels = build("llama").eval(), torch.tensor([0, 7, 3, ignored, 0, 5, 7, 0])
    asked = {"ignore_index": ignored, "reduction": reduction}
    with torch.no_grad():
        stock = F.cross_entropy(model(labels[None].abs()).logits[0], labels, **asked)
        fuse_cross_entropy(model, chunk_bytes=CHUNKS)
        with loss_alone():
            logits = model(labels[None].abs()).logits
            assert type(logits) is DeferredLogits
            assert torch.equal(F.cross_entropy(logits[0], labels, **asked), stock)
