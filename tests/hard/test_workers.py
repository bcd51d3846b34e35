"""Two workers of a DataLoader, forked, spawned or from a server, hand out the batches of one process.

Every view and sampler is read, for two epochs, through all collators that fit its rows. Masks for masked language
models are drawn in the workers, which torch seeds one by one, so of these only what the masks leave is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from children import SERVER
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding

import tiny
from hf_memopt import BucketedCollator, LengthBucketedBatchSampler, LengthBucketedSampler, bucketed, sorted_by_length
from hf_memopt.training.batching.collation import SpeechCollator

COUNT = 41
LENGTHS = [(7 * i) % 23 + 2 for i in range(COUNT)]
IGNORED = -100
WORKERS = 2


def example(i: int) -> dict[str, Any]:
    ids = [5 + (i + 3 * j) % 95 for j in range(LENGTHS[i])]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": i % 3}


ROWS = [example(i) for i in range(COUNT)]


def arrow() -> Dataset:
    return Dataset.from_list(ROWS)


# ---- Collators ------------------------------------------------------------------------------------------------------


class EveryCollator:
    """Collate the same rows by each collator."""

    def __init__(self) -> None:
        tokenizer = tiny.tokenizer()
        self.collators: dict[str, Callable[[Any], Any]] = {
            "padding": BucketedCollator(tokenizer),
            "padding on the left": BucketedCollator(tiny.tokenizer("left"), position_ids=True),
            "causal": BucketedCollator(tokenizer, causal_lm=True, pad_to_multiple_of=None),
            "masked": BucketedCollator(tokenizer, mlm_probability=0.3),
            "stock inside": BucketedCollator(inner=DataCollatorWithPadding(tokenizer)),
            "flattened": BucketedCollator(inner=DataCollatorWithFlattening()),
            "speech": SpeechCollator(decoder_start_token_id=2),
        }

    def __call__(self, features: Sequence[Any]) -> dict[str, dict[str, torch.Tensor]]:
        if len(features) == 1 and isinstance(features[0], list):
            (features,) = features
        rows = [dict(row) for row in features]
        given = {
            **{key: [{"input_ids": row["input_ids"]} for row in rows] for key in ("masked", "causal", "flattened")},
            "speech": [{"input_features": [[float(row["labels"])]], "labels": row["input_ids"]} for row in rows],
        }
        return {name: collate(given.get(name, features)) for name, collate in self.collators.items()}


def without_masks(batch: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the batches with the tokens back that were masked."""
    masked = batch["masked"]
    original = torch.where(masked["labels"] == IGNORED, masked["input_ids"], masked["labels"])
    rest = {name: column for name, column in masked.items() if name not in ("input_ids", "labels")}
    return {**batch, "masked": {**rest, "input_ids": original}}


# ---- Views and samplers ---------------------------------------------------------------------------------------------


def _sampled(sampler: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
    return arrow(), {**settings, ("batch_sampler" if not settings else "sampler"): sampler}


READERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "examples": lambda: (bucketed(arrow(), batch_size=4, n_buckets=3), {"batch_size": 4}),
    "examples of a list": lambda: (bucketed(ROWS, batch_size=4, n_buckets=3), {"batch_size": 4}),
    "batches": lambda: (bucketed(arrow(), max_tokens=96, n_buckets=3), {"batch_size": 1}),
    "bounded batches": lambda: (bucketed(arrow(), max_tokens=96, n_buckets=3, boundaries="auto"), {"batch_size": 1}),
    "sorted": lambda: (sorted_by_length(arrow(), restore_by_hand=True), {"batch_size": 4}),
    "batch sampler": lambda: _sampled(LengthBucketedBatchSampler(LENGTHS, max_tokens=96, n_buckets=3)),
    "sampler": lambda: _sampled(LengthBucketedSampler(LENGTHS, batch_size=4, n_buckets=3), batch_size=4),
}
STARTS = {
    "forked": ("fork", False),
    "forked, persistent": ("fork", True),
    "spawned, persistent": ("spawn", True),
    "from a server": (SERVER, False),  # pickles what spawning does, without 7 s of imports in each worker
}


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch where the Trainer and accelerate do."""
    for part in (loader.dataset, loader.sampler, loader.batch_sampler):
        if hasattr(part, "set_epoch") and not isinstance(part, Dataset):
            part.set_epoch(epoch)


def read(loader: Any, epoch: int) -> list[Any]:
    set_epoch(loader, epoch)
    return [without_masks(batch) for batch in loader]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize(("start", "is_persistent"), STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("name", READERS)
def test_workers_hand_out_the_batches_of_one_process(name: str, start: Any, is_persistent: bool) -> None:
    dataset, settings = READERS[name]()
    alone = DataLoader(dataset, collate_fn=EveryCollator(), **settings)
    expected = [read(alone, epoch) for epoch in range(2)]
    dataset, settings = READERS[name]()
    how = {"num_workers": WORKERS, "persistent_workers": is_persistent, "multiprocessing_context": start}
    loader = DataLoader(dataset, collate_fn=EveryCollator(), **how, **settings)
    for epoch, batches in enumerate(expected):
        assert_same(read(loader, epoch), batches)
    if name != "sorted":
        assert differ(*expected)
    assert [len(batch["masked"]["input_ids"]) for batch in expected[0]] == [
        len(batch["padding"]["labels"]) for batch in expected[0]
    ]


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, Mapping):  # stock's BatchEncoding too
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def differ(first: list[Any], second: list[Any]) -> bool:
    """Return whether the epochs have another order."""
    pairs = zip(first, second, strict=True)
    return any(not torch.equal(a["flattened"]["input_ids"], b["flattened"]["input_ids"]) for a, b in pairs)
