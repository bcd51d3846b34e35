"""Streamed layers whose copies are late: every result is that of copies that are done at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from late_lanes import LateLanes
from test_streaming import IDS, backward, gradients, layer_bytes, llama, same
from test_streaming_quantized import model  # noqa: F401

from hf_memopt import gradient_release, stream_layers
from hf_memopt.techniques.streaming.gradients import DeviceSteps
from hf_memopt.techniques.streaming.lanes import Lanes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def run(lanes: Lanes, prefetch: int, *, released: bool = False) -> list[Any]:
    """Train 3 steps, gradients parked or released; return losses, gradients and weights."""
    streamed = llama(attention_dropout=0.0)
    ring = stream_layers(streamed, prefetch=prefetch, lanes=lanes).ring
    kind = gradient_release(torch.optim.AdamW) if released else torch.optim.AdamW
    optimizer = kind(streamed.parameters(), lr=0.01)
    if released:
        ring.steps = DeviceSteps(lanes, optimizer)
    found: list[Any] = []
    for step in range(3):
        failing = streamed.model.layers[step].register_forward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            streamed(input_ids=IDS)  # what is on its way is dropped
        failing.remove()
        found += [torch.tensor(backward(streamed, step)), *gradients(streamed)]
        optimizer.step()
        optimizer.zero_grad()
    assert ring.live_bytes == 0
    on_their_way = released  # a layer that is copied out
    assert ring.peak_bytes <= (prefetch + 1 + on_their_way) * layer_bytes(streamed)
    return [*found, *(parameter.detach() for parameter in streamed.parameters())]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_late_copies_change_nothing(count: int, released: bool) -> None:
    expected, late = run(Lanes("cpu"), 1, released=released), 0
    for seed in range(count):
        lanes = LateLanes(seed)
        assert same(run(lanes, seed % 3, released=released), expected), seed
        late += lanes.late
    assert late > count


PARKED = ("Ring.use", "Ring._drop", "HostGradients.settle")
RELEASED = ("Ring.use", "Ring._drop", "DeviceSteps.begin_layer", "DeviceSteps.step", "DeviceSteps.settle")
TWICE = {"Ring.deliver"}  # of a weight that Ring.use has waited for


@pytest.mark.parametrize(("wait", "released"), [*((one, False) for one in PARKED), *((one, True) for one in RELEASED)])
def test_a_wait_left_out_is_caught(wait: str, released: bool) -> None:
    expected, caught = run(Lanes("cpu"), 1, released=released), 0
    for seed in range(9):
        try:
            caught += not same(run(LateLanes(seed, without=wait), seed % 3, released=released), expected)
        except AssertionError:
            caught += 1
    assert caught


def test_every_wait_is_one_of_those_left_out() -> None:
    """So that a new one cannot go without proof."""
    for released, known in ((False, PARKED), (True, RELEASED)):
        lanes = LateLanes(0)
        run(lanes, 1, released=released)
        assert lanes.asked - TWICE == {*known}


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
        is_same = same(quantized(model, LateLanes(0, without="Ring.use"), 1), expected)
    except (AssertionError, RuntimeError):
        is_same = False
    assert not is_same
