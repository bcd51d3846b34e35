"""What a fused head allocates and multiplies, chunk by chunk; and the loss of an evaluation without logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from slow_cases import slow_except

import tiny
from hf_memopt.prediction.memory.cuda import CudaSemantics, run_backward
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding.fused_loss import DeferredLogits, fuse_cross_entropy, loss_alone
from hf_memopt.training.binding.fused_loss.chunked_loss import CHUNK_BYTES, Loss
from language_models import FAMILIES, FEW, LOW, VOCABULARY, batch, build

CHUNKS = VOCABULARY * 4 * 16  # bytes of 16 rows of float32, so that there are several chunks


def test_chunks_have_as_many_bytes_as_the_hidden_states_or_64_mib() -> None:
    def rows(hidden: torch.Tensor, chunk_bytes: int | None = None) -> int:
        loss = Loss((), torch.bfloat16, chunk_bytes, -100, True, 0.0)
        return loss.rows(hidden, 1000)

    hidden = torch.empty(8, 4, device="meta")
    assert rows(hidden) == CHUNK_BYTES // 4000
    assert rows(torch.empty(2**20, 2**10, device="meta")) == 2**32 // 4000
    assert (rows(hidden, 8000), rows(hidden, 1)) == (2, 1)


def peaks(fused: bool, autocast: torch.dtype | None) -> tuple[int, int]:
    """Return the largest storage and the peak of a step of a large head on the meta device, with CUDA's allocations."""
    with torch.device("meta"):
        model = tiny.llama(vocab_size=50_000).train()
        inputs = {"input_ids": torch.zeros(8, 64, dtype=torch.long), "labels": torch.zeros(8, 64, dtype=torch.long)}
    if fused:
        fuse_cross_entropy(model, chunk_bytes=50_000 * 4 * 64)
    tracker = StorageTracker()
    for parameter in model.parameters():
        tracker.add(parameter)
    with tracker, CudaSemantics(autocast=autocast, tracker=tracker) as semantics:
        with semantics.autocast_region():
            loss = model(**inputs).loss
        with tracker.backward():
            run_backward(loss, torch.ones_like(loss))
    tracker.close()
    held = peak = 0
    for _, change in tracker.events:
        held += change
        peak = max(peak, held)
    return max(tracker.sizes), peak


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_on_meta_the_same_code_runs_without_logits(autocast: torch.dtype | None) -> None:
    """All rows count as labelled there; 512 rows of logits are 98 MiB in float32, 64 rows of a chunk 12 MiB."""
    (_, stock), (largest, fused) = (peaks(way, autocast) for way in (False, True))
    chunk = 50_000 * 4 * 64
    assert largest <= chunk
    assert stock - fused >= 2 * 50_000 * 4 * 512 - 4 * chunk


def test_the_memory_of_a_chunk_on_the_cpu_is_that_on_meta() -> None:
    """Bytes of all storages above 1 MiB, of real tensors with a label in every row and of meta tensors."""

    def sizes(device: str) -> list[int]:
        with torch.device(device):
            model = tiny.llama(vocab_size=20_000).train()
            ids = torch.ones(4, 32, dtype=torch.long)
        fuse_cross_entropy(model, chunk_bytes=20_000 * 4 * 30)
        tracker = StorageTracker(device_type=device)
        with tracker:
            loss = model(input_ids=ids, labels=ids, shift_labels=ids).loss
            with tracker.backward():
                loss.backward()
        tracker.close()
        return [change for _, change in tracker.events if abs(change) > 2**20]

    assert sizes("cpu") == sizes("meta")


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
