"""The tracker on programs small enough to work out by hand, and what it answers to code that asks for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import empty as meta
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt import NotEstimableError
from hf_memopt.prediction.memory.cuda import CudaSemantics, run_backward
from hf_memopt.prediction.memory.recording.step import recording
from hf_memopt.prediction.memory.tracking import StorageTracker


def deltas(tracker: StorageTracker) -> list[int]:
    return [delta for _, delta in tracker.events]


class TwoLayers(nn.Module):
    """4 inputs, 8 hidden, 2 outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def test_every_birth_and_death_of_a_step_of_two_linear_layers() -> None:
    """Batch of 3 rows in float32; (rows, 4) -> (rows, 8) -> (rows, 2) -> the sum of all."""
    with torch.device("meta"):
        model = TwoLayers()
    x = meta(3, 4)
    tracker = StorageTracker()
    loaded = [tracker.add(tensor) for tensor in (*model.parameters(), x)]
    with recording(tracker), tracker.watching(model):
        loss = model(x).sum()
        forward_end = len(tracker.events)
        gradient = torch.ones_like(loss)
        with tracker.backward():
            run_backward(loss, gradient)
        backward_end = len(tracker.events)
        del loss, gradient
        model.zero_grad()

    # loaded: weights and input
    assert loaded == [0, 1, 2, 3, 4]
    assert deltas(tracker)[:5] == [8 * 4 * 4, 8 * 4, 2 * 8 * 4, 2 * 4, 3 * 4 * 4]
    # forward: 5 before relu, dead once relu has run (its backward needs the result), 6 after relu, 7 output, 8 loss
    hidden, output, scalar = 3 * 8 * 4, 3 * 2 * 4, 4
    forward = [(5, hidden), (6, hidden), (5, -hidden), (7, output), (8, scalar), (7, -output)]
    assert tracker.events[5:forward_end] == forward
    # backward: 9 the gradient given; 10 of the weight of `down` and 11 of its bias; 12 of its input, with which the
    # saved hidden values (6) die after relu's backward has made 13; 14 and 15 the gradients of `up`, then 13 dies
    births = [(number, delta) for number, delta in tracker.events[forward_end:backward_end] if delta > 0]
    assert [delta for _, delta in births] == [scalar, hidden, 2 * 8 * 4, 2 * 4, hidden, 8 * 4 * 4, 8 * 4]
    assert {number for number, delta in tracker.events[forward_end:backward_end] if delta < 0} == {6, 10, 13}
    # the end: loss and given gradient die, then the gradients in the order of the parameters
    gradients = [(14, -8 * 4 * 4), (15, -8 * 4), (11, -2 * 8 * 4), (12, -2 * 4)]
    assert tracker.events[backward_end:] == [(8, -scalar), (9, -scalar), *gradients]
    assert [tracker.module_of(number) for number in range(5, 9)] == ["up", "", "down", ""]
    assert [tracker.module_of(number) for number in range(10, 16)] == ["down"] * 3 + ["", "up", "up"]
    assert tracker.flops == 2 * (3 * 4 * 8 + 3 * 8 * 2) + 2 * (3 * 4 * 8) + 2 * 2 * (3 * 8 * 2)


def asking(module: str) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """Return two questions about two tensors, asked by the code of a module."""
    names: dict[str, Any] = {"__name__": module, "torch": torch}
    exec("def every(x, y):\n    return bool((x == y).all())\ndef equal(x, y):\n    return torch.equal(x, y)\n", names)
    return names["every"], names["equal"]


@pytest.mark.parametrize("module", ["transformers.masking_utils", "transformers.modeling_attn_mask_utils"])
@pytest.mark.parametrize("padding", [True, False])
def test_questions_about_a_mask_have_one_answer_and_others_none(padding: bool, module: str) -> None:
    """With padding no mask is all ones; real tensors answer for themselves.

    An early exit, or a layer dropped by a coin on the GPU: the tracker cannot know the side it falls on.
    """
    ones, other = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    with recording(StorageTracker(padding=padding), CudaSemantics()):
        for ask in asking(module):
            assert ask(ones, other) is not padding
            assert ask(torch.ones(2), torch.ones(2))
        assert torch.tensor(5).item() == 5
        for line, ask in zip((2, 4), asking("a.model"), strict=True):
            with pytest.raises(NotEstimableError) as error:
                ask(ones, other)
            assert str(error.value).startswith(f"not estimable: a.model, line {line}, lets values on the GPU decide")


def test_watching_leaves_no_hook_behind_even_after_an_error() -> None:
    with torch.device("meta"):
        model = TwoLayers()
    tracker = StorageTracker()
    with pytest.raises(RuntimeError), recording(tracker), tracker.watching(model):
        model(meta(3, 5))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with tracker.watching(model):
        model(meta(3, 4))
    assert tracker._stack == [0]


def test_torchs_compiler_is_not_switched_off_around_each_operation() -> None:
    """``TorchDispatchMode._should_skip_dynamo``: where it says so, each call of the mode goes through the compiler."""
    assert TorchDispatchMode._should_skip_dynamo()
    assert not hasattr(StorageTracker.__torch_dispatch__, "__wrapped__")


# ---- In place


ROWS, COLUMNS = 96, 128
USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a leaf twice": lambda x, i: x.sin() + x.cos(),
    "a leaf three times": lambda x, i: x.sin() + x.cos() + x.tanh(),
    "twice": lambda x, i: (lambda h: h.sin() + h.cos())(x.exp()),
    "three times": lambda x, i: (lambda h: h.sin() + h.cos() + h.tanh())(x.exp()),
    "an expanded gradient first": lambda x, i: x.sum() + x.exp().sum(),
    "parts": lambda x, i: x.exp()[:48].sin().sum() + x.exp()[48:].cos().sum(),
    "gather": lambda x, i: x.exp().gather(1, i).sin(),
    "index": lambda x, i: x.exp()[i[:, 0]].sin(),
    "index_select": lambda x, i: x.exp().index_select(0, i[:, 0]).sin(),
    "topk": lambda x, i: x.exp().topk(64, dim=1)[0].sin(),
    "max": lambda x, i: x.exp().max(dim=1)[0].sin(),
}


@pytest.mark.parametrize("hides", [False, True], ids=["", "kernels that hold memory"])
@pytest.mark.parametrize("name", USES)
def test_gradients_are_added_in_place_as_without_a_mode(name: str, hides: bool) -> None:
    """The same blocks, in order, as torch's profiler sees on the CPU, where no mode is on and no tensor is meta."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        x, index = torch.rand(ROWS, COLUMNS, requires_grad=True), torch.zeros(ROWS, 64, dtype=torch.long)
        USES[name](x, index).sum().backward()
        del x, index
    found = profiled.profiler.kineto_results.events()  # private, seen in torch 2.13
    expected = [one.nbytes() for one in found if one.name() == "[memory]" and abs(one.nbytes()) > 2048]

    tracker = StorageTracker(hidden=lambda func, *_: (7,) if hides and "index_put" in str(func) else ())
    with recording(tracker):
        x = meta(ROWS, COLUMNS, requires_grad=True)
        index = meta(ROWS, 64, dtype=torch.long)
        loss = USES[name](x, index).sum()
        gradient = torch.ones_like(loss)
        with tracker.backward():
            run_backward(loss, gradient)
        del loss, gradient, x, index
    assert [delta for delta in deltas(tracker) if abs(delta) > 2048] == expected
    alive: dict[int, int] = {}
    for number, delta in tracker.events:
        alive[number] = alive.get(number, 0) + delta
    assert not any(alive.values())  # numbers stay matched where a block is taken over
