"""Streams that processes share: every example once a pass over all ranks and workers, and a state of constant size."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_except
from tables import refuses, whole
from test_bucketed_stream import COUNT, Passes, Rows, arrow_stream, identity, make_stream, make_trainer, one_core

import tiny
from hf_memopt import attach, bucketed
from two_ranks import run_pair

RANKS_PROGRAM = str(Path(__file__).parent / "stream_ranks.py")


def example(i: int) -> dict[str, Any]:
    return {"input_ids": [i] + [7] * ((11 * i) % 29), "labels": i % 3}


def sharded_files(folder: Path, files: int, examples: int) -> int:
    """Write examples into Parquet files of different lengths and return their number."""
    cuts = np.linspace(0, 1, files + 1) ** 1.5 * examples
    for number, (first, end) in enumerate(itertools.pairwise(cuts.astype(int).tolist())):
        rows = Dataset.from_list([example(i) for i in range(first, end)])
        rows.to_parquet(str(folder / f"{number:03}.parquet"))
    return examples


class Resumable(torch.utils.data.IterableDataset):
    """A stream with a state of its own, which counts the rows that it reads."""

    def __init__(self, count: int, read: list[int] | None = None) -> None:
        self.count, self.first, self.next, self.epoch = count, 0, 0, 0
        self.read = [0] if read is None else read

    def __deepcopy__(self, memo: Any) -> Resumable:
        return Resumable(self.count, self.read)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["next"]

    def __iter__(self) -> Any:
        first, self.first = self.first, 0
        for i in range(first, self.count):
            self.next = i + 1
            self.read[0] += 1
            yield example(i)


SIZES = [{"batch_size": 4}, {"max_tokens": 96}]


SOURCES = {
    "plain": Rows,
    "arrow": arrow_stream,
    "resumable": lambda: Resumable(COUNT),
    "numpy": lambda: arrow_stream().with_format("numpy"),
}


@pytest.mark.parametrize(
    ("source", "sizes", "rank"),
    slow_except([("resumable", SIZES[0], None), ("arrow", SIZES[1], 1)], itertools.product(SOURCES, SIZES, (None, 1))),
)
def test_a_stream_goes_on_from_any_state(source, sizes, rank) -> None:
    def stream() -> Any:
        return bucketed(SOURCES[source](), buffer_examples=16, world_size=2, rank=rank, **sizes)

    def named(item: Any) -> Any:
        return [identity(row) for row in item] if "max_tokens" in sizes else identity(item)

    per_batch = 4 * (2 if rank is None else 1) if "batch_size" in sizes else 2 if rank is None else 1
    straight = stream()
    read = [named(item) for item in itertools.islice(straight, 40 * per_batch)]
    for batches in (0, 1, 3, 8, 17, 31):
        partly = stream()
        taken = [named(item) for item in itertools.islice(partly, batches * per_batch)]
        state = json.loads(json.dumps(partly.state_dict()))
        assert state == json.loads(json.dumps(partly.state_dict(position=batches)))
        resumed = stream()
        resumed.load_state_dict(state)
        assert resumed.state_dict()["turn"] == batches
        rest = [named(item) for item in itertools.islice(resumed, (40 - batches) * per_batch)]
        assert taken + rest == read, batches


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=8, max_size=60),
    sizes=st.sampled_from([{"batch_size": 1}, {"batch_size": 3}, {"max_tokens": 64}, {"max_tokens": 200}]),
    world_size=st.integers(1, 4),
    buffer_examples=st.integers(3, 40),
)
def test_the_shares_of_all_ranks_are_every_example_once_a_pass(lengths, sizes, world_size, buffer_examples) -> None:
    found: Counter[Any] = Counter()
    for rank in range(world_size):
        shares = {"world_size": world_size, "rank": rank, "buffer_examples": buffer_examples}
        items = list(bucketed(Passes(lengths, 2), **sizes, **shares))
        found += Counter(row["tag"] for item in items for row in ([item] if "batch_size" in sizes else item))
    assert found == Counter((number, i) for number in range(2) for i in range(len(lengths)))


def test_ranks_draw_batches_of_about_the_same_length_at_each_step() -> None:
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(np.log(60), 0.85, 40_000)), 4, 512).astype(int).tolist()
    ranks = [
        bucketed(Passes(lengths), batch_size=16, world_size=4, rank=rank, buffer_examples=1024) for rank in range(4)
    ]
    batches = [[len(row["input_ids"]) for row in itertools.islice(iter(rank), 8000)] for rank in ranks]
    widths = np.array(batches).reshape(4, 500, 16).max(axis=2)
    assert np.mean(widths.max(axis=0) / widths.mean(axis=0)) < 1.12
    apart = np.array([np.roll(of_rank, 7 * rank) for rank, of_rank in enumerate(widths)])  # each draws for itself
    assert np.mean(apart.max(axis=0) / apart.mean(axis=0)) > 1.5


def test_neither_the_state_nor_what_a_resumed_run_reads_grows_with_the_run() -> None:
    sizes, read = [], []
    for batches in (100, 1000, 4000):
        counted = [0]
        stream = bucketed(Resumable(50_000, counted), batch_size=4, buffer_examples=64)
        for _ in itertools.islice(stream, 4 * batches):
            pass
        state = stream.state_dict()
        sizes.append(len(json.dumps(state)))
        counted[0] = 0
        resumed = bucketed(Resumable(50_000, counted), batch_size=4, buffer_examples=64)
        resumed.load_state_dict(state)
        next(iter(resumed))
        read.append(counted[0])
    assert max(sizes) < 500
    assert max(read) <= 2 * 64


def test_a_shuffle_buffer_of_datasets_is_read_again_and_not_lost() -> None:
    rows = Dataset.from_list([example(i) for i in range(COUNT)]).to_iterable_dataset(num_shards=4)
    shuffled = rows.shuffle(seed=0, buffer_size=5)
    for source, exact in ((shuffled, False), (rows, True)):
        stream = bucketed(source, batch_size=2, buffer_examples=8)
        list(itertools.islice(stream, 2 * 10))
        assert (stream.state_dict()["place"]["dataset"] is not None) is exact


@one_core
def test_each_worker_has_a_state_of_its_own_as_torchdata_asks_for() -> None:
    """``StatefulDataLoader`` (torchdata 0.11) takes and loads the states of the datasets of its workers."""

    def loader(states: list[Any] | None) -> torch.utils.data.DataLoader[Any]:
        def load(worker: int) -> None:
            if states is not None:
                torch.utils.data.get_worker_info().dataset.load_state_dict(states[worker])

        stream = bucketed(arrow_stream(), batch_size=4, buffer_examples=16, rank=0, world_size=2)

        def with_state(items: list[Any]) -> tuple[list[int], Any]:
            return [identity(row) for row in items], torch.utils.data.get_worker_info().dataset.state_dict()

        return torch.utils.data.DataLoader(
            stream, batch_size=4, num_workers=2, collate_fn=with_state, worker_init_fn=load
        )

    read = list(itertools.islice(loader(None), 20))
    rest = list(itertools.islice(loader([read[8][1], read[9][1]]), 10))
    assert [batch for batch, _ in rest] == [batch for batch, _ in read[10:]]


FEW = [
    {"settings": {"batch_size": 4}, "workers": 2, "workers_then": 1, "count": 40, "stop": 21},
    {"settings": {"max_tokens": 128}, "workers": 0, "count": 60, "stop": 31},
]
MORE = [
    {"settings": {"batch_size": 4}, "workers": 3, "workers_then": 2, "count": 110, "stop": 67},
    {"settings": {"max_tokens": 128}, "workers": 2, "workers_then": 0, "count": 150, "stop": 91},
]


def share(folder: Path, rank: int, ranks: int, epoch: int) -> list[int]:
    """Return the examples of one rank in one pass, as datasets itself shares the files out."""
    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache"))
    part = split_dataset_by_node(rows, rank=rank, world_size=ranks)
    part.set_epoch(epoch)
    return [row["input_ids"][0] for row in part]


def check_ranks(folder: Path, examples: int, ranks: int, cases: list[dict[str, Any]]) -> None:
    """Read with real processes. The states are taken while the workers are ahead of them."""
    found = run_pair(folder, RANKS_PROGRAM, str(folder), json.dumps(cases), ranks=ranks)
    shares = [[share(folder, rank, ranks, epoch) for rank in range(ranks)] for epoch in range(2)]
    for of_pass in shares:
        assert sorted(itertools.chain(*of_pass)) == list(range(examples))
    for case, *by_rank in zip(cases, *found, strict=True):
        group = case["settings"].get("batch_size", 1)
        for rank, of_rank in enumerate(by_rank):
            assert of_rank["rest"] == of_rank["read"][case["stop"] :], (case, rank)
            assert len(json.dumps(of_rank["state"])) < 1200
            read = list(itertools.chain(*of_rank["read"]))
            first, second = (Counter(of_pass[rank]) for of_pass in shares)
            end = first.total() // group * group  # what fills no batch opens the next pass
            assert Counter(read[:end]) <= first
            end = (first.total() + second.total()) // group * group
            assert len(read) >= end
            assert first <= Counter(read[:end]) <= first + second


@one_core
def test_two_ranks_with_workers_share_three_files_and_resume_exactly(tmp_path) -> None:
    check_ranks(tmp_path, sharded_files(tmp_path, files=3, examples=151), 2, FEW)


@one_core
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "files"), [(2, 5), (2, 4), (4, 3), (4, 8)])
def test_more_ranks_workers_and_files(tmp_path, ranks, files) -> None:
    check_ranks(tmp_path, sharded_files(tmp_path, files=files, examples=203), ranks, MORE)


SAVED = {"save_strategy": "steps", "save_steps": 7, "per_device_train_batch_size": 2}


@pytest.mark.parametrize(
    ("kind", "workers"), [("examples", 0), *(pytest.param(*more, marks=pytest.mark.slow) for more in [("batches", 2)])]
)
@one_core
def test_a_resumed_run_that_skips_nothing_takes_the_batches_of_the_straight_run(kind, workers, tmp_path) -> None:
    settings = {**SAVED, "max_steps": 14, "dataloader_num_workers": workers}
    if kind == "batches":
        settings["per_device_train_batch_size"] = 1
    straight, seen = make_trainer(tmp_path, make_stream(kind, "arrow, one shard"), **settings)
    resumed, rest = make_trainer(tmp_path, make_stream(kind, "arrow, one shard"), **settings, ignore_data_skip=True)
    for module in (*straight.model.modules(), *resumed.model.modules()):
        if isinstance(module, torch.nn.Dropout):  # which draws the random numbers that follow those of the checkpoint
            module.p = 0.1
    attach(straight).train()
    attach(attach(resumed)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert rest == seen[7:]
    assert tiny.largest_difference(straight.model, resumed.model) == 0.0
    assert resumed.train_dataset.loaded_state is None  # another run begins at the beginning
    resumed.memopt_handle.remove()
    assert not {"save_model", "train"} & vars(resumed).keys()


def test_a_saved_state_counts_batches_and_is_in_the_manifest_and_a_run_without_it_is_refused(tmp_path) -> None:
    settings = {**SAVED, "max_steps": 7}
    straight, _ = make_trainer(tmp_path, make_stream("examples"), **settings)
    attach(straight).train()
    file = tmp_path / "checkpoint-7" / "memopt_stream_0.json"
    assert json.loads(file.read_text())["turn"] == 7
    manifest = file.with_name("memopt_manifest.json")
    assert file.name in json.loads(manifest.read_text())["files"]
    more = {**settings, "ignore_data_skip": True, "max_steps": 14, "gradient_accumulation_steps": 2}
    attach(make_trainer(tmp_path, make_stream("examples"), **more)[0]).train(resume_from_checkpoint=str(file.parent))
    assert json.loads((tmp_path / "checkpoint-14" / file.name).read_text())["turn"] == 7 + 2 * 7
    file.unlink()
    manifest.unlink()  # which would refuse it by itself
    resumed, _ = make_trainer(tmp_path, make_stream("examples"), **more)
    with pytest.raises(ValueError, match=r"ignore_data_skip=True cannot resume: .*memopt_stream_0.json could not be"):
        attach(resumed).train(resume_from_checkpoint=str(file.parent))


TRAINER_PROGRAM = """
import json, os, sys
import test_bucketed_stream as t
rank, settings = int(os.environ["RANK"]), {**json.loads(sys.argv[2]), "ddp_backend": "gloo", "optim": "sgd"}
def run(**more):
    stream = t.make_stream("examples", "arrow", world_size=2, rank=rank)
    trainer, seen = t.make_trainer(sys.argv[1], stream, learning_rate=0.05, **settings, **more)
    return t.attach(trainer), seen
straight, seen = run()
straight.train()
resumed, rest = run(ignore_data_skip=True)
resumed.train(resume_from_checkpoint=f"{sys.argv[1]}/checkpoint-7")
difference = t.tiny.largest_difference(straight.model, resumed.model)
with open(f"{sys.argv[1]}/rank{rank}.json", "w") as file:
    json.dump({"seen": seen, "rest": rest, "difference": difference}, file)
"""


@pytest.mark.slow
def test_two_processes_train_on_their_shares_and_resume_exactly(tmp_path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{TRAINER_PROGRAM}")
    both = run_pair(tmp_path, str(script), str(tmp_path), json.dumps({**SAVED, "max_steps": 14}))
    for rank in both:
        assert (rank["rest"], rank["difference"]) == (rank["seen"][7:], 0.0)
        assert [len(batch) for batch in rank["seen"]] == [2] * 14
    one, other = ({i for batch in rank["seen"][:8] for i in batch} for rank in both)
    assert (len(one), len(other), one & other) == (16, 16, set())  # 16 of 19: the others fill no batch


def test_states_that_do_not_fit_are_refused() -> None:
    stream, other = (bucketed(Rows(), batch_size=size, buffer_examples=16) for size in (4, 2))
    state = stream.state_dict()
    assert state["turn"] == 0
    refuses(ValueError, whole("state['batch_size']=4"), other.load_state_dict, state)
    with pytest.raises(ValueError, match=r"^state=<keys \['turn'\]> lacks \['batch_size', .*Save it anew: stream\."):
        stream.load_state_dict({"turn": 1})
    with pytest.raises(ValueError, match=r"^position=-1 is invalid; expected an integer of 0 or more"):
        stream.state_dict(position=-1)


@one_core
def test_the_position_is_asked_for_where_workers_read() -> None:
    stream = bucketed(Rows(), batch_size=4, buffer_examples=16)
    next(iter(torch.utils.data.DataLoader(stream, batch_size=4, num_workers=1, collate_fn=len)))
    refuses(ValueError, whole("position=None is unknown"), stream.state_dict)
    assert stream.state_dict(position=1)["turn"] == 1


def test_ranks_that_do_not_fit_are_refused(tmp_path, monkeypatch) -> None:
    for rank in (2, -1, True, "0"):
        with pytest.raises(ValueError, match=rf"^rank={rank!r} is invalid; expected an integer of 0 or more, or None"):
            bucketed(Rows(), batch_size=4, world_size=2, rank=rank)
    refuses(ValueError, whole("rank=1 is for streams,"), bucketed, [example(0)], batch_size=4, world_size=2, rank=1)
    trainer, _ = make_trainer(tmp_path, make_stream("examples", rank=0))
    monkeypatch.setattr(trainer.args.distributed_state, "process_index", 1)
    refuses(ValueError, whole("rank=0 of the bucketed"), attach, trainer)
    stream = bucketed(Passes([3]), batch_size=1, world_size=2, rank=1)
    refuses(ValueError, whole("rank=1 of world_size=2"), list, stream)


NO_STATE = "state=None is not a state; expected what state_dict() returns. Save it: stream.state_dict()"
INVALID = [
    ({"turn": "4"}, "state['turn']='4' is invalid; expected an integer of 0 or more. "),
    ({"place": None}, NO_STATE),
    ({"place": {"row": -1}}, "state['place']['row']=-1 is invalid; expected an integer of 0 or more. "),
    ({"place": {"dataset": True}}, "state['place']['dataset']=True is not a state of <Resumable> (TypeError: "),
]


@pytest.mark.parametrize(("changed", "says"), INVALID)
def test_a_state_that_is_none_is_refused(changed, says) -> None:
    stream = bucketed(Resumable(COUNT), batch_size=4, buffer_examples=16)
    list(itertools.islice(stream, 12))
    state = stream.state_dict()
    place = changed.get("place", {})
    broken = {**state, **changed, "place": None if place is None else {**state["place"], **place}}
    with pytest.raises(ValueError, match="^" + re.escape(says)):  # noqa: PT012  # either refuses
        stream.load_state_dict(broken)
        next(iter(stream))
