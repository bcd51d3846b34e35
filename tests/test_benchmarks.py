"""The figures that the batching benchmark quotes, against slow obvious counts; its reference of fairseq's rule."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import Any

import batching
import batching_end_to_end
import batching_figures as figures
import batching_peers as peers
import command_line
import numpy as np
import pytest
import results_file
from hypothesis import given
from hypothesis import strategies as st
from tables import tables

TABLES = tables(__file__)


@st.composite
def epochs(draw: Any) -> tuple[list[int], list[list[int]]]:
    """Return lengths, and a way to cut all of them into batches."""
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=40))
    return lengths, draw(cuts(len(lengths)))


@st.composite
def cuts(draw: Any, examples: int) -> list[list[int]]:
    order = draw(st.permutations(range(examples)))
    sizes, batches = draw(st.lists(st.integers(1, 9), min_size=examples, max_size=examples)), []
    while order:
        size = sizes.pop()
        batches.append(order[:size])
        order = order[size:]
    return batches


def slow_padded(batch: list[int], lengths: list[int]) -> tuple[int, int]:
    """Return rows and width of a batch, counted by hand."""
    width = max(1, *(lengths[i] for i in batch), 1)
    while width % 8:
        width += 1
    return len(batch), width


@given(epochs(), st.integers(1, 300))
def test_figures_equal_a_count_by_hand(drawn, budget) -> None:
    lengths, batches = drawn
    found = figures.figures_of(figures.epoch_of(batches, np.array(lengths)), budget)
    shapes = [slow_padded(batch, lengths) for batch in batches]
    padded = [rows * width for rows, width in shapes]
    assert found["padding_efficiency"] == pytest.approx(sum(lengths) / sum(padded))
    assert found["fill"] == pytest.approx(sum(tokens / budget for tokens in padded) / len(batches))
    assert found["shapes"] == len(set(shapes))
    assert found["batches_over_budget"] == len([tokens for tokens in padded if tokens > budget])


def test_shapes_that_the_sampler_tells_replace_the_own_ones() -> None:
    lengths = np.array([3, 20, 5])
    epoch = figures.epoch_of([[0, 1], [2]], lengths, ([1, 1], [64, 32]))
    found = figures.figures_of(epoch, 64)
    assert (found["padding_efficiency"], found["fill"], found["shapes"]) == (28 / 96, 0.75, 2)


@given(epochs(), st.integers(1, 4))
def test_straggler_ratio_equals_a_count_step_by_step(drawn, ranks) -> None:
    lengths, batches = drawn
    padded = [math.prod(slow_padded(batch, lengths)) for batch in batches]
    steps = [padded[i : i + ranks] for i in range(0, len(padded), ranks) if i + ranks <= len(padded)]
    found = figures.straggler_ratio(figures.epoch_of(batches, np.array(lengths)), ranks)
    if steps:
        assert found == pytest.approx(sum(max(step) / (sum(step) / ranks) for step in steps) / len(steps))
    else:
        assert found is None


def test_lag_one_of_known_series() -> None:
    saw_tooth = np.tile(np.arange(50.0, 0, -1), 20)
    assert figures.lag_one(saw_tooth) == pytest.approx(slow_lag_one(saw_tooth.tolist()))
    assert figures.lag_one(saw_tooth) > 0.8
    assert figures.lag_one(np.array([1.0, -1.0] * 10)) == pytest.approx(-1)
    assert figures.lag_one(np.full(10, 3.0)) == 0.0
    assert figures.lag_one(np.array([1.0])) == 0.0


def slow_lag_one(values: list[float]) -> float:
    """Return the correlation of consecutive values by its definition."""
    before, after = values[:-1], values[1:]
    mean_before, mean_after = sum(before) / len(before), sum(after) / len(after)
    together = sum((a - mean_before) * (b - mean_after) for a, b in zip(before, after, strict=True))
    spread = sum((a - mean_before) ** 2 for a in before) * sum((b - mean_after) ** 2 for b in after)
    return together / spread**0.5


# ---- Samplers -------------------------------------------------------------------------------------------------------


def slow_batch_by_size(lengths: list[int], max_tokens: int, multiple: int) -> list[list[int]]:
    """Cut ascending lengths: a batch grows as long as it fits, and gives back what is no multiple."""
    batches, batch = [], []
    waiting = list(range(len(lengths)))
    while waiting:
        batch = [waiting[0]]
        for i in waiting[1:]:
            if (len(batch) + 1) * lengths[i] > max_tokens:
                break
            batch.append(i)
        if len(batch) < len(waiting) and len(batch) >= multiple:
            batch = batch[: len(batch) // multiple * multiple]
        batches.append(batch)
        waiting = waiting[len(batch) :]
    return batches


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(60, 300), st.sampled_from([1, 4, 8]))
def test_batch_by_size_equals_the_rule_step_by_step(lengths, max_tokens, multiple) -> None:
    lengths = sorted(lengths)
    found = peers.batch_by_size(
        np.arange(len(lengths)), np.array(lengths, dtype=np.int64), max_tokens=max_tokens, multiple=multiple
    )
    assert [batch.tolist() for batch in found] == slow_batch_by_size(lengths, max_tokens, multiple)


def small_lengths() -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(3, 0.8, 500), 2, 100).astype(np.int32)


NO_PACKAGE = ("hf_memopt", "random", "group_by_length", "batch_rebalance", "fairseq")


@pytest.mark.parametrize("world_size", [1, 8])
def test_every_arm_reads_every_example_once_an_epoch(world_size) -> None:
    lengths, compared = small_lengths(), 0
    for name, arm in peers.ARMS.items():
        if not name.startswith(NO_PACKAGE) or peers.missing(name):
            continue
        sampler = arm.build(lengths, 512, world_size)
        for epoch in (0, 1):
            read = sorted(int(i) for batch in sampler.epoch(epoch) for i in batch)
            assert read == list(range(500)), (name, epoch)
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("name", ["lhotse dynamic bucketing", "TRL bfd packing"])
@pytest.mark.filterwarnings("ignore")  # of packages that only the benchmark uses
def test_peers_of_other_packages_read_every_example_once(name) -> None:
    if peers.missing(name):
        pytest.skip(peers.missing(name))
    lengths = small_lengths()
    sampler = peers.ARMS[name].build(lengths, 512, 1)
    assert sorted(int(i) for batch in sampler.epoch(0) for i in batch) == list(range(500))


def test_batch_sizes_of_the_fixed_arms() -> None:
    lengths = np.array([3, 3, 3, 60], dtype=np.int32)  # padded: 8, 8, 8, 64
    assert peers.safe_batch_size(lengths, 128) == 2
    assert peers.mean_batch_size(lengths, 128) == 5


def test_a_peer_that_is_not_installed_is_named_with_the_call_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    assert peers.missing("lhotse dynamic bucketing") == (
        'lhotse dynamic bucketing: skipped, lhotse is not installed. Call: pip install "hf-memopt[bench]"'
    )
    assert peers.missing("random, safe") is None


def test_held_bytes_count_the_lengths_where_they_are_kept() -> None:
    lengths = np.full(100_000, 10, dtype=np.int32)

    def keeps(given: Any, *_: Any) -> Any:
        return peers.Sampler(lambda _: iter([given]))

    def converts(given: Any, *_: Any) -> Any:
        halves = given.astype(np.int16)
        return peers.Sampler(lambda _: iter([halves]))

    held = [figures.held_bytes(peers.Arm(build), lengths, 0) / len(lengths) for build in (keeps, converts)]
    assert held == pytest.approx([4, 2], abs=0.1)


# ---- Tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least", "most", "median"), [("review", 4, 512, 60), ("glue", 4, 256, 23), ("heavy", 8, 4096, 250)]
)
def test_length_sets_keep_to_their_limits_and_are_the_same_every_time(name, least, most, median) -> None:
    lengths = batching.synthetic_lengths(name, 20_000)
    assert lengths.dtype == np.int32
    assert least <= lengths.min()
    assert lengths.max() <= most
    assert np.median(lengths) == pytest.approx(median, rel=0.05)  # of 20,000 drawn
    assert (lengths == batching.synthetic_lengths(name, 20_000)).all()


@pytest.mark.parametrize("examples", [33, 640])
def test_the_budget_of_the_trained_task_gives_the_steps_of_the_other_arms(examples) -> None:
    from hf_memopt import LengthBuckets

    lengths = np.clip(np.random.default_rng(1).lognormal(3.5, 0.8, examples), 2, 256).astype(np.int32)
    budget = batching_end_to_end.matching_budget(lengths)
    batches, smaller = (LengthBuckets(lengths, max_tokens=b).n_batches for b in (budget, budget - 8))
    assert batches <= math.ceil(examples / 32) < smaller


def test_rows_become_tables() -> None:
    given, versions = TABLES["figures"], {"transformers": "5.23.0"}
    lengths, collation, end_to_end = (
        table({"figures": {"figures": given[name]}, "versions": versions}).splitlines()
        for name, table in batching.TABLES.items()
    )
    assert lengths[2:4] == TABLES["lines of lengths"]
    assert collation[2] == "| 32x64 | 2.50 ms | 0.10 ms | 25x | 18x |"
    assert end_to_end[2:] == TABLES["lines of trainings"]


def test_rows_name_the_versions_of_the_peers_that_are_installed(tmp_path) -> None:
    path = results_file.append("case", {"figure": 1}, path=tmp_path / "out.jsonl")
    versions = json.loads(path.read_text(encoding="utf-8"))["versions"]
    installed = {name for name in ("lhotse", "trl") if importlib.util.find_spec(name) is not None}
    assert {"python", "torch", "transformers", *installed} <= set(versions)
    assert {"lhotse", "trl"} & set(versions) == installed


@pytest.mark.slow
def test_commands_are_measured_with_their_exit_codes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(command_line, "REPEATS", 1)
    [found] = command_line.measure({"--version": 0}, str(tmp_path)).values()
    assert 0 < found["cpu_seconds"] < found["wall_seconds"] * 8
    assert found["torch_ratio"] < 1
    with pytest.raises(RuntimeError, match="ended with 2; expected 0"):
        command_line.measure({"presets 9gb": 0}, str(tmp_path))
