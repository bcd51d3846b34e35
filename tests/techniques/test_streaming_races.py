"""Streamed layers whose copies are late: every result is that of copies that are done at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from late_lanes import LateLanes
from test_streaming import backward, gradients, llama, same
from test_streaming_quantized import model  # noqa: F401

from hf_memopt import stream_layers
from hf_memopt.techniques.streaming.lanes import Lanes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]


def run(lanes: Lanes, prefetch: int) -> list[Any]:
    """Train 3 steps with parked gradients; return losses, gradients and weights."""
    streamed = llama(attention_dropout=0.0)
    stream_layers(streamed, prefetch=prefetch, lanes=lanes)
    optimizer = torch.optim.SGD(streamed.parameters(), lr=0.01)
    found: list[Any] = []
    for step in range(3):
        found += [torch.tensor(backward(streamed, step)), *gradients(streamed)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(parameter.detach() for parameter in streamed.parameters())]


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_late_copies_change_nothing(count: int) -> None:
    expected, late = run(Lanes("cpu"), 1), 0
    for seed in range(count):
        lanes = LateLanes(seed)
        assert same(run(lanes, seed % 3), expected), seed
        late += lanes.late
    assert late > count


@pytest.mark.parametrize("wait", ["ready", "landed"])
def test_a_wait_left_out_is_caught(wait: str) -> None:
    expected = run(Lanes("cpu"), 1)
    for seed in range(3):
        try:
            is_same = same(run(LateLanes(seed, without=wait), seed % 3), expected)
        except AssertionError:
            is_same = False
        assert not is_same, seed


def quantized(given: Any, lanes: Lanes, prefetch: int) -> list[Any]:
    copied = copy.deepcopy(given)
    stream_layers(copied, prefetch=prefetch, lanes=lanes)
    found: list[Any] = []
    for step in range(2):
        found += [torch.tensor(backward(copied, step)), *gradients(copied)]
        copied.zero_grad()
    return found


def test_late_copies_of_quantized_weights_change_nothing(model: Any) -> None:  # noqa: F811
    """Their storages are emptied and filled again, which autograd does not order."""
    expected = quantized(model, Lanes("cpu"), 1)
    for seed in range(3):
        assert same(quantized(model, LateLanes(seed), seed), expected), seed
    try:
        is_same = same(quantized(model, LateLanes(0, without="ready"), 1), expected)
    except (AssertionError, RuntimeError):
        is_same = False
    assert not is_same
