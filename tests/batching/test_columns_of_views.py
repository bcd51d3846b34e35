"""What an attached Trainer's DataLoader gives of a view, straight from Arrow: the batches of the dataset's own rows."""

from __future__ import annotations

import pickle
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from collated_rows import assert_same, change, t5
from datasets import Array2D, Dataset, Features, LargeList, List, Value
from datasets.table import InMemoryTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import refuses, whole
from torch.utils.data import Subset
from transformers import Trainer, default_data_collator

import tiny
from hf_memopt import BucketedCollator, attach, bucketed

pytestmark = [
    # datasets 5.2.0 sorts with an argument that pyarrow 25 deprecates.
    pytest.mark.filterwarnings("ignore:Specifying null_placement in SortOptions:FutureWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with one core
]
LENGTHS = [3, 0, 7, 1, 5, 2, 9, 4, 4, 6, 1, 8]
IDS = {"list": List(Value("int32")), "large_list": LargeList(Value("int64")), "narrow": List(Value("uint8"))}
KINDS = {
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
}


def make(lengths: list[int], kind: str = "list") -> Dataset:
    """Return a dataset with one column of every kind that is read straight from Arrow."""
    generator, count = np.random.default_rng(len(lengths)), len(lengths)
    columns = {
        "input_ids": [generator.integers(5, 100, n).tolist() for n in lengths],
        "token_type_ids": [[i % 2 for i in range(n)] for n in lengths],
        "attention_mask": [[1] * n for n in lengths],
        "special_tokens_mask": [[i == 0 for i in range(n)] for n in lengths],
        "weights": [generator.random(n).tolist() for n in lengths],
        "vector": generator.random((count, 3)).tolist(),
        "flags": (generator.random((count, 2)) > 0.5).tolist(),
        "score": generator.random(count).tolist(),
        "flag": [n % 3 == 0 for n in lengths],
        "index": list(range(count)),
        "length": lengths,
    }
    return Dataset.from_dict(columns, features=Features({"input_ids": IDS[kind], **KINDS}))


class Seeded(BucketedCollator):
    """Draws the same masks for the same batch."""

    def _pad_inputs(self, *args: Any) -> Any:  # before the masks; one with a __call__ of its own gets no columns
        torch.manual_seed(7)
        return super()._pad_inputs(*args)


def outcome(call: Any) -> Any:
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)


def check(
    folder: Any,
    dataset: Any,
    collator: Any = None,
    *,
    from_arrow: bool,
    model: Any = None,
    size: int = 4,
    **of_args: Any,
) -> None:
    """Compare every batch of the DataLoader, or its error, with that of ``dataset[i]``; see where it is read."""
    collator = collator or BucketedCollator(tiny.tokenizer())
    view = bucketed(dataset, batch_size=size, lengths=[1 + i % 5 for i in range(len(dataset))])
    args = tiny.arguments(folder, per_device_train_batch_size=size, remove_unused_columns=False, **of_args)
    trainer = attach(Trainer(model or tiny.bert(), args, train_dataset=view, data_collator=collator))
    read, rows_read = view.reader.read, []
    view.reader.read = lambda *given: rows_read.append(given) or read(*given)
    loader = iter(trainer.get_train_dataloader())
    for first in range(0, len(view), size):
        own = [dataset[i] for i in view.indices_of(range(first, min(first + size, len(view))))]
        found, expected = outcome(lambda: next(loader)), outcome(lambda own=own: collator(own))
        if isinstance(expected, tuple):
            assert found == expected
            break
        assert_same(dict(found), expected)
    assert bool(rows_read) != from_arrow or of_args.get("dataloader_num_workers")


QUIET = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", IDS)
@QUIET
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    steps=st.lists(st.sampled_from(["shuffle", "slice", "select", "filter", "sort", "map", "concatenate"]), max_size=3),
    form=st.sampled_from([None, "numpy", "torch", "arrow"]),
    side=st.sampled_from(["right", "left"]),
)
def test_the_batches_are_those_of_the_datasets_own_rows(kind, lengths, steps, form, side, tmp_path):
    dataset = make(lengths, kind)
    for step in steps:
        dataset = change(dataset, step)
    collator = BucketedCollator(tiny.tokenizer(side))
    if form != "arrow":
        dataset = dataset.with_format(form)
        check(tmp_path, dataset, collator, from_arrow=True)
        return
    view = bucketed(dataset.with_format("arrow"), batch_size=1, lengths=[1] * len(dataset))
    assert view[0] == dataset[view.indices_of([0])[0]]  # rows, not tables


LABELS = {
    "class": [i % 3 for i in range(len(LENGTHS))],
    "regression": [i / 4 for i in range(len(LENGTHS))],
    "bool": [i % 2 == 0 for i in range(len(LENGTHS))],
    "targets": [[i / 2, 1.0] for i in range(len(LENGTHS))],
    "tokens": [[i] * n for i, n in enumerate(LENGTHS)],
    "decoder": [[i] * (1 + i % 4) for i in range(len(LENGTHS))],
}
OF_COLLATOR: dict[str, dict[str, Any]] = {
    "masked": {"mlm_probability": 0.4},
    "causal": {"causal_lm": True},
    "positions": {"position_ids": True},
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", [*LABELS, *OF_COLLATOR])
def test_labels_and_language_models_are_those_of_the_datasets_own_rows(case, side, tmp_path):
    dataset = make(LENGTHS)
    if case in LABELS:
        dataset = dataset.add_column("labels", LABELS[case])
    collator = Seeded(tiny.tokenizer(side), **OF_COLLATOR.get(case, {}))
    model = t5() if case == "decoder" else None
    check(tmp_path, dataset.shuffle(seed=3), collator, from_arrow=True, model=model)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_memory_mapped_dataset_of_many_files_and_workers(workers, tmp_path):
    make(LENGTHS * 5).save_to_disk(tmp_path / "saved", num_shards=7)
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert loaded.data.column("input_ids").num_chunks == 7
    for each in (loaded, loaded.shuffle(seed=1), loaded.filter(lambda row: row["index"] % 2 == 0)):
        check(tmp_path, each, from_arrow=True, dataloader_num_workers=workers)


@QUIET
@given(
    sizes=st.lists(st.integers(0, 9), min_size=4, max_size=12),
    cut=st.integers(1, 3),
    kind=st.sampled_from(["list", "large_list", "fixed-size list", "list<bool>"]),
)
def test_slices_of_arrow_chunks_with_offsets_of_their_own(sizes, cut, kind, tmp_path):
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
    check(tmp_path, dataset, BucketedCollator(tiny.tokenizer(), pad_to_multiple_of=None), from_arrow=True)


OTHERS = {
    "strings": (["a", "b", "c"], Value("string")),
    "null": ([1, None, 3], Value("int64")),
    "null list": ([[1], None, [3]], List(Value("int64"))),
    "null in a list": ([[1], [None], [3]], List(Value("int64"))),
    "nested": ([[[1]], [[2]], [[3]]], List(List(Value("int64")))),
    "extension type": ([[[1, 2]], [[2, 3]], [[3, 4]]], Array2D((1, 2), "int64")),
    "nulls only": ([None, None, None], Value("null")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_columns_are_left_to_the_dataset_with_its_errors(name, tmp_path):
    cells, feature = OTHERS[name]
    features = Features({"input_ids": List(Value("int64")), "x": feature})
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7], [8]], "x": cells}, features=features)
    check(tmp_path, dataset, from_arrow=False)


@pytest.mark.parametrize("columns", [{"x": [[1, 2], [3]]}, {"attention_mask": [[1], [1]]}, {"label": [0, 1]}], ids=str)
def test_columns_that_do_not_fit_raise_the_same_error(columns, tmp_path):
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7]], "labels": [0, 1], **columns})
    check(tmp_path, dataset, from_arrow=True)


class Doubling(Dataset):
    """A subclass that reads its rows in its own way."""

    def __getitems__(self, keys):
        return [{"input_ids": row["input_ids"] * 2} for row in super().__getitems__(keys)]

    def __getitem__(self, key):
        return self.__getitems__([key])[0] if isinstance(key, int) else super().__getitem__(key)


def test_transforms_other_formats_and_other_datasets_are_left_to_themselves(tmp_path):
    dataset = Dataset.from_dict({"input_ids": [[5], [6, 7]]})
    plus_one = dataset.with_transform(lambda rows: {"input_ids": [[i + 1 for i in row] for row in rows["input_ids"]]})
    by_row, rows = [plus_one, dataset.with_format("numpy", dtype=np.int32), Doubling(dataset.data)], list(dataset)
    for other in (*by_row, rows, Subset(rows, [1, 0])):
        check(tmp_path, other, from_arrow=False)


def test_a_pickled_view_carries_the_dataset_and_nothing_that_was_prepared():
    dataset = make(LENGTHS)
    view = bucketed(dataset, batch_size=2, lengths=[1] * len(LENGTHS))
    size = len(pickle.dumps(view))
    first = view[0]
    assert len(pickle.dumps(view)) < size + 100
    assert size < len(pickle.dumps(dataset)) + 3000
    assert pickle.loads(pickle.dumps(view))[0] == first


def test_lengths_that_are_too_short_and_batches_of_different_widths():
    rows = [{"input_ids": [5] * 9}, {"input_ids": [6]}, {"input_ids": [7] * 3}, {"input_ids": [8] * 3}]
    collator = BucketedCollator(tiny.tokenizer())
    wrong = bucketed(rows, max_tokens=16, boundaries=[4, 8], lengths=[8, 1, 3, 3])
    refuses(ValueError, whole("width=8 is too short"), lambda: [collator([batch]) for batch in wrong])
    right = bucketed(rows, max_tokens=24, boundaries=[4, 12])
    short, long = sorted((right[i] for i in range(2)), key=lambda batch: batch.width)
    assert collator([short, long])["input_ids"].shape == (4, 12)
    assert collator([short, rows[0]])["input_ids"].shape == (len(short) + 1, 16)
    seen: list[Any] = []
    inner = BucketedCollator(inner=lambda features: seen.append(features) or default_data_collator(features))
    inner([bucketed([{"x": 1}], max_tokens=8, lengths=[1])[0]])
    assert seen == [[{"x": 1}]]
    assert type(seen[0]) is list
