"""Bucketed streams: every example once a pass, the budget and the bound kept, one order for any number of workers, and
the stock Trainer resuming exactly, alone and in two processes.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info
from transformers import Trainer

import tiny
from hf_memopt.batching.collation import BucketedCollator
from hf_memopt.batching.views import BucketedStream
from hf_memopt.binding import attach
from hf_memopt.changes import Change
from two_ranks import run_pair

COUNT = 38
LENGTHS = [(7 * i) % 23 + 1 for i in range(COUNT)]
one_core = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core


def example(i: int, length: int | None = None) -> dict[str, Any]:
    """Return an example whose first token, 5 + i, tells which one it is."""
    return {"input_ids": [5 + i] + [50] * ((LENGTHS[i] if length is None else length) - 1), "labels": i % 3}


class Rows(torch.utils.data.IterableDataset):
    """The plain kind: it knows neither epochs nor workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(example, range(COUNT))


class Shared(torch.utils.data.IterableDataset):
    """The kind that shares itself out among the workers, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return map(example, range(first, COUNT, step))


class Passes(torch.utils.data.IterableDataset):
    """``passes`` passes over rows of the given lengths, each row tagged with (pass, position); empty after that."""

    def __init__(self, lengths: list[int], passes: int = 1, row: Callable[..., Any] = dict) -> None:
        self.lengths, self.passes, self.epoch, self.row = lengths, passes, 0, row

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for i, length in enumerate(self.lengths if self.epoch < self.passes else []):
            yield self.row(input_ids=[1] * length, tag=(self.epoch, i))


def arrow_stream(shards: int = 4) -> IterableDataset:
    """Return a stream of datasets that shuffles anew in every pass."""
    rows = Dataset.from_list([example(i) for i in range(COUNT)])
    return rows.to_iterable_dataset(num_shards=shards).shuffle(seed=3, buffer_size=5)


SOURCES = {"plain": Rows, "shared": Shared, "arrow": arrow_stream, "arrow, one shard": lambda: arrow_stream(1)}
MODES = {"examples": {"batch_size": 4}, "batches": {"max_tokens": 96}}


def identity(row: dict[str, Any]) -> int:
    return int(row["input_ids"][0]) - 5


def identities(items: list[Any]) -> Any:
    """Collate to the numbers of the examples."""
    return [identities(item) if isinstance(item, list) else identity(item) for item in items]


def lognormal_lengths(count: int) -> list[int]:
    drawn = np.exp(np.random.default_rng(0).normal(np.log(60), 0.85, count))
    return np.clip(drawn, 4, 512).astype(int).tolist()


def padded(length: int) -> int:
    return -(-max(length, 1) // 8) * 8


def padded_tokens(batch: list[Any]) -> int:
    return len(batch) * max(padded(len(row["input_ids"])) for row in batch)


def batches_of(stream: BucketedStream) -> list[list[Any]]:
    """Read a stream that ends and return its batches."""
    items = list(stream)
    if stream.batch_size is None:
        return items
    return [items[i : i + stream.batch_size] for i in range(0, len(items), stream.batch_size)]


# The order


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    passes=st.integers(1, 3),
    sizes=st.sampled_from([{"batch_size": 1}, {"batch_size": 5}, {"max_tokens": 64}, {"max_tokens": 200}]),
    world_size=st.integers(1, 3),
    buffer_examples=st.integers(15, 70),
    seed=st.integers(0, 3),
)
def test_every_example_of_a_pass_comes_once_within_the_budget_and_one_pass_after_the_other(
    lengths, passes, sizes, world_size, buffer_examples, seed
):
    settings = {**sizes, "world_size": world_size, "buffer_examples": buffer_examples, "seed": seed}
    stream = BucketedStream(Passes(lengths, passes), **settings)
    batches = batches_of(stream)
    tags = Counter(row["tag"] for batch in batches for row in batch)
    assert tags == Counter((number, i) for number in range(passes) for i in range(len(lengths)))

    groups = [batches[i : i + world_size] for i in range(0, len(batches), world_size)]
    for group in groups[:-1]:
        assert len({len(batch) for batch in group}) == 1
    if "batch_size" in sizes:
        assert {len(batch) for batch in batches[:-1]} <= {sizes["batch_size"]}
        assert len(batches) == -(-passes * len(lengths) // sizes["batch_size"])
    else:
        assert all(padded_tokens(batch) <= sizes["max_tokens"] for batch in batches)
    spans = [[i for i, group in enumerate(groups) for b in group for r in b if r["tag"][0] == n] for n in range(passes)]
    for before, after in itertools.pairwise(spans):
        assert max(before) <= min(after)  # at most one group holds examples of both
    assert batches_of(stream) == batches
    assert batches_of(BucketedStream(Passes(lengths, passes), **settings)) == batches


def test_another_seed_another_pass_and_another_start_give_another_order():
    def order(start: int = 0, count: int = COUNT, **settings: Any) -> list[int]:
        stream = BucketedStream(Rows(), batch_size=1, buffer_examples=20, **settings)
        stream.set_epoch(start)
        stream.set_epoch(start)  # the Trainer and accelerate do
        assert stream.epoch == start
        return [identity(row) for row in itertools.islice(stream, count)]

    two_passes = order(count=2 * COUNT)
    assert sorted(two_passes[:COUNT]) == sorted(two_passes[COUNT:]) == list(range(COUNT))
    assert two_passes[:COUNT] != two_passes[COUNT:]
    assert order(start=1) == two_passes[COUNT:]
    assert order(seed=1) != order(seed=0) == two_passes[:COUNT]


class Row(dict[str, Any]):
    """A dict that weak references can follow."""


@pytest.mark.parametrize("sizes", [{"batch_size": 4}, {"max_tokens": 512}], ids=["examples", "batches"])
@pytest.mark.parametrize("shape", ["random", "rising", "falling", "all different", "two far apart"])
def test_no_stream_makes_it_hold_more_than_its_buffer(sizes, shape):
    lengths = {
        "random": lognormal_lengths(1500),
        "rising": sorted(lognormal_lengths(1500)),
        "falling": sorted(lognormal_lengths(1500), reverse=True),
        "all different": [i % 64 * 8 + 1 for i in range(1500)],
        "two far apart": [512 if i % 50 == 0 else 1 for i in range(1500)],
    }[shape]
    alive, most = 0, 0

    def row(**columns: Any) -> Row:
        nonlocal alive, most
        made = Row(columns)
        weakref.finalize(made, died)
        alive += 1
        most = max(most, alive)
        return made

    def died() -> None:
        nonlocal alive
        alive -= 1

    buffer = 48
    stream = BucketedStream(Passes(lengths, 2, row), buffer_examples=buffer, **sizes)
    largest = read = 0
    for item in stream:
        rows = 1 if "batch_size" in sizes else len(item)
        largest, read = max(largest, rows), read + rows
    assert read == 3000
    handed_out = 4 if "batch_size" in sizes else largest
    assert buffer <= most <= buffer + handed_out + 1  # the group handed out last, and the row just read


@pytest.mark.parametrize(("sizes", "least"), [({"batch_size": 32}, 3.0), ({"max_tokens": 8192}, 4.0)])
def test_padding_is_a_fraction_of_that_of_the_unbucketed_order(sizes, least):
    lengths = lognormal_lengths(20_000)
    stream = BucketedStream(Passes(lengths), buffer_examples=2048, **sizes)
    batches = batches_of(stream)
    assert sum(map(len, batches)) == len(lengths)
    efficiency = sum(lengths) / sum(map(padded_tokens, batches))
    rows = sizes.get("batch_size") or round(np.mean([len(batch) for batch in batches]))
    unbucketed = [lengths[i : i + rows] for i in range(0, len(lengths), rows)]
    efficiency_before = sum(lengths) / sum(len(batch) * padded(max(batch)) for batch in unbucketed)
    assert efficiency > 0.88
    assert efficiency / efficiency_before > least
    if "max_tokens" in sizes:
        assert np.mean([padded_tokens(batch) for batch in batches]) > 0.96 * sizes["max_tokens"]


def test_lengths_do_not_come_in_waves():
    batches = batches_of(BucketedStream(Passes(lognormal_lengths(50_000)), batch_size=32, buffer_examples=2048))
    means = np.array([np.mean([len(row["input_ids"]) for row in batch]) for batch in batches])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("sizes", [{"batch_size": 8}, {"max_tokens": 2048}], ids=["examples", "batches"])
def test_no_length_waits_longer_than_others(sizes):
    lengths = [256 if i % 200 == 0 else 8 if i % 200 == 100 else 100 for i in range(8000)]
    waits: dict[int, list[int]] = {8: [], 100: [], 256: []}
    out = 0
    for batch in batches_of(BucketedStream(Passes(lengths), buffer_examples=256, **sizes)):
        for row in batch:
            waits[len(row["input_ids"])].append(out - row["tag"][1])
        out += len(batch)
    usual = np.mean(waits[100])
    assert abs(usual) < 256
    assert np.mean(waits[8]) < usual + 256
    assert np.mean(waits[256]) < usual + 256


def test_boundaries_set_the_rows_and_the_width_of_a_batch():
    stream = BucketedStream(Rows(), max_tokens=96, boundaries=[9, 24], buffer_examples=COUNT)
    seen = list(itertools.islice(stream, 30))
    for batch in seen:
        longest = max(len(row["input_ids"]) for row in batch)
        assert batch.width == (9 if longest <= 9 else 24)
        assert len(batch) * batch.width <= 96
        assert BucketedCollator(tiny.tokenizer())([batch])["input_ids"].shape == (len(batch), batch.width)
    assert {batch.width for batch in seen} == {9, 24}
    assert max(len(batch) for batch in seen) == 10


# Workers


# Arrow's generators of random numbers and torch's way of sharing a stream out are what workers could spoil.
@one_core
@pytest.mark.parametrize(
    ("source", "workers"),
    [
        pytest.param(source, workers, marks=[] if workers == 2 and source in ("arrow", "shared") else pytest.mark.slow)
        for source in SOURCES
        for workers in (1, 2, 5)
    ],
)
def test_workers_hand_out_the_order_that_one_process_reads(source, workers):
    for mode, take in (("examples", 4), ("batches", 1)):
        stream = BucketedStream(SOURCES[source](), buffer_examples=16, **MODES[mode])
        loader = DataLoader(
            stream, batch_size=take, num_workers=workers, persistent_workers=True, collate_fn=identities
        )
        for start in (0, 2):
            stream.set_epoch(start)
            alone = [identities([*itertools.islice(iter_, take)]) for iter_ in [iter(stream)] for _ in range(40)]
            assert list(itertools.islice(loader, 40)) == alone
            if mode == "examples":
                two_passes = Counter([i for batch in alone for i in batch][: 2 * COUNT])  # 19 batches
                assert two_passes == dict.fromkeys(range(COUNT), 2)


@one_core
def test_workers_without_examples_and_a_stream_that_ends():
    stream = BucketedStream(Passes([3] * 5), max_tokens=16, buffer_examples=4)
    loader = DataLoader(stream, batch_size=1, num_workers=3, collate_fn=lambda items: [r["tag"][1] for r in items[0]])
    found = list(loader)
    assert sorted(i for batch in found for i in batch) == [0, 1, 2, 3, 4]
    assert found == [[row["tag"][1] for row in batch] for batch in stream]


@one_core
@pytest.mark.parametrize("workers", [0, 2])
def test_dropped_examples_are_counted_once_whatever_the_number_of_workers(workers):
    stream = BucketedStream(Passes([3, 40, 5, 50, 60], 2), max_tokens=32, buffer_examples=4, too_long="drop")
    for _ in range(2):  # the count is that of the latest iteration
        loader = DataLoader(stream, batch_size=1, num_workers=workers, collate_fn=lambda items: len(items[0]))
        assert sum(loader) == 4
        assert stream.dropped == 6


def test_a_stream_whose_examples_are_all_dropped_ends():
    endless = BucketedStream([{"input_ids": [1] * 40}], max_tokens=32, too_long="drop")
    assert list(endless) == []
    assert endless.dropped == 1
    assert list(BucketedStream([], batch_size=4)) == []


@one_core
def test_workers_do_not_turn_the_epoch_of_a_datasets_stream_for_each_other():
    source = arrow_stream()
    loader = DataLoader(BucketedStream(source, batch_size=4, buffer_examples=16), batch_size=4, num_workers=1)
    loader.collate_fn = identities
    assert len(list(itertools.islice(loader, 25))) == 25  # in the third pass
    assert source.epoch == 0


def test_the_private_names_it_relies_on_are_there():
    assert torch.utils.data._utils.worker._worker_info is None
    assert arrow_stream()._distributed is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_has_the_same_order_and_shared_memory_of_its_own(copied):
    stream = BucketedStream(Rows(), batch_size=4, buffer_examples=16)
    other = copied(stream)
    other.set_epoch(1)
    assert (stream.epoch, other.epoch) == (0, 1)
    assert other._shared.tensor.is_shared()
    other.set_epoch(0)
    assert list(itertools.islice(other, 90)) == list(itertools.islice(stream, 90))


# Rows


@pytest.mark.parametrize("kind", ["numpy", "torch", None])
def test_lengths_of_arrays(kind):
    rows = Dataset.from_dict({"input_ids": [[1] * 30, [1] * 3, [1] * 20], "labels": [0, 1, 2]}).with_format(kind)
    stream = BucketedStream(rows.to_iterable_dataset(), max_tokens=64, buffer_examples=3)
    assert sorted(len(batch) for batch in itertools.islice(stream, 2)) == [1, 2]


BAD_ROWS = {
    "missing": (
        {"input_id": [1], "labels": 0},
        ValueError,
        "column='input_ids' is not in row 1 of the stream (pass 0); expected one of ['input_id', 'labels']. "
        "Did you mean 'input_id'? Tokenise text first: dataset.map(lambda row: tokenizer(row[\"text\"])).",
    ),
    "text": (
        {"input_ids": "w1 w2"},
        ValueError,
        "column='input_ids' does not hold token ids but values like 'w1 w2' in row 1 of the stream (pass 0); "
        "expected one flat list of integers per row. Tokenise text without return_tensors: "
        'dataset.map(lambda row: tokenizer(row["text"])).',
    ),
    "nested": (
        {"input_ids": [[1, 2]]},
        ValueError,
        "column='input_ids' does not hold token ids but values like [[1, 2]] in row 1 of the stream (pass 0); "
        "expected one flat list of integers per row. Tokenise text without return_tensors: "
        'dataset.map(lambda row: tokenizer(row["text"])).',
    ),
    "floats": (
        {"input_ids": np.ones(2)},
        ValueError,
        "column='input_ids' does not hold token ids but values like array([1., 1.]) in row 1 of the stream (pass 0); "
        "expected one flat list of integers per row. Tokenise text without return_tensors: "
        'dataset.map(lambda row: tokenizer(row["text"])).',
    ),
    "null": (
        {"input_ids": None},
        ValueError,
        "column='input_ids' is empty or null in row 1 of the stream (pass 0); expected 1 token or more. Drop such "
        "rows: dataset.filter(lambda row: row['input_ids'])",
    ),
    "empty": (
        {"input_ids": []},
        ValueError,
        "column='input_ids' is empty or null in row 1 of the stream (pass 0); expected 1 token or more. Drop such "
        "rows: dataset.filter(lambda row: row['input_ids'])",
    ),
    "no dict": (
        ["w1"],
        TypeError,
        "row 1 of the stream (pass 0)=<list> has no columns; expected a dict with 'input_ids'. "
        "Give dicts: {'input_ids': [...], 'labels': ...}.",
    ),
    "too long": (
        {"input_ids": [1] * 33},
        ValueError,
        "max_tokens=32 has no room for row 1 of the stream (pass 0), 33 tokens padded to 40; expected every example to "
        "fit. Truncate it (tokenizer(..., truncation=True, max_length=...)), raise max_tokens, or pass bucketed(..., "
        'too_long="drop"), which counts them in stream.dropped',
    ),
}


@pytest.mark.parametrize(("row", "kind", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named(row, kind, message):
    with pytest.raises(kind) as error:
        list(BucketedStream([{"input_ids": [1, 2]}, row], max_tokens=32))
    assert str(error.value) == message


def test_an_example_above_the_last_boundary_is_named():
    with pytest.raises(ValueError) as error:
        list(BucketedStream([{"input_ids": [1] * 17}], batch_size=2, boundaries=[8, 16]))
    assert str(error.value) == (
        "boundaries[-1]=16 has no room for row 0 of the stream (pass 0), 17 tokens padded to 24; expected every "
        "example to fit. Truncate it (tokenizer(..., truncation=True, max_length=...)), append a boundary, or pass "
        'bucketed(..., too_long="drop"), which counts them in stream.dropped'
    )


# Settings

BAD_SETTINGS = {
    "no limit": (
        {"batch_size": None},
        "batch_size=None, max_tokens=None; expected exactly one of them. "
        "Pass batch_size=32 (examples per batch) or max_tokens=4096 (padded tokens per batch)",
    ),
    "world_size": (
        {"world_size": 0},
        "world_size=0 is invalid; expected an integer of 1 or more. Pass world_size=1",
    ),
    "column": ({"column": 1}, "column=1 is invalid; expected a string. Pass column='input_ids'"),
    "seed": ({"seed": -1}, "seed=-1 is invalid; expected an integer of 0 or more. Pass seed=0"),
    "too_long": (
        {"too_long": "cut"},
        "too_long='cut' is invalid; expected 'error' or 'drop'. Pass too_long='drop'",
    ),
    "buffer": (
        {"buffer_examples": 15, "world_size": 4},
        "buffer_examples=15 is less than one batch for each of 4 processes; expected 16 or more. "
        "Pass bucketed(..., buffer_examples=1600)",
    ),
    "boundaries": (
        {"boundaries": [16, 8]},
        "boundaries=[16, 8] is invalid; expected 'auto' or ascending integers of 1 or more. "
        "Pass boundaries=[64, 128, 256]",
    ),
}


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        BucketedStream(Rows(), **{"batch_size": 4, **settings})
    assert str(error.value) == message


def test_datasets_that_cannot_start_over_or_are_split_are_refused():
    for dataset, what in ((iter([]), "can be read only once"), (7, "cannot be iterated")):
        with pytest.raises(TypeError) as refused:
            BucketedStream(dataset, batch_size=4)
        assert str(refused.value) == (
            f"dataset=<{type(dataset).__name__}> {what}; expected a stream that starts over when it is iterated again. "
            "Pass the function that makes the rows: datasets.IterableDataset.from_generator(make_rows)"
        )
    with pytest.raises(ValueError) as error:
        BucketedStream(split_dataset_by_node(arrow_stream(), rank=0, world_size=2), batch_size=4)
    assert str(error.value) == (
        "dataset=<IterableDataset> is split by node already, so a part of its examples would never be seen; expected "
        "the whole stream in every process. Leave out split_dataset_by_node"
    )


# In the stock Trainer


def make_stream(kind: str, source: str = "plain", **settings: Any) -> BucketedStream:
    return BucketedStream(SOURCES[source](), buffer_examples=16, **{**MODES[kind], **settings})


def make_trainer(output_dir: Any, stream: BucketedStream, **settings: Any) -> tuple[Trainer, list[list[int]]]:
    """Return a trainer on a tiny BERT and the list that its forward passes fill with the examples of each batch."""
    model, seen = tiny.bert(), []
    model.register_forward_pre_hook(
        lambda module, _, kwargs: seen.append((kwargs["input_ids"][:, 0] - 5).tolist()) if module.training else None,
        with_kwargs=True,
    )
    settings.setdefault("per_device_train_batch_size", stream.batch_size or 1)
    settings = {"max_steps": 24, "optim": "adamw_torch", "learning_rate": 1e-3, **settings}
    args = tiny.arguments(output_dir, **settings)
    return Trainer(model, args, train_dataset=stream, data_collator=BucketedCollator(tiny.tokenizer())), seen


TWO_WORKERS = {"dataloader_num_workers": 2}
RUNS = {
    "examples": ("examples", "plain", {}),
    "accumulated": ("examples", "arrow", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "batches": ("batches", "arrow", {}),
    "workers": ("examples", "arrow", TWO_WORKERS),
    "persistent": ("batches", "plain", {**TWO_WORKERS, "dataloader_persistent_workers": True}),
}


@one_core
@pytest.mark.parametrize(
    ("kind", "source", "settings"),
    [
        pytest.param(*run, id=name, marks=[] if name in ("accumulated", "batches") else pytest.mark.slow)
        for name, run in RUNS.items()
    ],
)
def test_a_resumed_run_takes_the_batches_of_the_straight_run(kind, source, settings, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 7, **settings}
    straight, seen = make_trainer(tmp_path, make_stream(kind, source), **settings)
    attach(straight)
    straight.train()
    accumulation = straight.args.gradient_accumulation_steps
    assert len(seen) == 24 * accumulation
    read = [i for batch in seen for i in batch]
    if kind == "examples":
        assert Counter(read[: 2 * COUNT]) == dict.fromkeys(range(COUNT), 2)  # 19 batches
    else:
        assert set(Counter(read).values()) <= {len(read) // COUNT, len(read) // COUNT + 1}
    assert len(read) > 2 * COUNT  # so step 14 is in the second pass and step 21 in the third
    for step in (7, 14, 21) if not settings.get("dataloader_num_workers") else (14,):
        resumed, rest = make_trainer(tmp_path, make_stream(kind, source), **settings)
        attach(resumed)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert rest == seen[step * accumulation :]
        assert tiny.largest_difference(straight.model, resumed.model) == 0.0


@one_core
def test_a_run_resumes_exactly_with_another_number_of_workers(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10, "per_device_train_batch_size": 2}
    straight, seen = make_trainer(tmp_path, make_stream("examples"), **settings)
    attach(straight)
    straight.train()
    resumed, rest = make_trainer(tmp_path, make_stream("examples"), **settings, **TWO_WORKERS)
    attach(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert rest == seen[5:]
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0


PAIRS = {
    "examples": ({"kind": "examples", "source": "arrow"}, {"per_device_train_batch_size": 2}),
    "batches": ({"kind": "batches", "source": "arrow"}, {}),
    "batches, workers": ({"kind": "batches"}, {**TWO_WORKERS, "dataloader_persistent_workers": True}),
}
WORKER = """
import json, sys, warnings
warnings.filterwarnings("ignore", "This DataLoader will create")
import test_bucketed_stream as t
found = {}
for name in sys.argv[2:]:
    of_stream, settings = t.PAIRS[name]
    # Plain SGD has no state: 5.8.1 and 5.17.0 cannot load one on the CPU in two processes (map_location "cpu:0").
    settings = {"save_strategy": "steps", "save_steps": 7, "max_steps": 14, "ddp_backend": "gloo", **settings}
    settings |= {"optim": "sgd", "learning_rate": 0.05}
    folder = f"{sys.argv[1]}/{name}"
    straight, seen = t.make_trainer(folder, t.make_stream(**of_stream, world_size=2), **settings)
    widths = []
    straight.model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    t.attach(straight)
    widths.clear()
    straight.train()
    resumed, rest = t.make_trainer(folder, t.make_stream(**of_stream, world_size=2), **settings)
    t.attach(resumed)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-7")
    difference = t.tiny.largest_difference(straight.model, resumed.model)
    found[name] = {"seen": seen, "rest": rest, "widths": widths[-14:], "difference": difference}
with open(f"{sys.argv[1]}/rank{straight.args.process_index}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize("names", [["examples", "batches"], pytest.param(["batches, workers"], marks=pytest.mark.slow)])
def test_two_processes_read_the_stream_between_them_and_resume_exactly(names, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{WORKER}")
    one, other = run_pair(tmp_path, str(script), str(tmp_path), *names)
    for name in names:
        of_stream, settings = PAIRS[name]
        seen = list(zip(one[name]["seen"], other[name]["seen"], strict=True))
        assert len(seen) == 14, name
        assert [len(a) for a, _ in seen] == [len(b) for _, b in seen], name
        together = [i for pair in seen for batch in pair for i in batch]
        stream = make_stream(**of_stream, world_size=2)
        if stream.batch_size is not None:
            stream.rows_per_turn = settings.get("per_device_train_batch_size", 4)
        alone = itertools.islice(stream, len(together) if stream.batch_size else 28)
        assert together == [i for item in alone for i in np.ravel(identities([item])).tolist()], name
        counts = Counter(together)
        assert set(counts) == set(range(COUNT)), name
        assert max(counts.values()) - min(counts.values()) <= 1, name
        same_width = np.mean(np.equal(one[name]["widths"], other[name]["widths"]))
        assert same_width >= 0.7, name
        for rank in (one, other):
            assert rank[name]["rest"] == rank[name]["seen"][7:], name
            assert rank[name]["difference"] == 0.0, name


# What attach does


COUNTS_BATCHES = Change(
    "samples in the Trainer's log",
    "examples",
    "batches",
    "an item of a max_tokens= view is a whole batch",
)


DIVIDES = Change(
    "model_accepts_loss_kwargs",
    True,
    False,
    "the loss of BertForSequenceClassification ignores num_items_in_batch, so stock would multiply its gradients by "
    "accumulation steps x processes",
)


def test_attach_lets_every_process_read_for_itself_and_keeps_only_what_the_model_takes(tmp_path):
    rows = [{**example(i), "text": "w" * 100} for i in range(8)]
    trainer, _ = make_trainer(tmp_path, BucketedStream(rows, max_tokens=64, buffer_examples=4))
    attach(attach(trainer))
    reason = "each process reads the stream for itself: stock would cut up batches of the first one for all"
    assert trainer.memopt_changes == (
        COUNTS_BATCHES,
        Change("accelerator_config.dispatch_batches", None, False, reason),
        DIVIDES,
    )
    assert type(trainer.get_train_dataloader()) is DataLoaderShard
    assert set(next(iter(trainer.train_dataset))[0]) == {"input_ids", "labels"}
    settled, _ = make_trainer(tmp_path, make_stream("batches"), accelerator_config={"dispatch_batches": False})
    assert attach(settled).memopt_changes == (COUNTS_BATCHES, DIVIDES)
    by_examples, _ = make_trainer(tmp_path, BucketedStream(rows, batch_size=4), per_device_train_batch_size=4)
    assert COUNTS_BATCHES not in attach(by_examples).memopt_changes
    assert set(next(iter(BucketedStream(rows, batch_size=1)))) == {"input_ids", "labels", "text"}


def test_attach_takes_the_seed_where_none_was_given(tmp_path):
    stream = make_stream("batches")
    stream.takes_seed = True
    trainer, _ = make_trainer(tmp_path, stream, data_seed=9)
    assert attach(trainer).memopt_changes[0] == Change(
        "seed of the bucketed stream", 0, 9, "that of TrainingArguments(data_seed=...)"
    )
    assert stream.seed == 9
    given, _ = make_trainer(tmp_path, make_stream("batches", seed=4), data_seed=9)
    with pytest.raises(ValueError) as error:
        attach(given)
    assert str(error.value) == (
        "seed=4 of the bucketed stream differs from data_seed=9 of the training arguments; expected one seed for the "
        "order of the data. Leave seed out of bucketed(...)"
    )


CUT_UP = "=True would cut the batches of the bucketed stream up; expected False. Pass TrainingArguments(..., "
REFUSED = {
    "auto_find_batch_size": (
        {"auto_find_batch_size": True},
        "length buckets and auto_find_batch_size are incompatible: it would shrink the batches that the buckets "
        "are made for; expected only one of them. Leave auto_find_batch_size out",
    ),
    "dispatch_batches": (
        {"accelerator_config": {"dispatch_batches": True}},
        f'accelerator_config.dispatch_batches{CUT_UP}accelerator_config={{"dispatch_batches": False}})',
    ),
    "split_batches": (
        {"accelerator_config": {"split_batches": True}},
        f'accelerator_config.split_batches{CUT_UP}accelerator_config={{"split_batches": False}})',
    ),
    "no divisor": (
        {"per_device_train_batch_size": 3},
        "per_device_train_batch_size=3 does not divide the bucketed stream's batch_size=4; expected a divisor. "
        "Pass bucketed(..., batch_size=3)",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_attach_refuses_arguments_that_spoil_the_stream(settings, message, tmp_path):
    trainer, _ = make_trainer(tmp_path, make_stream("examples"), **settings)
    with pytest.raises(ValueError) as error:
        attach(trainer)
    assert str(error.value) == message


def test_attach_refuses_joined_batches_another_world_size_and_endless_evaluation(tmp_path):
    joined, _ = make_trainer(tmp_path, make_stream("batches"), per_device_train_batch_size=8)
    with pytest.raises(ValueError, match=r"^per_device_train_batch_size=8 would join whole batches of the max_tokens "):
        attach(joined)
    apart, _ = make_trainer(tmp_path, make_stream("batches", world_size=2))
    with pytest.raises(ValueError) as error:
        attach(apart)
    assert str(error.value) == (
        "world_size=2 of the bucketed stream differs from the run's 1; expected the same. Build it in the launched "
        "script, or pass bucketed(..., world_size=1)"
    )
    endless, _ = make_trainer(tmp_path, make_stream("batches"))
    for evaluated in (make_stream("batches"), {"dev": make_stream("examples")}):
        endless.eval_dataset = evaluated
        with pytest.raises(ValueError) as error:
            attach(endless)
        assert str(error.value) == (
            "dataset=<BucketedStream> never ends, and neither would the evaluation; expected the dataset itself. "
            "Evaluate or predict stream.dataset"
        )


def test_stock_itself_asks_for_max_steps(tmp_path):
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        make_trainer(tmp_path, make_stream("examples"), max_steps=-1)
