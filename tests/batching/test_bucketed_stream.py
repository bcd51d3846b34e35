"""Bucketed streams: every example once a pass, the budget and the bound kept, one order for any number of workers, and
the stock Trainer resuming exactly, alone and in two processes.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import noted_batches
import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from noted_batches import Listed
from tables import refuses, table, whole
from torch.utils.data import DataLoader, get_worker_info
from transformers import Trainer

import tiny
from hf_memopt import BucketedCollator, Change, attach, bucketed
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


def batches_of(stream: Any) -> list[list[Any]]:
    """Read a stream that ends and return its batches."""
    items = list(stream)
    if stream.batch_size is None:
        return items
    return [items[i : i + stream.batch_size] for i in range(0, len(items), stream.batch_size)]


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
    stream = bucketed(Passes(lengths, passes), **settings)
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
    assert batches_of(bucketed(Passes(lengths, passes), **settings)) == batches


def test_another_seed_another_pass_and_another_start_give_another_order():
    def order(start: int = 0, count: int = COUNT, **settings: Any) -> list[int]:
        stream = bucketed(Rows(), batch_size=1, buffer_examples=20, **settings)
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
        "random": lognormal_lengths(600),
        "rising": sorted(lognormal_lengths(600)),
        "falling": sorted(lognormal_lengths(600), reverse=True),
        "all different": [i % 64 * 8 + 1 for i in range(600)],
        "two far apart": [512 if i % 50 == 0 else 1 for i in range(600)],
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
    stream = bucketed(Passes(lengths, 2, row), buffer_examples=buffer, **sizes)
    largest = read = 0
    for item in stream:
        rows = 1 if "batch_size" in sizes else len(item)
        largest, read = max(largest, rows), read + rows
    assert read == 1200
    handed_out = 4 if "batch_size" in sizes else largest
    assert buffer <= most <= buffer + handed_out + 1  # the group handed out last, and the row just read


@pytest.mark.parametrize("sizes", [{"batch_size": 32}, {"max_tokens": 8192}], ids=str)
def test_batches_pad_little_and_their_lengths_do_not_come_in_waves(sizes):
    lengths = lognormal_lengths(50_000)
    batches = batches_of(bucketed(Passes(lengths), buffer_examples=2048, **sizes))
    assert sum(lengths) / sum(map(padded_tokens, batches)) > 0.88  # 0.29 in random order
    means = np.array([np.mean([len(row["input_ids"]) for row in batch]) for batch in batches])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.05


def test_boundaries_set_the_rows_and_the_width_of_a_batch():
    stream = bucketed(Rows(), max_tokens=96, boundaries=[9, 24], buffer_examples=COUNT)
    seen = list(itertools.islice(stream, 30))
    for batch in seen:
        longest = max(len(row["input_ids"]) for row in batch)
        assert batch.width == (9 if longest <= 9 else 24)
        assert len(batch) * batch.width <= 96
        assert BucketedCollator(tiny.tokenizer())([batch])["input_ids"].shape == (len(batch), batch.width)
    assert {batch.width for batch in seen} == {9, 24}
    assert max(len(batch) for batch in seen) == 10


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
        stream = bucketed(SOURCES[source](), buffer_examples=16, **MODES[mode])
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
@pytest.mark.parametrize("workers", [0, 2])
def test_dropped_examples_are_counted_once_whatever_the_number_of_workers(workers):
    stream = bucketed(Passes([3, 40, 5, 50, 60], 2), max_tokens=32, buffer_examples=4, too_long="drop")
    for _ in range(2):  # the count is that of the latest iteration
        loader = DataLoader(stream, batch_size=1, num_workers=workers, collate_fn=lambda items: len(items[0]))
        assert sum(loader) == 4
        assert stream.dropped == 6


def test_a_stream_whose_examples_are_all_dropped_ends():
    endless = bucketed(Listed([{"input_ids": [1] * 40}]), max_tokens=32, too_long="drop")
    assert list(endless) == []
    assert endless.dropped == 1
    assert list(bucketed(Listed([]), batch_size=4)) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_has_the_same_order_and_shared_memory_of_its_own(copied):
    stream = bucketed(Rows(), batch_size=4, buffer_examples=16)
    other = copied(stream)
    other.set_epoch(1)
    assert (stream.epoch, other.epoch) == (0, 1)
    assert other._shared.tensor.is_shared()
    other.set_epoch(0)
    assert list(itertools.islice(other, 90)) == list(itertools.islice(stream, 90))


def make_stream(kind: str, source: str = "plain", **settings: Any) -> Any:
    return bucketed(SOURCES[source](), buffer_examples=16, **{**MODES[kind], "seed": 0, **settings})


def make_trainer(output_dir: Any, stream: Any, **settings: Any) -> tuple[Trainer, list[list[int]]]:
    return noted_batches.make_trainer(output_dir, stream, stream.batch_size, **{"max_steps": 24, **settings})


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
    attach(straight).train()
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
        attach(resumed).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert rest == seen[step * accumulation :]
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
    shapes = t.noted_batches.note_shapes(straight.model)
    t.attach(straight).train()
    widths = [width for _, width in shapes]
    resumed, rest = t.make_trainer(folder, t.make_stream(**of_stream, world_size=2), **settings)
    t.attach(resumed).train(resume_from_checkpoint=f"{folder}/checkpoint-7")
    difference = t.tiny.largest_difference(straight.model, resumed.model)
    found[name] = {"seen": seen, "rest": rest, "widths": widths[-14:], "difference": difference}
with open(f"{sys.argv[1]}/rank{straight.args.process_index}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize("names", [["batches"], pytest.param(["examples", "batches, workers"], marks=pytest.mark.slow)])
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


WHOLE_BATCHES = "an item of a max_tokens= view is a whole batch"
COUNTS_BATCHES = Change("samples in the Trainer's log", "examples", "batches", WHOLE_BATCHES)


DIVIDES = Change("model_accepts_loss_kwargs", True, False, whole("the loss of BertForSequenceClassification"))


def test_attach_lets_every_process_read_for_itself_and_keeps_only_what_the_model_takes(tmp_path):
    rows = [{**example(i), "text": "w" * 100} for i in range(8)]
    trainer, _ = make_trainer(tmp_path, bucketed(Listed(rows), max_tokens=64, buffer_examples=4, seed=0))
    attach(attach(trainer))
    reason = "each process reads the stream for itself: stock would cut up batches of the first one for all"
    each = Change("accelerator_config.dispatch_batches", None, False, reason)
    assert trainer.memopt_changes == (COUNTS_BATCHES, each, DIVIDES)
    assert type(trainer.get_train_dataloader()) is DataLoaderShard
    assert set(next(iter(trainer.train_dataset))[0]) == {"input_ids", "labels"}
    settled, _ = make_trainer(tmp_path, make_stream("batches"), accelerator_config={"dispatch_batches": False})
    assert attach(settled).memopt_changes == (COUNTS_BATCHES, DIVIDES)
    by_examples, _ = make_trainer(tmp_path, bucketed(Listed(rows), batch_size=4), per_device_train_batch_size=4)
    assert COUNTS_BATCHES not in attach(by_examples).memopt_changes
    assert set(next(iter(bucketed(Listed(rows), batch_size=1)))) == {"input_ids", "labels", "text"}


def test_attach_takes_the_seed_where_none_was_given(tmp_path):
    stream = make_stream("batches", seed=None)
    trainer, _ = make_trainer(tmp_path, stream, data_seed=9)
    change = Change("seed of the bucketed stream", 0, 9, "that of TrainingArguments(data_seed=...)")
    assert (attach(trainer).memopt_changes[0], stream.seed) == (change, 9)


REFUSED = {name: tuple(row) for name, *row in table("batching/tables/refused_stream")}


@pytest.mark.parametrize("name", REFUSED)
def test_attach_refuses_what_spoils_the_stream(name, tmp_path):
    of_stream, settings, message = REFUSED[name]
    stream = make_stream(**{"kind": "examples", **of_stream})
    trainer, _ = make_trainer(tmp_path, stream, **settings)
    trainer.eval_dataset = {"dev": make_stream("examples")} if name == "evaluation" else None
    refuses(ValueError, message, attach, trainer)


BAD_ROWS = {name: (row, text) for name, row, text in table("batching/tables/refused_rows_of_streams")}
BAD_ROWS["floats"] = {"input_ids": np.ones(2)}, BAD_ROWS["text"][1].replace("'w1 w2'", "array([1., 1.])")


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named(name):
    row, text = BAD_ROWS[name]
    limit = {"batch_size": 2, "boundaries": [8, 16]} if "boundary" in name else {"max_tokens": 32}
    refuses((TypeError, ValueError), text, list, bucketed(Listed([{"input_ids": [1, 2]}, row]), **limit))


BAD_CALLS = {name: (settings, text) for name, settings, text in table("batching/tables/refused_streams")}
NO_STREAMS = {
    "of streams": [example(0)],
    "read once": iter([]),
    "a number": 7,
    "split": split_dataset_by_node(arrow_stream(), rank=0, world_size=2),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_is_no_stream_or_setting_of_one_is_refused(name):
    settings, text = BAD_CALLS[name]
    refuses((TypeError, ValueError), text, bucketed, NO_STREAMS.get(name, Rows()), **{"batch_size": 4, **settings})


def test_persistent_workers_say_that_they_do_not_know_a_loaded_state():
    stream = bucketed(Rows(), batch_size=4, seed=0, buffer_examples=16)
    loader = DataLoader(stream, batch_size=4, num_workers=1, persistent_workers=True, collate_fn=identities)
    list(itertools.islice(loader, 2))
    stream.load_state_dict(stream.state_dict(position=2))
    with pytest.raises(RuntimeError, match="Build the DataLoader again after"):
        next(iter(loader))
    other = pickle.loads(pickle.dumps(stream))  # as a process that was started with it
    other.load_state_dict(None)
    assert next(iter(stream))
    assert next(iter(other))


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_a_resumed_stream_tells_of_a_source_that_draws_global_random_numbers(draw):
    class Drawing(Rows):
        def __iter__(self):
            return iter(sorted(super().__iter__(), key=lambda _: float(draw())))

    stream = bucketed(Drawing(), batch_size=2, buffer_examples=8)
    list(itertools.islice(stream, 40))
    stream.load_state_dict(stream.state_dict())
    message = (
        "dataset=<Drawing> draws global random numbers, and they are others than before the checkpoint: if they order "
        "its rows, some are trained on twice and others never; expected an order that the pass decides. Shuffle by "
        "random.Random(epoch), or resume with TrainingArguments(..., ignore_data_skip=False)"
    )
    with pytest.warns(UserWarning, match=re.escape(message) + "$"):
        next(iter(stream))


def test_a_stream_keeps_what_it_was_given():
    numbers = {"batch_size": np.int64(4), "seed": np.int64(3)}
    assert json.loads(json.dumps(bucketed(Rows(), **numbers).state_dict(position=1)))["seed"] == 3
    rows = Dataset.from_list([example(0)]).to_iterable_dataset()
    stream = bucketed(rows, batch_size=4, world_size=2, too_long="drop")
    assert (stream.batch_size, stream.world_size, stream.buffer_examples) == (4, 2, 2 * 8192)
    assert (stream.seed, stream.takes_seed, stream.too_long) == (0, True, "drop")
    given = bucketed(Rows(), max_tokens=96, seed=3, buffer_examples=10, boundaries=[12, 24])
    assert (given.seed, given.takes_seed, given.buffer_examples, given.boundaries) == (3, False, 10, [12, 24])
