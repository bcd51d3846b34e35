"""The tracker on programs small enough to work out by hand, and the private names of torch that it stands on."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx.experimental._config as fx_config
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import logging

from hf_memopt.binding.undo import RandomState
from hf_memopt.memory import estimate
from hf_memopt.memory.cuda import CudaSemantics, run_backward
from hf_memopt.memory.recording.step import RECORDING_LOCK, recording
from hf_memopt.memory.settings import NotEstimableError
from hf_memopt.memory.tracking import StorageTracker

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def deltas(tracker: StorageTracker) -> list[int]:
    return [delta for _, delta in tracker.events]


# ---- By hand --------------------------------------------------------------------------------------------------------


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
    assert tracker.events[5:forward_end] == [
        (5, hidden),
        (6, hidden),
        (5, -hidden),
        (7, output),
        (8, scalar),
        (7, -output),
    ]
    # backward: 9 the gradient given; 10 of the weight of `down` and 11 of its bias; 12 of its input, with which the
    # saved hidden values (6) die after relu's backward has made 13; 14 and 15 the gradients of `up`, then 13 dies
    numbers = [number for number, _ in tracker.events[forward_end:backward_end]]
    births = [(number, delta) for number, delta in tracker.events[forward_end:backward_end] if delta > 0]
    dead = [number for number, delta in tracker.events[forward_end:backward_end] if delta < 0]
    assert len(numbers) == len(births) + len(dead)
    assert [delta for _, delta in births] == [scalar, hidden, 2 * 8 * 4, 2 * 4, hidden, 8 * 4 * 4, 8 * 4]
    alive = {9, 11, 12, 14, 15}
    assert set(dead) == {6, 10, 13}
    assert {number for number, _ in births} - set(dead) == alive
    # the end: loss and given gradient die, then the gradients in the order of the parameters
    assert tracker.events[backward_end:] == [
        (8, -scalar),
        (9, -scalar),
        (14, -8 * 4 * 4),
        (15, -8 * 4),
        (11, -2 * 8 * 4),
        (12, -2 * 4),
    ]
    assert [tracker.module_of(number) for number in range(5, 9)] == ["up", "", "down", ""]
    assert [tracker.module_of(number) for number in range(10, 16)] == ["down"] * 3 + ["", "up", "up"]
    assert tracker.flops == 2 * (3 * 4 * 8 + 3 * 8 * 2) + 2 * (3 * 4 * 8) + 2 * 2 * (3 * 8 * 2)


def test_views_share_a_storage_and_in_place_operations_make_none() -> None:
    tracker = StorageTracker()
    with recording(tracker):
        x = torch.empty(4, 8, device="meta")
        kept = [x.t(), x[1:], x.view(32), x.detach(), x.add_(1), x.expand(2, 4, 8)]
        del x
    assert deltas(tracker) == [128]
    kept.clear()
    assert deltas(tracker) == [128, -128]


def test_all_outputs_of_an_operator_count() -> None:
    tracker = StorageTracker()
    with recording(tracker):
        out = torch.native_layer_norm(meta(2, 8), [8], None, None, 1e-5)
        parts = torch._foreach_mul([meta(2), meta(3)], 2.0)
        seen = [tracker.sizes[tracker.number(tensor)] for tensor in (*out, *parts)]
    assert seen == [64, 8, 8, 8, 12]


def test_other_devices_are_not_counted_unless_asked_for() -> None:
    of_meta, of_cpu, of_all = StorageTracker(), StorageTracker(device_type="cpu"), StorageTracker(device_type=None)
    with recording(of_meta, of_cpu, of_all):
        both = torch.zeros(4), torch.zeros(8, device="meta")
    assert (deltas(of_meta), deltas(of_cpu), deltas(of_all)) == ([32], [16], [16, 32])
    assert of_meta.number(both[0]) == -1
    assert of_meta.add(both[0]) == -1
    assert of_meta.number(both[1]) == 0 == of_meta.add(both[1])


def test_ignored_storages_are_the_hosts() -> None:
    tracker = StorageTracker()
    x = meta(8)
    tracker.ignore(x)
    assert tracker.add(x) == -1
    assert len(tracker.ignored) == 1
    del x
    assert not tracker.ignored
    assert tracker.events == []


def test_hidden_bytes_are_born_and_dead_after_the_outputs_of_their_operator() -> None:
    def hidden(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> tuple[int, ...]:
        return (1000, 24) if func is aten.mul.Tensor else ()

    tracker = StorageTracker(hidden=hidden)
    with recording(tracker):
        x = torch.ones(4, device="meta")
        y = x * x
        z = y + 1
    assert tracker.events == [(0, 16), (1, 16), (2, 1000), (3, 24), (2, -1000), (3, -24), (4, 16)]
    assert z.shape == (4,)


def test_flops_are_those_of_torchs_table_and_can_be_left_out() -> None:
    counted, not_counted = StorageTracker(), StorageTracker(flops=False)
    with recording(counted, not_counted):
        meta(2, 3) @ meta(3, 5)
        torch.bmm(meta(7, 2, 3), meta(7, 3, 5))
    assert counted.flops == 2 * 2 * 3 * 5 + 7 * 2 * 2 * 3 * 5
    assert not_counted.flops == 0


def asking(module: str) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """Return two questions about two tensors, asked by the code of a module."""
    names: dict[str, Any] = {"__name__": module, "torch": torch}
    exec("def every(x, y):\n    return bool((x == y).all())\ndef equal(x, y):\n    return torch.equal(x, y)\n", names)
    return names["every"], names["equal"]


@pytest.mark.parametrize("module", ["transformers.masking_utils", "transformers.modeling_attn_mask_utils"])
@pytest.mark.parametrize("padding", [True, False])
def test_questions_about_a_mask_have_one_answer(padding: bool, module: str) -> None:
    """With padding no mask is all ones; real tensors answer for themselves."""
    assert importlib.util.find_spec(module) is not None
    ones, other = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    with recording(StorageTracker(padding=padding), CudaSemantics()):
        for ask in asking(module):
            assert ask(ones, other) is not padding
            assert ask(torch.ones(2), torch.ones(2))
        assert torch.tensor(5).item() == 5
        assert torch.tensor(0.25).item() == 0.25


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("kind", [0, 1])
def test_questions_of_all_other_code_are_not_estimable(padding: bool, kind: int) -> None:
    """An early exit, or a layer dropped by a coin on the GPU: the tracker cannot know the side it falls on."""
    ask, x = asking("a.model")[kind], torch.ones(2, device="meta")
    with pytest.raises(NotEstimableError) as error, recording(StorageTracker(padding=padding), CudaSemantics()):
        ask(x, x)
    assert str(error.value) == (
        f"not estimable: a.model, line {2 * kind + 2}, lets values on the GPU decide what runs, in the model, and "
        "only real data has them; expected a pass that depends on shapes and settings alone. Estimate the model "
        "without that branch"
    )


def test_question_names_the_module_that_asks() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> float:
            return float(x.sum())

    model, tracker = nn.Sequential(nn.Identity(), Asks()), StorageTracker()
    with pytest.raises(NotEstimableError) as error, recording(tracker), tracker.watching(model):
        model(meta(2))
    assert str(error.value) == (
        "not estimable: the model's code reads a number (torch.float32) from the GPU, in 1, and only real data has it"
    )


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


# ---- The surroundings of a recording --------------------------------------------------------------------------------


OPERATIONS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.rand(4),
    lambda: torch.rand([]),
    lambda: torch.randint(2, 9, (4,)),
    lambda: torch.randint(9, (4,)),
    lambda: torch.randperm(9),
    lambda: torch.rand_like(torch.zeros(4)),
    lambda: torch.zeros(4).uniform_(),
    lambda: torch.normal(torch.zeros(4), 1.0),
    lambda: torch.bernoulli(torch.full((16,), 0.5)),
    lambda: torch.multinomial(torch.ones(16), 4),
    lambda: nn.functional.dropout(torch.ones(16)),
    lambda: torch.native_dropout(torch.ones(16), 0.5, True)[0],
    lambda: torch.tensor([random.random(), random.gauss(0, 1), *random.sample(range(99), 4)]),
    lambda: torch.tensor([np.random.rand(), np.random.choice(99), *np.random.permutation(9)]),
    lambda: torch.tensor(np.random.seed(7) or np.random.rand()),
    lambda: torch.tensor(random.seed(7) or random.random()),
    lambda: nn.Linear(4, 4).weight.detach(),
]


OF_PYTHON, OF_NUMPY = random.getstate, np.random.get_state  # not those of a recording


def state_of_process() -> list[Any]:
    _, numbers, *rest = OF_NUMPY()
    return [torch.default_generator.get_state().tolist(), OF_PYTHON(), numbers.tolist(), rest]


@pytest.mark.parametrize("draw", OPERATIONS)
def test_a_recording_draws_the_same_and_touches_no_generator(draw: Callable[[], torch.Tensor]) -> None:
    found = []
    for _ in range(2):
        before = state_of_process()
        with recording(StorageTracker()):
            found.append([draw(), draw()])
            assert before == state_of_process()
        assert before == state_of_process()
        torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60, "pad_token_id": 0}
BIG_BIRD = transformers.BigBirdConfig(  # draws the blocks that it attends to
    **TINY, intermediate_size=8, attention_type="block_sparse", block_size=4, num_random_blocks=1
)
OPT = transformers.OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8, layerdrop=0.5)  # draws which layers it drops


def test_a_training_in_another_thread_draws_what_it_draws_alone() -> None:
    """Models that draw on the host (a dropped layer, masked time steps) and checkpoints, while another thread draws."""
    drawn: list[tuple[float, float, float]] = []
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))

    generators = torch.Generator().manual_seed(5), random.Random(5), np.random.RandomState(5)
    state = RandomState.capture(torch.device("cpu"))
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for config in (BIG_BIRD, OPT):
            for checkpointing in (False, {"use_reentrant": True}, {"use_reentrant": False}):
                estimate(config, batch_size=2, seq_len=64, checkpointing=checkpointing)
    finally:
        stop.set()
        thread.join()
        state.restore()
    of_torch, of_python, of_numpy = generators
    expected = [(torch.rand((), generator=of_torch).item(), of_python.random(), of_numpy.rand()) for _ in drawn]
    assert drawn == expected
    assert len(drawn) > 100


@pytest.mark.parametrize("verbosity", [logging.INFO, logging.CRITICAL])
def test_transformers_logs_errors_only_within(verbosity: int) -> None:
    was = logging.get_verbosity()
    logging.set_verbosity(verbosity)
    try:
        with recording():
            within = logging.get_verbosity()
        after = logging.get_verbosity()
    finally:
        logging.set_verbosity(was)
    assert (within, after) == (max(verbosity, logging.ERROR), verbosity)


def test_one_thread_records_at_a_time() -> None:
    entered = threading.Event()

    def other() -> None:
        with recording():
            entered.set()

    thread = threading.Thread(target=other)
    with recording(), RECORDING_LOCK, recording():  # one thread may nest them
        thread.start()
        assert not entered.wait(0.2)
    thread.join(timeout=10)
    assert entered.is_set()


def test_backward_that_fails_ends_the_recomputation_and_tells_of_it() -> None:
    tracker, ends = StorageTracker(), list[int]()
    tracker.after_recomputation.append(lambda: ends.append(len(tracker.events)))

    def fail() -> None:
        with recording(tracker), tracker.backward():
            with torch.enable_grad():
                torch.zeros(2, device="meta")  # taken for recomputation
            raise KeyError("in a hook")

    with pytest.raises(KeyError):
        fail()
    assert ends == [2]
    assert tracker.recomputed == [(0, 2)]  # born and dead
    with recording(tracker):
        torch.zeros(2, device="meta")
    assert tracker.places[-1] == 0  # of a forward pass again


def test_nonzero_on_meta_needs_the_setting_and_counts_every_element() -> None:
    """``meta_nonzero_assume_all_nonzero`` of the private ``torch.fx.experimental._config``."""
    with pytest.raises(NotImplementedError):
        meta(2, 3).nonzero()
    with fx_config.patch(meta_nonzero_assume_all_nonzero=True):
        assert meta(2, 3).nonzero().shape == (6, 2)
    assert not fx_config.meta_nonzero_assume_all_nonzero
