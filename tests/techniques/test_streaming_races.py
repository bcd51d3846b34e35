"""Streamed layers whose copies are late: every result is that of copies that are done at once. Page-locked memory."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers
from late_lanes import LateLanes
from test_streaming import IDS, LAYERS, backward, gradients, layer_bytes, llama
from test_streaming_quantized import model  # noqa: F401

from hf_memopt import low_memory_optimizer, stream_layers
from hf_memopt.training.techniques import Lanes
from hf_memopt.training.techniques.streaming.gradients import DeviceSteps
from technique_table import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def run(lanes: Lanes, prefetch: int, *, released: bool = False, resident: int = 0) -> list[Any]:
    """Train 3 steps, gradients parked or released; return losses, gradients and weights."""
    streamed = llama(attention_dropout=0.0)
    ring = stream_layers(streamed, prefetch=prefetch, lanes=lanes, resident=resident).ring
    kind = low_memory_optimizer(torch.optim.AdamW, release=True) if released else torch.optim.AdamW
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
@pytest.mark.parametrize("count", [6, pytest.param(500, marks=pytest.mark.slow)])
def test_late_copies_change_nothing(count: int, released: bool) -> None:
    expected, late = run(Lanes("cpu"), 1, released=released), 0
    for seed in range(count):
        lanes = LateLanes(seed)
        assert same(run(lanes, seed % 3, released=released, resident=seed // 3 % 3), expected), seed
        late += lanes.late
    assert late > count


PARKED = ("Ring.use", "Ring._drop", "HostGradients.settle")
RELEASED = ("Ring.use", "Ring._drop", "DeviceSteps.begin_layer", "DeviceSteps.step", "DeviceSteps.settle")
TWICE = {"Ring.deliver"}  # of a weight that Ring.use has waited for


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize(("wait", "released"), [*((one, False) for one in PARKED), *((one, True) for one in RELEASED)])
def test_a_wait_left_out_is_caught(wait: str, released: bool, resident: int) -> None:
    expected = run(Lanes("cpu"), 1, released=released)
    for seed in range(9):
        try:
            late = LateLanes(seed, without=wait)
            if not same(run(late, seed % 3, released=released, resident=resident), expected):
                return
        except AssertionError:
            return
    pytest.fail("no race was found")


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


class Runtime:
    """CUDA's runtime, which notes what it locks."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        with open("/proc/self/maps") as file:
            spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in file]
        assert any(start <= address < end for start, end in spans), "unmapped before it was given back"
        del self.locked[address]


def test_the_weights_of_a_layer_lie_in_one_page_locked_buffer(monkeypatch: Any, tmp_path: Path) -> None:
    """Not rounded up to a power of two; each with a storage of its own, so that saving copies none of them."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    streamed, host = llama(), Lanes("cpu")
    expected = copy.deepcopy(streamed)
    host.is_async = True
    ring = stream_layers(streamed, lanes=host).ring
    host.is_async = False
    assert len(runtime.locked) == LAYERS
    layer = ring.layers[0]
    start, size = next(
        (start, size) for start, size in runtime.locked.items() if layer.parameters[0].data_ptr() == start
    )
    assert layer_bytes(streamed) <= size < layer_bytes(streamed) + 512 * len(layer.parameters)
    assert all(start <= p.data_ptr() < start + size and p.data_ptr() % 64 == 0 for p in layer.parameters)
    assert len({p.untyped_storage().data_ptr() for p in layer.parameters}) == len(layer.parameters)
    assert same([*streamed.parameters()], [*expected.parameters()])
    assert backward(streamed) == backward(expected)
    streamed.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same([*loaded.parameters()], [*expected.parameters()])
    for parameter in layer.parameters:
        parameter.data = parameter.data.clone()
    assert len(runtime.locked) == LAYERS - 1  # given back with the last tensor in it


def test_a_driver_that_locks_no_pages_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    host = Lanes("cpu")
    host.is_async = True
    with pytest.warns(UserWarning, match="refused to page-lock 512 bytes of host memory .error 2., so copies wait"):
        [copied] = host.host_like([torch.ones(3)])
    assert copied.shape == (3,)


def test_too_little_host_memory_for_the_weights_is_said_before_they_are_copied(monkeypatch: Any) -> None:
    """What ``from_pretrained`` returns may lie in a mapped file, which takes no memory yet."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=1000))
    streamed, host = llama(), Lanes("cpu")
    host.is_async = True
    with pytest.raises(ValueError, match=r"^streamed layers need .* of host memory for the weights of layer 1 of 5, "):
        stream_layers(streamed, lanes=host)
    assert "forward" not in vars(streamed.model.layers[0])
    assert stream_layers(streamed)
