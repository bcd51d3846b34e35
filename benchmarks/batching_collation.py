"""What ``batching.py`` times beside the samplers: fetching and collating a batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from results_file import markdown

COLLATION_CASES = ((32, 64), (32, 512), (128, 64), (128, 512))
VOCABULARY_TOKENS = 1000


def arrow_dataset(lengths: NDArray[Any], **columns: Any) -> Any:
    """Return a ``datasets.Dataset`` of that many tokens per row, in one Arrow chunk."""
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import InMemoryTable

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    tokens = (np.arange(int(lengths.sum()), dtype=np.int32) % (VOCABULARY_TOKENS - 5)) + 5
    table = {"input_ids": pa.LargeListArray.from_arrays(offsets, pa.array(tokens)), **columns}
    return Dataset(InMemoryTable(pa.table(table)))


def measure_collation(batches: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the time to fetch and collate a batch of each case, stock's and ours, and whether the tensors agree.

    Both read the same examples in the same order through a DataLoader without workers, taking turns ``batches`` at a
    time; the times are medians of ``repeats * batches`` batches, seconds of the CPU in the dataset and the collator.
    The columns are those of a BERT tokenizer and a label. ``loader_ratio`` is that of the whole step, with the
    DataLoader's own book-keeping, which costs both the same.
    """
    return {f"{rows}x{tokens}": _collation_case(rows, tokens, batches, repeats) for rows, tokens in COLLATION_CASES}


def _collation_case(rows: int, tokens: int, batches: int, repeats: int) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding

    from hf_memopt import BucketedCollator, bucketed, token_lengths
    from hf_memopt.types import LengthBuckets

    lengths = np.random.default_rng(0).integers(tokens // 2, tokens + 1, rows * batches * 4)
    ids = arrow_dataset(lengths).data.column("input_ids").chunk(0)
    mask = type(ids).from_arrays(ids.offsets, np.ones(len(ids.values), dtype=np.int8))
    types = type(ids).from_arrays(ids.offsets, np.zeros(len(ids.values), dtype=np.int8))
    dataset = arrow_dataset(lengths, token_type_ids=types, attention_mask=mask, labels=np.arange(len(lengths)) % 2)
    tokenizer = word_tokenizer()
    view = bucketed(dataset, batch_size=rows)
    view._as_columns = True  # as attach(trainer) does for our collator
    plan = LengthBuckets(token_lengths(dataset), batch_size=rows).plan(0)
    same_batches = [plan.batch(i).tolist() for i in range(batches)]
    clock = _Clock()
    pad = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    stock = DataLoader(_Timed(dataset, clock), batch_sampler=same_batches, collate_fn=clock.timed(pad))
    loader = DataLoader(_Timed(view, clock), batch_size=rows, collate_fn=clock.timed(BucketedCollator(tokenizer)))

    pairs = zip(stock, islice(loader, batches), strict=True)
    agree = all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    steps: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(repeats):
        for name, source in {"stock": stock, "ours": loader}.items():
            iterator = iter(source)
            for _ in range(batches):
                clock.seconds = 0.0
                started = time.process_time()
                next(iterator)
                steps[name].append(time.process_time() - started)
                times[name].append(clock.seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    whole = {name: statistics.median(seconds) for name, seconds in steps.items()}
    return {
        "stock_microseconds": 1e6 * medians["stock"],
        "ours_microseconds": 1e6 * medians["ours"],
        "ratio": medians["stock"] / medians["ours"],
        "loader_ratio": whole["stock"] / whole["ours"],
        "same_tensors": agree,
    }


class _Clock:
    """The CPU seconds that a DataLoader spends in its dataset and its collator, without its own book-keeping."""

    seconds = 0.0

    def timed(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(argument: Any) -> Any:
            started = time.process_time()
            result = function(argument)
            self.seconds += time.process_time() - started
            return result

        return call


class _Timed:
    """A dataset whose fetching of batches is timed."""

    def __init__(self, dataset: Any, clock: _Clock) -> None:
        self._dataset = dataset
        self.__getitems__ = clock.timed(dataset.__getitems__)

    def __len__(self) -> int:
        return len(self._dataset)


def word_tokenizer() -> Any:
    """Return a fast tokenizer that pads; nothing is tokenised with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, VOCABULARY_TOKENS)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def collation_table(row: dict[str, Any]) -> str:
    """Return the cost of fetching and collating a batch."""
    rows = []
    for case, found in row["figures"]["figures"].items():
        times = (f"{found[key] / 1e3:.2f} ms" for key in ("stock_microseconds", "ours_microseconds"))
        rows.append((case, *times, *(f"{found[key]:.0f}x" for key in ("ratio", "loader_ratio"))))
    head = "| rows x tokens | Dataset + DataCollatorWithPadding | bucketed + BucketedCollator | ratio | whole step |"
    return markdown(head, rows)
