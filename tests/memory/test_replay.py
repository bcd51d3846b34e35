"""The replay of a recorded step, against timelines written out by hand: what is allocated, what for, in which order.

Sizes are in blocks of 512 bytes, the allocator's smallest, so that nothing is rounded.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from hf_memopt.prediction.memory.allocator import Replayed, ReplayPlan
from hf_memopt.prediction.memory.allocator.caching_allocator import AllocationError, CachingAllocator
from hf_memopt.prediction.memory.allocator.replay import replay
from hf_memopt.prediction.memory.optimizers import OptimizerMemory
from hf_memopt.prediction.memory.recording import RecordedPass, StepTrace
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.memory.tracking import COMPONENTS, StorageTracker

BLOCK = 512
LETTERS = dict(zip("WGSALTCI", COMPONENTS, strict=True))  # C: cuBLAS, the workspace
NO_LOGITS_SEQUENCES = range(0)


class Script:
    """A tracker's record written by hand: ``allocated`` and ``freed`` in the order of a run, sizes in blocks."""

    def __init__(self) -> None:
        self.tracker = StorageTracker()
        self.tracker.modules += ["encoder", "head"]

    def allocated(self, blocks: int, *, sequence: int = 0, module: str = "") -> int:
        tracker = self.tracker
        number = len(tracker.sizes)
        tracker.sizes.append(blocks * BLOCK)
        tracker.allocated_at.append(self.now)
        tracker.sequences.append(sequence)
        tracker.places.append(tracker.modules.index(module))
        tracker.events.append((number, blocks * BLOCK))
        return number

    def freed(self, *numbers: int) -> None:
        for number in numbers:
            self.tracker.events.append((number, -self.tracker.sizes[number]))

    @property
    def now(self) -> int:
        return len(self.tracker.events)


def accumulating_trace(*, micro_batches: int = 2, module: str = "") -> StepTrace:
    """Return a step of one weight (10): per micro-batch an activation (5), a temporary (3), logits (4), a loss (1)."""
    script = Script()
    weight, batch = script.allocated(10), script.allocated(2)
    trace = StepTrace(script.tracker, weights=(weight,), inputs=(batch,))
    for index in range(micro_batches):
        start = script.now
        activation, temporary = script.allocated(5), script.allocated(3)
        script.freed(temporary)
        logits_event = script.now
        logits, loss = script.allocated(4, sequence=7), script.allocated(1, sequence=8)
        forward_end = script.now
        of_logits = script.allocated(4, sequence=8)
        gradient = script.allocated(10, sequence=3, module=module)
        script.freed(of_logits)
        if index:
            script.freed(gradient)  # it was added to the first
        else:
            trace.gradients = (gradient,)
        product = script.allocated(6, sequence=3, module=module)
        script.freed(activation, product)
        end = script.now
        script.freed(logits, loss)
        trace.micro_batches.append(
            RecordedPass(start, forward_end, end, frozenset({logits}), logits_event, range(7, 9))
        )
    script.freed(*trace.gradients)
    return trace


OPTIMIZER = OptimizerMemory(
    state=(20 * BLOCK, 20 * BLOCK), host_state_bytes=0, step=((9 * BLOCK, 8 * BLOCK),), first_step=((7 * BLOCK,),)
)
LOAD = ["+W10"]
FORWARD = ["+A5", "+T3", "-T3", "+L4", "+L1"]
BACKWARD = ["+L4", "+G10", "-L4", "+T6", "-A5", "-T6", "-L4", "-L1"]
BACKWARD_ADDING = ["+L4", "+T10", "-L4", "-T10", "+T6", "-A5", "-T6", "-L4", "-L1"]
FIRST_STEP = ["+T1", "+T2", "-T1", "-T2", "+S20", "+S20", "+T7", "-T7", "-G10"]
STEP = ["+T1", "+T2", "-T1", "-T2", "+T9", "+T8", "-T9", "-T8", "-G10"]
NOTHING = {"optimizer": OptimizerMemory((), 0, (), ()), "clipping": (), "workspaces": ()}


def plan(**changed: Any) -> ReplayPlan:
    usual = {"optimizer": OPTIMIZER, "clipping": (BLOCK, 2 * BLOCK), "micro_batches": 1}
    usual["workspaces"] = (8 * BLOCK, 9 * BLOCK)
    names = {item.name for item in fields(ReplayPlan)}
    settings = StepSettings(**{name: value for name, value in changed.items() if name not in names})
    return ReplayPlan(settings, **{**usual, **{name: value for name, value in changed.items() if name in names}})


def played(trace: StepTrace, plan: ReplayPlan, allocator: CachingAllocator | None = None) -> tuple[Replayed, list[str]]:
    """Return the replay and its timeline as signed components in blocks, having checked what holds for every replay."""
    found = replay(trace, plan, CachingAllocator() if allocator is None else allocator)
    table, reserved = found.timeline.components, found.timeline.reserved
    totals = table.sum(axis=1)
    peak = int(np.where(reserved * 100 >= reserved.max() * 99, totals, -1).argmax())  # the fullest of these moments
    assert (table >= 0).all()
    assert (reserved >= totals).all()
    assert totals.max() == found.peak_allocated
    assert found.components == dict(zip(COMPONENTS, table[peak].tolist(), strict=True))
    assert found.peak_reserved >= reserved.max()
    assert found.phase == next(name for start, name in reversed(found.timeline.phases) if start <= peak)
    changes = np.diff(table, axis=0, prepend=np.zeros((1, len(COMPONENTS)), np.int64))
    assert ((changes != 0).sum(axis=1) == 1).all()
    letters = {name: letter for letter, name in LETTERS.items()}
    return found, [
        f"{'+' if row[column] > 0 else '-'}{letters[COMPONENTS[column]]}{abs(row[column]) // BLOCK}"
        for row in changes
        for column in [int(np.flatnonzero(row)[0])]
    ]


def sums(timeline: list[str]) -> list[int]:
    """Return the allocated blocks after each event of a timeline."""
    return list(itertools.accumulate(int(event[0] + event[2:]) for event in timeline))


def recomputing_trace() -> StepTrace:
    """Return two recomputed stretches: what outlives its own is an activation again, what follows is a temporary."""
    script = Script()
    trace = StepTrace(script.tracker, weights=(), inputs=())
    kept, forward_end = script.allocated(5), script.now
    for blocks in (20, 30):
        begin = script.now
        again, within = script.allocated(blocks), script.allocated(9)
        script.freed(within)
        script.tracker.recomputed.append((begin, script.now))
        script.freed(script.allocated(1, sequence=1), again)
    script.freed(kept)
    trace.micro_batches.append(RecordedPass(0, forward_end, script.now, logits_event=forward_end))
    return trace


def caching_trace() -> StepTrace:
    """Return two passes, in the first of which the model makes a cache that nothing frees."""
    script = Script()
    trace = StepTrace(script.tracker, weights=(), inputs=())
    for index in range(2):
        start = script.now
        if not index:
            script.allocated(50)
        activation, forward_end = script.allocated(5), script.now
        script.freed(activation)
        trace.micro_batches.append(RecordedPass(start, forward_end, script.now, logits_event=forward_end))
    return trace


def releasing_trace(*, micro_batches: int = 1) -> StepTrace:
    """Return a step of two weights (10, 20) whose gradients go as soon as they are there, the second one first."""
    script = Script()
    weights = script.allocated(10), script.allocated(20)
    trace = StepTrace(script.tracker, weights=weights, inputs=())
    gradients = []
    for _ in range(micro_batches):
        start = script.now
        activation = script.allocated(5)
        forward_end = script.now
        releases = []
        for parameter, blocks in ((1, 20), (0, 10)):
            gradient = script.allocated(blocks)
            releases.append((script.now, parameter, gradient))
            script.freed(gradient)
            gradients.append(gradient)
        script.freed(activation)
        trace.micro_batches.append(
            RecordedPass(start, forward_end, script.now, logits_event=forward_end, releases=tuple(releases))
        )
    trace.gradients = tuple(gradients)
    return trace


ALONE = [
    OptimizerMemory(
        (40 * BLOCK,), 0, step=((3 * BLOCK,),), first_step=((3 * BLOCK,), (4 * BLOCK,)), releases_gradients=True
    ),
    OptimizerMemory((80 * BLOCK,), 0, step=((6 * BLOCK,),), first_step=((6 * BLOCK,),), releases_gradients=True),
]


def evaluated_trace(*, gathers: bool = True) -> StepTrace:
    """Return a step that needs nothing, and an evaluation batch: inputs (3), hidden (6), logits (4)."""
    script = Script()
    weight, batch = script.allocated(10), script.allocated(2)
    trace = StepTrace(script.tracker, weights=(weight,), inputs=(batch,))
    trace.micro_batches.append(RecordedPass(script.now, script.now, script.now, logits_event=script.now))
    trace.evaluation_inputs = (script.allocated(3),)
    start = script.now
    hidden = script.allocated(6)
    logits_event = script.now
    logits = script.allocated(4, sequence=7)
    script.freed(hidden)
    forward_end = script.now
    script.freed(logits)
    outputs = (logits,) if gathers else ()
    trace.evaluation = RecordedPass(
        start, forward_end, script.now, frozenset({logits}), logits_event, NO_LOGITS_SEQUENCES, outputs
    )
    return trace


MANUAL = ["+L4", "+G10", "-L4", "+T6", "-A5", "-T6"]
LATER = ["+I2", "-I2", *FORWARD]
SECOND = [*FORWARD, *BACKWARD_ADDING]
FUNCTION = [*FORWARD, *MANUAL, "-G10", "-L4", "-L1"]
EVALUATED = ["+W10", "+I2", *["+I2", "-I2"] * 2]
PASS = ["+I3", "+T6", "+L4", "-T6", "-L4"]
RELEASING = ["+G20", "+S80", "+T6", "-T6", "-G20", "+G10", "+S40", "+T3", "-T3", "+T4", "-T4", "-G10", "-A5"]
RELEASED_LATER = ["+A5", "+G20", "+T6", "-T6", "-G20", "+G10", "+T3", "-T3", "-G10", "-A5"]


def thrice(first: list[str], later: list[str]) -> list[str]:
    return [*LOAD, *first, *later, *later]


def evaluation(batches: int, **settings: Any) -> ReplayPlan:
    return plan(**NOTHING, eval_batch_size=1, eval_batches=batches, **settings)


TIMELINES: dict[str, tuple[StepTrace, ReplayPlan, list[str]]] = {
    "three steps": (
        accumulating_trace(micro_batches=1),
        plan(),
        thrice(["+I2", "+C8", *FORWARD, "+C9", *BACKWARD, *FIRST_STEP], [*LATER, *BACKWARD, *STEP]),
    ),
    "a hand-written loop holds logits and loss until the next forward pass is over": (
        accumulating_trace(micro_batches=1),
        plan(**NOTHING, loop="manual"),
        thrice(["+I2", *FORWARD, *MANUAL, "-G10"], [*LATER, "-L4", "-L1", *MANUAL, "-G10"]),
    ),
    "a step function frees them when it returns": (
        accumulating_trace(micro_batches=1),
        plan(**NOTHING, loop="function"),
        thrice(["+I2", *FUNCTION], ["+I2", "-I2", *FUNCTION]),
    ),
    "a function of each accumulation step frees them before the next": (
        accumulating_trace(),
        plan(**NOTHING, gradient_accumulation_steps=2, loop="function"),
        [*LOAD, "+I2", *FORWARD, *MANUAL, "-L4", "-L1", *FORWARD, "+L4", "+T10", "-L4", "-T10", *MANUAL[3:], "-G10"],
    ),
    "kept gradients are added to from the second step on": (
        accumulating_trace(),
        plan(**NOTHING, zero_grad_to_none=False),
        thrice(["+I2", *FORWARD, *BACKWARD], [*LATER, *BACKWARD_ADDING]),
    ),
    "accumulated": (
        accumulating_trace(),
        plan(gradient_accumulation_steps=2),
        thrice(
            ["+I2", "+I2", "+C8", *FORWARD, "+C9", *BACKWARD, *SECOND, *FIRST_STEP],
            ["+I2", "+I2", "-I2", "-I2", *FORWARD, *BACKWARD, *SECOND, *STEP],
        ),
    ),
    "cut": (
        accumulating_trace(),
        plan(micro_batches=2),
        thrice(["+I2", "+C8", *FORWARD, "+C9", *BACKWARD, *SECOND, *FIRST_STEP], [*LATER, *BACKWARD, *SECOND, *STEP]),
    ),
    **{
        f"further micro-batches repeat the second and hold their inputs {cut}": (
            accumulating_trace(),
            plan(**cut),
            [
                *[*LOAD, *["+I2"] * cut.get("gradient_accumulation_steps", 1)],
                *["+C8", *FORWARD, "+C9", *BACKWARD, *SECOND, *SECOND, *FIRST_STEP],
            ],
        )
        for cut in (
            {"gradient_accumulation_steps": 5},
            {"micro_batches": 5},
            {"gradient_accumulation_steps": 3, "micro_batches": 4},
        )
    },
    "recomputed activations count as activations": (
        recomputing_trace(),
        plan(**NOTHING),
        ["+A5", *(f"{sign}" for n in (20, 30) for sign in (f"+A{n}", "+T9", "-T9", "+T1", "-T1", f"-A{n}")), "-A5"] * 3,
    ),
    "a cache of the model is allocated once and stays": (
        caching_trace(),
        plan(**NOTHING, gradient_accumulation_steps=2),
        ["+A50", *["+A5", "-A5"] * 6],
    ),
    "released gradients step within the backward pass": (
        releasing_trace(),
        plan(optimizer=ALONE, clipping=()),
        ["+W10", "+W20", "+C8", "+A5", "+C9", *RELEASING, *RELEASED_LATER, *RELEASED_LATER],
    ),
    "one evaluation batch keeps its logits": (evaluated_trace(), evaluation(1), [*EVALUATED, *PASS, "+L4", "-I3"]),
    "gathered logits are copied beside what they come from": (
        evaluated_trace(),
        evaluation(3),
        [
            *EVALUATED,
            *[*PASS, "+L4", "-I3"],  # logits of the first batch are the first that are gathered
            *[*PASS, "+L4", "+L8", "-L4", "-I3"],
            *[*PASS, "-L4", "+L4", "+L12", "-L8", "-I3"],  # the second batch's logits lived on through the third
        ],
    ),
    "logits that stay a list lie there once": (
        evaluated_trace(),
        evaluation(4, eval_do_concat_batches=False),
        [
            *EVALUATED,
            *[*PASS, "+L4", "-I3"] * 2,
            *["+I3", "+L4", "-I3"],  # a pass that repeats the second is not played
            *[*PASS, "+L4", "-I3"],
        ],
    ),
    "evaluation without logits gathers nothing": (
        evaluated_trace(gathers=False),
        evaluation(4),
        [*EVALUATED, *PASS, "-I3", *PASS, "-I3", "+I3", "-I3", *PASS, "-I3"],
    ),
    "no evaluation": (evaluated_trace(), plan(**NOTHING), EVALUATED),
}


@pytest.mark.parametrize("name", TIMELINES)
def test_timelines_by_hand(name: str) -> None:
    trace, steps, expected = TIMELINES[name]
    found, timeline = played(trace, steps)
    assert timeline[: len(expected)] == expected
    if len(timeline) == len(expected):
        assert found.peak_allocated == max(sums(timeline)) * BLOCK
    else:  # the first step of three alone
        assert timeline.count("+G10") == 3


@pytest.mark.parametrize("stretches", [1, 2])
@pytest.mark.parametrize("is_manual", [False, True])
def test_the_trainer_and_each_stretch_of_loading_empty_the_cache(is_manual: bool, stretches: int) -> None:
    """A block of 40 MiB is freed at once; a segment of 2 MiB stays for the weight."""
    trace = accumulating_trace(micro_batches=1)
    block = ("block", 40 * 2**20), ("block", -40 * 2**20)
    trace.loading = ((*block, (trace.weights[0], 10 * BLOCK)), ())[:stretches]
    found, timeline = played(trace, plan(**NOTHING, loop="manual" if is_manual else "trainer"))
    assert timeline[:3] == [f"+T{40 * 2048}", f"-T{40 * 2048}", "+W10"]
    kept = 40 * 2**20 if is_manual and stretches == 1 else 0
    assert found.timeline.reserved[3] == kept + 2 * 2**20
    assert found.peak_reserved == 42 * 2**20


def large_trace() -> StepTrace:
    """Return a step whose forward pass needs two pieces of 20 MiB for a moment, and whose backward pass one of 50."""
    script, mib = Script(), 2**20 // BLOCK
    trace = StepTrace(script.tracker, weights=(), inputs=())
    script.freed(*(script.allocated(20 * mib), script.allocated(20 * mib)))
    forward_end = script.now
    script.freed(script.allocated(50 * mib))
    trace.micro_batches.append(RecordedPass(0, forward_end, script.now, logits_event=forward_end))
    return trace


def test_emptying_the_cache_lowers_reserved_bytes() -> None:
    kept, _ = played(large_trace(), plan(**NOTHING))
    emptied, _ = played(large_trace(), plan(**NOTHING, torch_empty_cache_steps=1))
    assert kept.peak_allocated == emptied.peak_allocated == 50 * 2**20
    assert (kept.peak_reserved, emptied.peak_reserved) == (90 * 2**20, 50 * 2**20)


def test_at_its_limit_the_allocator_gives_back_or_fails() -> None:
    tight = CachingAllocator(limit_bytes=64 * 2**20)
    found, _ = played(large_trace(), plan(**NOTHING), tight)
    assert (tight.retries, found.retries, found.peak_reserved) == (1, (1, 0), 50 * 2**20)
    with pytest.raises(AllocationError):
        replay(large_trace(), plan(**NOTHING), CachingAllocator(limit_bytes=49 * 2**20))
