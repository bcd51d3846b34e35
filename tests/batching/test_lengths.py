"""Lengths from Arrow offsets: equal to counting row by row, whatever way the dataset was made; clear errors."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from collated_rows import change
from datasets import Dataset, Features, LargeList, List, Value
from datasets.table import InMemoryTable
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import refuses, table, whole
from torch.utils.data import Subset

import tiny
from hf_memopt import bucketed, sorted_by_length, token_lengths


@pytest.fixture(autouse=True, scope="module")
def _quiet_progress() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def slow_lengths(dataset: Any, column: str = "input_ids") -> list[int]:
    return [0 if row[column] is None else len(row[column]) for row in (dataset[i] for i in range(len(dataset)))]


def assert_same_as_slow(dataset: Any) -> None:
    found = token_lengths(dataset)
    assert found.dtype == np.int32
    assert found.tolist() == slow_lengths(dataset)


def ids(lengths: list[int]) -> list[list[int]]:
    return [list(range(5, 5 + n)) for n in lengths]


KINDS = {
    "list": List(Value("int64")),
    "large_list": LargeList(Value("int32")),
    "fixed-size list": List(Value("int16"), length=3),
}
LENGTHS = st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=12)
STEPS = st.lists(st.sampled_from(["shuffle", "slice", "select", "filter", "sort", "concatenate"]), max_size=4)


def make(kind: str, lengths: list[int | None]) -> Dataset:
    sizes = [3 if kind == "fixed-size list" and n is not None else n for n in lengths]
    rows = [None if n is None else ids([n])[0] for n in sizes]
    return Dataset.from_dict(
        {"input_ids": rows, "index": [(7 * i) % 5 for i in range(len(rows))]},
        features=Features({"input_ids": KINDS[kind], "index": Value("int64")}),
    )


# datasets 5.2.0 sorts with an argument that pyarrow 25 deprecates.
@pytest.mark.filterwarnings("ignore:Specifying null_placement in SortOptions:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(lengths=LENGTHS, steps=STEPS)
def test_equals_the_slow_way_after_any_steps(kind, lengths, steps):
    dataset = make(kind, lengths)
    for step in steps:
        dataset = change(dataset, step)
    assert_same_as_slow(dataset)


@given(lengths=LENGTHS.filter(lambda found: len(found) > 3), chunks=st.integers(1, 3))
def test_equals_the_slow_way_on_slices_of_arrow_chunks(lengths, chunks):
    rows = pa.array([None if n is None else ids([n])[0] for n in lengths], pa.list_(pa.int64()))
    pieces = [rows.slice(start, len(rows) - start) for start in range(1, 1 + chunks)] + [rows.slice(1, 0)]
    assert_same_as_slow(Dataset(InMemoryTable(pa.table({"input_ids": pa.chunked_array(pieces)}))))


def test_a_memory_mapped_dataset_of_several_files(tmp_path):
    dataset = make("list", [3, 1, None, 4, 1, 5, 9, 2, 6])
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert loaded.cache_files
    assert_same_as_slow(loaded)
    assert_same_as_slow(loaded.shuffle(seed=0))


def test_ids_made_by_a_transform_are_counted_row_by_row():
    dataset = Dataset.from_dict({"text": ["a b c", "d", "", "e f"]}).with_transform(
        lambda batch: {"input_ids": [[5] * len(text.split()) for text in batch["text"]]}
    )
    assert token_lengths(dataset).tolist() == [3, 1, 0, 2]
    assert token_lengths(dataset.select([3, 0])).tolist() == [2, 3]


@pytest.mark.parametrize("convert", [list, tuple, np.array, torch.tensor, lambda row: np.array(row, np.uint16)])
def test_rows_of_any_other_dataset(convert):
    rows = [{"input_ids": convert(row), "label": 0} for row in ids([3, 1, 4])]
    assert token_lengths(rows).tolist() == [3, 1, 4]
    assert token_lengths(Subset(rows, [2, 0])).tolist() == [4, 3]
    assert token_lengths(rows, column="input_ids").dtype == np.int32


def test_what_is_private_of_datasets_is_where_it_was():
    # Seen in datasets 5.2.0: `.data` wraps the pyarrow table as `.table`; `_indices` wraps a table of one uint64 column
    # of row numbers, and is None where the rows are the table's own.
    dataset = make("list", [3, 1, 4])
    assert isinstance(dataset.data.table, pa.Table)
    assert dataset._indices is None
    chosen = dataset.select([2, 0])
    assert chosen._indices.column(0).type == pa.uint64()
    assert chosen._indices.column(0).to_pylist() == [2, 0]


OTHERS = "Of sound or pictures pass the lengths: bucketed(dataset, ..., lengths=[...]), or "
OTHERS += "recipe.replace(bucketing=False)"
MAP = 'dataset.map(lambda row: tokenizer(row["text"]))'
NO_IDS = [
    *table("batching/tables/no_token_ids"),
    (np.array([5.5]), "like array([5.5]) in row 1"),
    (np.array([[5, 6]]), "like array([[5, 6]]) in row 1"),
    (torch.tensor([True]), "like tensor([True]) in row 1"),
]


@pytest.mark.parametrize(("cells", "found"), NO_IDS, ids=[found for _, found in NO_IDS])
def test_a_column_of_something_else_is_refused(cells, found):
    dataset = [{"input_ids": [5]}, {"input_ids": cells}]
    if "of type" in found:
        dataset = Dataset(InMemoryTable(pa.table({"input_ids": pa.array(cells)})))
    refuses(ValueError, whole("column='input_ids' does", found=found, map=MAP, others=OTHERS), token_lengths, dataset)


EMPTY = "dataset=<0 examples> is empty; expected at least one example. Check the filter that made it"
MISSING = whole("column='input_ids' is", map=MAP, others=OTHERS)
NO_COLUMNS = whole("row 0=<tuple> has no", others=OTHERS)
WRONG = [{"inputs_ids": [5], "length": 1}]
OF_TRL: list[tuple[dict[str, Any], str]] = [  # a row as DPO, reward and KTO have it, and the line that counts it
    (
        {"prompt": "a", "prompt_ids": [5], "chosen_ids": [6, 7], "rejected_ids": [8]},
        "token_lengths(dataset, 'prompt_ids') + numpy.max([token_lengths(dataset, 'chosen_ids'), "
        "token_lengths(dataset, 'rejected_ids')], axis=0)",
    ),
    (
        {"chosen_ids": [6, 7], "rejected_ids": [5, 6, 8]},
        "numpy.max([token_lengths(dataset, 'chosen_ids'), token_lengths(dataset, 'rejected_ids')], axis=0)",
    ),
    (
        {"prompt_ids": [5], "completion_ids": [6, 7], "label": 1},
        "token_lengths(dataset, 'prompt_ids') + numpy.max([token_lengths(dataset, 'completion_ids')], axis=0)",
    ),
]
TOKENISED = [
    (
        rows,
        f"column='input_ids' is not in {where}; expected one of {sorted(row)}. Tokenised already: pass lengths={line}",
    )
    for row, line in OF_TRL
    for rows, where in (([row], "row 0"), (Dataset.from_list([row]), "the dataset"))
]
REFUSED: list[tuple[Any, Any, str]] = [
    ([], "input_ids", EMPTY),
    (Dataset.from_dict({"input_ids": []}), "input_ids", EMPTY),
    (WRONG, "input_ids", MISSING.format("row 0")),
    (Dataset.from_list(WRONG), "input_ids", MISSING.format("the dataset")),
    ([([5, 6], 1)], "input_ids", NO_COLUMNS),
    *((rows, "input_ids", message) for rows, message in TOKENISED),
    *[
        (rows, name, f"column={name!r} is invalid; expected a string. Pass column='input_ids'")
        for name in (1, None, ["input_ids"], 0.5, b"input_ids")
        for rows in ([{"input_ids": [5]}], Dataset.from_dict({"input_ids": [[5]]}))
    ],
]


@pytest.mark.parametrize(("row", "line"), OF_TRL, ids=[",".join(row) for row, _ in OF_TRL])
def test_the_line_that_is_named_counts_the_tokens_of_an_example(row, line):
    dataset = Dataset.from_list([row, row])
    lengths = eval(line, {"numpy": np, "token_lengths": token_lengths, "dataset": dataset})
    assert lengths.tolist() == [3, 3]
    assert bucketed(dataset, batch_size=1, boundaries=[2, 4], lengths=lengths).plan.width(0) == 4


@pytest.mark.parametrize(("dataset", "column", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_counted_is_told_in_whole(dataset, column, message):
    refuses((TypeError, ValueError), message, token_lengths, dataset, column)


ROW = {"input_ids": [5, 6], "label": 1}
TABLES = {
    "DataFrame": (pd.DataFrame([ROW]), "datasets.Dataset.from_pandas(dataset)"),
    "Table": (pa.Table.from_pylist([ROW]), "datasets.Dataset(dataset)"),
    "dict": ({"input_ids": [[5, 6]]}, "datasets.Dataset.from_dict(dict(dataset))"),
    "BatchEncoding": (tiny.tokenizer()(["w1 w2", "w3"]), "datasets.Dataset.from_dict(dict(dataset))"),
    "DatasetDict": (datasets.DatasetDict(train=Dataset.from_list([ROW])), "one of its parts: dataset['train']"),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_indexed_by_column_is_refused(name):
    table, fix = TABLES[name]
    for read in (
        lambda: token_lengths(table),
        lambda: bucketed(table, batch_size=1, lengths=[1] * len(table)),
        lambda: sorted_by_length(table),
    ):
        refuses(
            TypeError, f"dataset=<{name}> is indexed by column; expected rows: dataset[0] an example. Pass {fix}", read
        )


@pytest.mark.parametrize("padding", [False, True])
def test_rows_that_were_padded_before_are_told_of_once(padding, caplog):
    texts = [" ".join(["w1"] * n) for n in (3, 17, 5)] * 3
    rows = Dataset.from_list(
        [dict(tiny.tokenizer()(text, padding="max_length" if padding else False, max_length=23)) for text in texts]
    )
    with caplog.at_level("WARNING", logger="hf_memopt"):
        for _ in range(2):
            assert set(token_lengths(rows).tolist()) == ({23} if padding else {5, 19, 7})
    assert caplog.messages == [whole("attention_mask has 98")] * padding
