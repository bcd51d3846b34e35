"""Columns straight from Arrow: the same batch as from the dataset's own rows, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Array2D, Dataset, Features, LargeList, List, Value
from datasets.table import InMemoryTable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import default_data_collator

import tiny
from hf_memopt.batching.collation import BucketedCollator, RowBatch, RowReader
from hf_memopt.batching.collation.collators import DynamicPaddingCollator
from hf_memopt.batching.collation.rows import ColumnBatch
from hf_memopt.batching.views import bucketed

pytestmark = pytest.mark.filterwarnings(
    # datasets 5.2.0 sorts with an argument that pyarrow 25 deprecates.
    "ignore:Specifying null_placement in SortOptions:FutureWarning"
)

LENGTHS = [3, 0, 7, 1, 5, 2, 9, 4, 4, 6, 1, 8]
IDS = {
    "list": List(Value("int32")),
    "large_list": LargeList(Value("int64")),
    "narrow": List(Value("uint8")),
}


def make(lengths: list[int], kind: str = "list", **columns: Any) -> Dataset:
    """Return a dataset with one column of every kind that the fast path takes."""
    generator = np.random.default_rng(len(lengths))
    ids = [generator.integers(5, 100, n).tolist() for n in lengths]
    return Dataset.from_dict(
        {
            "input_ids": ids,
            "token_type_ids": [[i % 2 for i in range(n)] for n in lengths],
            "attention_mask": [[1] * n for n in lengths],
            "special_tokens_mask": [[i == 0 for i in range(n)] for n in lengths],
            "weights": [generator.random(n).tolist() for n in lengths],
            "vector": generator.random((len(lengths), 3)).tolist(),
            "flags": (generator.random((len(lengths), 2)) > 0.5).tolist(),
            "score": generator.random(len(lengths)).tolist(),
            "flag": [n % 3 == 0 for n in lengths],
            "index": list(range(len(lengths))),
            "length": lengths,
            **columns,
        },
        features=Features(
            {
                "input_ids": IDS[kind],
                "token_type_ids": List(Value("int8")),
                "attention_mask": List(Value("int8")),
                "special_tokens_mask": List(Value("bool")),
                "weights": List(Value("float64")),
                "vector": List(Value("float32"), length=3),
                "flags": List(Value("bool"), length=2),
                "score": Value("float16"),
                "flag": Value("bool"),
                "index": Value("uint16"),
                "length": Value("int64"),
                **{name: Features({name: _feature(cells)})[name] for name, cells in columns.items()},
            }
        ),
    )


def _feature(cells: list[Any]) -> Any:
    cell = cells[0]
    if isinstance(cell, list):
        return List(Value("float32" if cell and isinstance(cell[0], float) else "int64"))
    return Value({int: "int64", float: "float32", bool: "bool", str: "string"}[type(cell)])


def assert_same(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(batch) == list(other)
    for name, column in batch.items():
        assert column.dtype == other[name].dtype, name
        assert column.is_contiguous()
        assert torch.equal(column, other[name]), name


def change(dataset: Dataset, step: str) -> Dataset:
    n = len(dataset)
    if step == "shuffle":
        return dataset.shuffle(seed=n)
    if step == "slice":  # contiguous: a slice of the table, without _indices
        return dataset.select(range(n // 3, n))
    if step == "select":
        return dataset.select([n - 1, *range(0, n, 2)])
    if step == "sort":
        return dataset.sort("index", reverse=True)
    if step == "map":  # its writer makes a chunk of every two rows
        return dataset.map(lambda row: {"index": row["index"]}, writer_batch_size=2)
    return datasets.concatenate_datasets([dataset, dataset.select([n - 1]), dataset])


STEPS = st.lists(st.sampled_from(["shuffle", "slice", "select", "sort", "map", "concatenate"]), max_size=3)


# The same as from the dataset's own rows


@pytest.mark.parametrize("kind", IDS)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    steps=STEPS,
    form=st.sampled_from([None, "numpy", "torch"]),
    side=st.sampled_from(["right", "left"]),
    width=st.sampled_from([None, 24]),
    data=st.data(),
)
def test_the_batch_is_that_of_the_datasets_own_rows(kind, lengths, steps, form, side, width, data):
    dataset = make(lengths, kind)
    for step in steps:
        dataset = change(dataset, step)
    dataset = dataset.with_format(form)
    indices = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=8))
    batch = RowReader(dataset).read_columns(indices, width)
    assert isinstance(batch, ColumnBatch)  # straight from Arrow
    collator = BucketedCollator(tiny.tokenizer(side))
    own_rows = dataset.__getitems__(indices)
    found = collator([batch])
    if width is None:
        assert_same(found, collator(own_rows))
    assert_same(found, collator([RowReader(dataset).read_columns(indices, width)]))
    assert_same(found, collator([RowReader(dataset).read(indices, width)]))
    if width is not None:
        assert found["input_ids"].shape == (len(indices), width)


LABELS = {
    "class": [i % 3 for i in range(len(LENGTHS))],
    "regression": [i / 4 for i in range(len(LENGTHS))],
    "bool": [i % 2 == 0 for i in range(len(LENGTHS))],
    "targets": [[i / 2, 1.0] for i in range(len(LENGTHS))],
    "tokens": [[i] * n for i, n in enumerate(LENGTHS)],
    "decoder": [[i] * (1 + i % 4) for i in range(len(LENGTHS))],
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_of_every_kind_are_those_of_the_datasets_own_rows(labels, side):
    dataset = make(LENGTHS, labels=LABELS[labels]).shuffle(seed=3)
    collator = DynamicPaddingCollator(tiny.tokenizer(side))
    for indices in ([2, 5, 0, 11], [4], list(range(12))):
        batch = RowReader(dataset).read_columns(indices)
        assert isinstance(batch, ColumnBatch)
        assert_same(collator([batch]), collator(dataset.__getitems__(indices)))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("setting", [{"mlm_probability": 0.4}, {"causal_lm": True}, {"position_ids": True}], ids=str)
def test_language_models_draw_and_label_as_from_the_datasets_own_rows(setting, side):
    dataset = make(LENGTHS)
    collator = BucketedCollator(tiny.tokenizer(side), **setting)
    indices = [6, 2, 9]
    torch.manual_seed(7)
    expected = collator(dataset.__getitems__(indices))
    torch.manual_seed(7)
    assert_same(collator([RowReader(dataset).read_columns(indices)]), expected)


def test_a_mask_is_made_where_the_data_has_none():
    dataset = make(LENGTHS).select_columns(["input_ids"])
    collator = BucketedCollator(tiny.tokenizer("left"))
    assert_same(collator([RowReader(dataset).read_columns([2, 3])]), collator(dataset.__getitems__([2, 3])))


def test_a_memory_mapped_dataset_of_many_files(tmp_path):
    dataset = make(LENGTHS * 5)
    dataset.save_to_disk(tmp_path / "saved", num_shards=7)
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert loaded.cache_files
    assert loaded.data.column("input_ids").num_chunks == 7
    collator = BucketedCollator(tiny.tokenizer())
    for each in (loaded, loaded.shuffle(seed=1), loaded.filter(lambda row: row["index"] % 2 == 0)):
        indices = list(range(len(each)))[::-1]
        batch = RowReader(each).read_columns(indices)
        assert isinstance(batch, ColumnBatch)
        assert_same(collator([batch]), collator(each.__getitems__(indices)))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=4, max_size=12),
    cut=st.integers(1, 3),
    kind=st.sampled_from(["list", "large_list", "fixed-size list", "list<bool>"]),
)
def test_slices_of_arrow_chunks_with_offsets_of_their_own(sizes, cut, kind):
    if kind == "fixed-size list":
        sizes = [4] * len(sizes)
    types = {
        "list": pa.list_(pa.int16()),
        "large_list": pa.large_list(pa.uint32()),
        "fixed-size list": pa.list_(pa.int64(), 4),
        "list<bool>": pa.list_(pa.bool_()),
    }
    ids = [list(range(5 + i, 5 + i + n)) for i, n in enumerate(sizes)]
    cells = [[i % 3 == 0 for i in row] for row in ids] if kind == "list<bool>" else ids
    extra = pa.array([cells[-1], *cells], types[kind]).slice(1)
    table = pa.table({"input_ids": pa.array([[9], *ids], pa.list_(pa.int64())).slice(1), "extra": extra})
    pieces = pa.concat_tables([table.slice(cut), table.slice(0, cut), table.slice(1, 0), table.slice(cut - 1)])
    dataset = Dataset(InMemoryTable(pieces))
    assert dataset.data.column("extra").num_chunks >= 3
    collator = BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=None)
    indices = list(range(len(dataset)))
    batch = RowReader(dataset).read_columns(indices)
    assert isinstance(batch, ColumnBatch)
    assert_same(collator([batch]), collator(dataset.__getitems__(indices)))


@pytest.mark.parametrize("other", [pa.list_(pa.int8()), pa.large_list(pa.int16())], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
def test_lists_as_long_as_the_ids_in_some_chunks_only(other, side):
    ids = [[5, 6], [7, 8, 9], [], [6]]
    alike = [[1] * len(row) for row in ids]
    chunks = [(ids, alike), (ids[1:], [[2, 3], [4, 5, 6], []])]  # in the second as many numbers, in other rows
    tables = [
        pa.table({"input_ids": pa.array(left, pa.list_(pa.int32())), "labels": pa.array(right, other)})
        for left, right in chunks
    ]
    dataset = Dataset(InMemoryTable(pa.concat_tables(tables)))
    collator = BucketedCollator(tiny.tokenizer(side), pad_to_multiple_of=None)
    for indices in ([1, 0], [4, 1], [5, 6, 4], list(range(7))):  # token labels, then a decoder's
        batch = RowReader(dataset).read_columns(indices)
        assert isinstance(batch, ColumnBatch)
        assert_same(collator([batch]), collator(dataset.__getitems__(indices)))
    mask = dataset.rename_column("labels", "attention_mask")
    assert outcome(lambda: collator([RowReader(mask).read_columns([4])])) == (
        ValueError,
        "features[0]['attention_mask'] has 2 entries for 3 input_ids; expected one per token. Cut all columns "
        "together: tokenizer(text, truncation=True, max_length=...).",
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_only_the_rows_of_the_batch_are_converted(side):
    # 1e300 exceeds float32: converting it would warn of an overflow, and NaN as an int of an invalid value.
    weights = [[1e300, 1e300], [0.5], [np.nan, 1e300], [], [np.nan] * 2]
    features = Features({"input_ids": List(Value("int64")), "weights": List(Value("float64"))})
    dataset = Dataset.from_dict({"input_ids": [[5] * len(row) for row in weights], "weights": weights}, features)
    collator = BucketedCollator(tiny.tokenizer(side), pad_to_multiple_of=2)
    for indices in ([1], [3], [1, 3]):
        assert_same(collator([RowReader(dataset).read_columns(indices)]), collator(dataset.__getitems__(indices)))


@pytest.mark.parametrize("side", ["right", "left"])
def test_unsigned_labels_are_padded_with_a_negative_number(side):
    features = Features({"input_ids": List(Value("uint16")), "labels": List(Value("uint8"))})
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7]], "labels": [[200], [1, 2]]}, features)
    found = BucketedCollator(tiny.tokenizer(side), pad_to_multiple_of=None)([RowReader(dataset).read_columns([0, 1])])
    assert found["labels"].tolist() == [[200, -100] if side == "right" else [-100, 200], [1, 2]]


def test_lists_that_are_all_empty_are_stacked():
    features = Features({"input_ids": List(Value("int64")), "x": List(Value("int64"))})
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7], [8]], "x": [[], [], [1]]}, features)
    collator = BucketedCollator(tiny.tokenizer())
    found = collator([RowReader(dataset).read_columns([0, 1])])
    assert found["x"].shape == (2, 0)
    assert_same(found, collator(dataset.__getitems__([0, 1])))


def test_no_tensor_shares_memory_with_the_dataset():
    dataset = make([4, 4], labels=[[1] * 4] * 2)
    before = dataset.to_dict()
    for column in BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=4)(
        [RowReader(dataset).read_columns([0, 1])]
    ).values():
        column.fill_(7)
    assert dataset.to_dict() == before


# Left to the dataset itself


@pytest.mark.parametrize(
    ("cells", "feature"),
    [
        (["a", "b", "c"], Value("string")),
        ([1, None, 3], Value("int64")),
        ([[1], None, [3]], List(Value("int64"))),
        ([[1], [None], [3]], List(Value("int64"))),
        ([[[1]], [[2]], [[3]]], List(List(Value("int64")))),
        ([[[1, 2]], [[2, 3]], [[3, 4]]], Array2D((1, 2), "int64")),
        ([None, None, None], Value("null")),
    ],
    ids=["strings", "null", "null list", "null in a list", "nested", "extension type", "nulls only"],
)
def test_other_columns_are_left_to_the_dataset_with_its_errors(cells, feature):
    ids = Features({"input_ids": List(Value("int64")), "x": feature})
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7], [8]], "x": cells}, features=ids)
    collator = BucketedCollator(tiny.tokenizer())
    reader = RowReader(dataset)
    assert isinstance(reader.read_columns([0, 1]), RowBatch)
    expected = outcome(lambda: collator(dataset.__getitems__([0, 1])))
    found = outcome(lambda: collator([reader.read_columns([0, 1])]))
    assert found == expected


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a collator call gives, in a form that compares: the batch as lists, or the error."""
    try:
        return {name: (column.dtype, column.tolist()) for name, column in call().items()}
    except (TypeError, ValueError) as error:
        return type(error), str(error)


def test_a_null_row_is_named_by_the_batch_that_has_it():
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7], [8]], "label": [0, None, 1]})
    reader, collator = RowReader(dataset), BucketedCollator(tiny.tokenizer())
    assert_same(collator([reader.read_columns([0, 2])]), collator(dataset.__getitems__([0, 2])))
    with pytest.raises(ValueError) as error:
        BucketedCollator(tiny.tokenizer())([reader.read_columns([0, 1])])
    assert str(error.value) == (
        "features[1]['label'] is None where other rows have a value; expected values in all rows or in none. "
        "Filter them: dataset.filter(lambda row: row['label'] is not None)."
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"x": [[1, 2], [3]]},
        {"attention_mask": [[1], [1]]},
        {"labels": [0, 1], "label": [0, 1]},
        {"labels": [[1.0], [1.0, 2.0]]},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_raise_the_same_error(columns):
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7]], **columns})
    collator = BucketedCollator(tiny.tokenizer())
    assert isinstance(RowReader(dataset).read_columns([0, 1]), ColumnBatch)
    kind, message = outcome(lambda: collator([RowReader(dataset).read_columns([0, 1])]))
    assert kind is ValueError
    assert (kind, message) == outcome(lambda: collator(dataset.__getitems__([0, 1])))


class Doubling(Dataset):
    """A subclass that reads its rows in its own way."""

    def __getitems__(self, keys):
        return [{"input_ids": row["input_ids"] * 2} for row in super().__getitems__(keys)]


def test_transforms_other_formats_and_subclasses_are_left_to_the_dataset():
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7]]})
    plus_one = dataset.with_transform(lambda rows: {"input_ids": [[i + 1 for i in row] for row in rows["input_ids"]]})
    assert RowReader(plus_one).read([1]) == [{"input_ids": [7, 8]}]
    for other in (plus_one, dataset.with_format("pandas"), dataset.with_format("numpy", dtype=np.float32)):
        assert isinstance(RowReader(other).read_columns([1]), RowBatch)
    subclass = Doubling(dataset.data)
    assert isinstance(RowReader(subclass).read_columns([1]), RowBatch)
    assert RowReader(subclass).read([1]) == [{"input_ids": [6, 7, 6, 7]}]


def test_a_format_whose_rows_are_tables_gives_plain_rows():
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7]], "labels": [0, 1]})
    reader = RowReader(dataset.with_format("arrow", columns=["input_ids"]))
    assert set(reader.read_columns([1]).columns) == {"input_ids"}
    assert reader.read([1]) == [{"input_ids": [6, 7]}]
    assert set(bucketed(dataset.with_format("arrow"), batch_size=1)[0]) == {"input_ids", "labels"}


def test_a_format_that_is_set_later_is_seen():
    dataset = make(LENGTHS)
    reader = RowReader(dataset)
    assert "score" in reader.read_columns([0]).columns
    dataset.set_format("torch", columns=["input_ids", "index"])  # changes `_fingerprint`, in datasets 3.0 to 5.2
    assert list(reader.read_columns([0]).columns) == ["input_ids", "index"]
    dataset.set_transform(lambda rows: {"input_ids": [[1]] * len(rows["index"])})
    assert isinstance(reader.read_columns([0]), RowBatch)
    assert reader.read([0]) == [{"input_ids": [1]}]


@pytest.mark.parametrize("rows", [[-1, 0], [0, 12]])
def test_rows_out_of_range_mean_what_they_mean_to_the_dataset(rows):
    dataset = make(LENGTHS)
    assert outcome_of_rows(lambda: RowReader(dataset).read(rows)) == outcome_of_rows(lambda: dataset.__getitems__(rows))


def outcome_of_rows(call: Callable[[], Any]) -> Any:
    try:
        return list(call())
    except IndexError as error:
        return str(error)


@pytest.mark.parametrize("build", [list, lambda rows: torch.utils.data.Subset(rows, [0, 1, 2])], ids=["list", "Subset"])
def test_any_other_dataset_is_read_row_by_row(build):
    rows = [{"input_ids": [5]}, {"input_ids": [6, 7]}, {"input_ids": [8]}]
    reader = RowReader(build(rows))
    batch = reader.read_columns(np.array([2, 0]))
    assert isinstance(batch, RowBatch)
    assert batch == [rows[2], rows[0]]
    collator = BucketedCollator(tiny.tokenizer())
    assert_same(collator(reader.read([2, 0])), collator([rows[2], rows[0]]))


# Columns to keep


def test_keep_reads_only_these_columns_on_both_ways():
    dataset = make(LENGTHS).add_column("text", ["w1"] * len(LENGTHS))
    reader = RowReader(dataset)
    assert isinstance(reader.read_columns([0]), RowBatch)
    reader.keep(["input_ids", "index", "no such column"])
    assert list(reader.read_columns([0]).columns) == ["input_ids", "index"]
    assert reader.read([2]) == [{"input_ids": dataset[2]["input_ids"], "index": 2}]
    reader.keep(None)
    assert reader.read([2]) == [dataset[2]]
    plain = RowReader([{"input_ids": [5], "text": "w1"}, 7])
    plain.keep(["input_ids"])
    assert plain.read([0, 1]) == [{"input_ids": [5]}, 7]


def test_columns_that_are_not_kept_are_not_decoded():
    dataset = make(LENGTHS).with_transform(lambda rows: {**rows, "text": ["w"] * len(rows["index"])})
    reader = RowReader(dataset)
    reader.keep(["input_ids", "text"])
    assert reader.read([2]) == [{"input_ids": dataset[2]["input_ids"], "text": "w"}]  # a transform sees all columns


# Width


@pytest.mark.parametrize("read", [True, False])
def test_a_row_longer_than_the_width_is_refused(read):
    reader = RowReader(make(LENGTHS))
    batch = (reader.read if read else reader.read_columns)([0, 2], width=5)
    with pytest.raises(ValueError) as error:
        BucketedCollator(tiny.tokenizer())([batch])
    assert str(error.value) == (
        "width=5 is too short for features[1]['input_ids'] with 7 ids; expected the longest row to fit. Give the view "
        "the true lengths: bucketed(dataset, ..., lengths=token_lengths(dataset))."
    )


def test_several_row_batches_are_spliced_and_share_the_largest_width():
    dataset = make(LENGTHS)
    reader, collator = RowReader(dataset), BucketedCollator(tiny.tokenizer())
    rows = dataset.__getitems__([0, 2, 5])
    assert_same(collator([reader.read([0, 2]), reader.read([5])]), collator(rows))
    assert_same(DynamicPaddingCollator(tiny.tokenizer())([reader.read([0, 2]), rows[2]]), collator(rows))
    assert_same(collator([reader.read([0]), rows[1:]]), collator(rows))
    wide = collator([reader.read([0, 2], width=16), reader.read([5], width=24)])
    assert wide["input_ids"].shape == (3, 24)
    assert collator([reader.read([0, 2], width=16), rows[2]])["input_ids"].shape == (3, 8)


def test_inner_gets_a_plain_list_of_rows():
    dataset = make([3, 3], label=[0, 1]).select_columns(["input_ids", "label"])
    seen = []

    def inner(features):
        seen.append((type(features), [type(row) for row in features]))
        return default_data_collator(features)

    for wrap in (lambda batch: batch, lambda batch: [batch]):
        batch = DynamicPaddingCollator(inner=inner)(wrap(RowReader(dataset).read([1, 0])))
        assert_same(batch, default_data_collator(dataset.__getitems__([1, 0])))
    assert seen == [(list, [dict, dict])] * 2


# In a DataLoader


class View(torch.utils.data.Dataset):
    def __init__(self, dataset: Dataset) -> None:
        self.reader = RowReader(dataset)

    def __len__(self) -> int:
        return len(self.reader.dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.reader.read_columns(indices)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_the_batches_of_the_plain_dataset(workers):
    dataset = make(LENGTHS).shuffle(seed=2)
    collator = BucketedCollator(tiny.tokenizer())
    found = list(DataLoader(View(dataset), batch_size=5, collate_fn=collator, num_workers=workers))
    expected = list(DataLoader(dataset, batch_size=5, collate_fn=collator))
    assert len(found) == len(expected) == 3
    for batch, other in zip(found, expected, strict=True):
        assert_same(batch, other)


def test_a_pickled_reader_carries_the_dataset_and_nothing_else():
    dataset = make(LENGTHS)
    reader = RowReader(dataset)
    reader.keep(["input_ids"])
    assert isinstance(reader.read_columns([2]), ColumnBatch)
    assert len(pickle.dumps(reader)) < len(pickle.dumps(dataset)) + 300
    twin = pickle.loads(pickle.dumps(reader))
    assert twin.read([2]) == reader.read([2])
    assert list(twin.read_columns([2]).columns) == ["input_ids"]
