"""The batching benchmark: its figures against a slow count, and what its samplers read."""

from __future__ import annotations

from typing import Any

import batching_figures as figures
import batching_peers as peers
import command_line
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


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


# ---- Samplers -------------------------------------------------------------------------------------------------------


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


# ---- Tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_are_measured_with_their_exit_codes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(command_line, "REPEATS", 1)
    [found] = command_line.measure({"--version": 0}, str(tmp_path)).values()
    assert 0 < found["cpu_seconds"] < found["wall_seconds"] * 8
    assert found["torch_ratio"] < 1
    with pytest.raises(RuntimeError, match="ended with 2; expected 0"):
        command_line.measure({"presets 9gb": 0}, str(tmp_path))
