"""Rows, the slow reference of their padding, and the tiny models of the tests of collators."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import datasets
import heads
import numpy as np
import torch
import transformers
from datasets import Dataset
from hypothesis import strategies as st

import tiny

PAD, CLS, SEP = 0, 2, 3

# A loss of a padded batch against the mean of losses without padding: other kernel shapes, other rounding in float32.
LOSS_TOLERANCE = 1e-5


def reference(rows: list[list[Any]], value: Any, *, side: str = "right", multiple: int = 8) -> list[list[Any]]:
    longest = max(len(row) for row in rows)
    width = next(n for n in range(max(longest, 1), longest + multiple + 1) if n % multiple == 0)
    padded = []
    for row in rows:
        padding = [value] * (width - len(row))
        padded.append(list(row) + padding if side == "right" else padding + list(row))
    return padded


def ids_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return random ids without special tokens, one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 100, (n,), generator=generator).tolist() for n in lengths]


def tokenized(lengths: list[int], **columns: Any) -> list[dict[str, Any]]:
    ids = ids_of(lengths)
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "token_type_ids": [0] * len(row)} for row in ids]
    return [{**row, **{name: cells[i] for name, cells in columns.items()}} for i, row in enumerate(rows)]


def as_kind(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    convert: dict[str, Callable[[Any], Any]] = {"list": lambda cell: cell, "numpy": np.array, "torch": torch.tensor}
    return [{name: convert[kind](cell) for name, cell in row.items()} for row in rows]


def assert_same(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert batch.keys() == other.keys()
    for name, column in batch.items():
        assert column.dtype == other[name].dtype, name
        assert torch.equal(column, other[name]), name


def change(dataset: Dataset, step: str) -> Dataset:
    """Return a dataset with a column ``index`` after a step that changes its rows or how they lie in memory."""
    n = len(dataset)
    if step == "shuffle":
        return dataset.shuffle(seed=n)
    if step == "slice":  # contiguous: a slice of the table, without _indices
        return dataset.select(range(n // 3, n))
    if step == "select":
        return dataset.select([n - 1, *range(0, n, 2)])
    if step == "filter":
        return dataset.filter(lambda row: row["index"] < 3) if min(dataset["index"]) < 3 else dataset
    if step == "sort":
        return dataset.sort("index", reverse=True)
    if step == "map":  # its writer makes a chunk of every two rows
        return dataset.map(lambda row: {"index": row["index"]}, writer_batch_size=2)
    return datasets.concatenate_datasets([dataset, dataset.select([n - 1]), dataset])


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


SIDES = st.sampled_from(["right", "left"])


@cache
def t5() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return heads.HEADS["t5"].build().eval()


@cache
def bart() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = heads.HEADS["bart"].build().eval()
    model.config.decoder_start_token_id = SEP
    return model


@cache
def gpt2() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(heads.HEADS["gpt2"].build().config).eval()


@cache
def bert(head: str, **config: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{head}")(tiny.bert_config(**config)).eval()


@cache
def llama() -> transformers.PreTrainedModel:
    return tiny.llama().eval()
