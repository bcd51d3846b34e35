"""The replay of a recorded step, against timelines written out by hand: what is allocated, what for, in which order.

Sizes are in blocks of 512 bytes, the allocator's smallest, so that nothing is rounded.
"""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from hf_memopt.memory.allocator import Replayed, ReplayPlan
from hf_memopt.memory.allocator.caching_allocator import AllocationError, CachingAllocator
from hf_memopt.memory.allocator.replay import replay
from hf_memopt.memory.optimizers import OptimizerMemory
from hf_memopt.memory.recording import RecordedPass, StepTrace
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import COMPONENTS, StorageTracker

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
    usual = {
        "optimizer": OPTIMIZER,
        "clipping": (BLOCK, 2 * BLOCK),
        "micro_batches": 1,
        "workspaces": (8 * BLOCK, 9 * BLOCK),
    }
    names = {item.name for item in fields(ReplayPlan)}
    settings = StepSettings(**{name: value for name, value in changed.items() if name not in names})
    return ReplayPlan(settings, **{**usual, **{name: value for name, value in changed.items() if name in names}})


def played(trace: StepTrace, plan: ReplayPlan, allocator: CachingAllocator | None = None) -> tuple[Replayed, list[str]]:
    """Return the replay and its timeline as signed components in blocks, having checked what holds for every replay."""
    found = replay(trace, plan, CachingAllocator() if allocator is None else allocator)
    table, reserved = found.timeline.components, found.timeline.reserved
    totals = table.sum(axis=1)
    peak = int(np.where(reserved == reserved.max(), totals, -1).argmax())  # the fullest of these moments
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


# ---- Steps and accumulation -----------------------------------------------------------------------------------------


def test_three_steps_of_one_micro_batch() -> None:
    found, timeline = played(accumulating_trace(micro_batches=1), plan())
    first = ["+I2", "+C8", *FORWARD, "+C9", *BACKWARD, *FIRST_STEP]
    later = ["+I2", "-I2", *FORWARD, *BACKWARD, *STEP]
    assert timeline == [*LOAD, *first, *later, *later]
    assert found.peak_allocated == max(sums(timeline)) * BLOCK == 96 * BLOCK
    assert found.components == {
        "weights": 10 * BLOCK,
        "gradients": 10 * BLOCK,
        "optimizer state": 40 * BLOCK,
        "activations": 0,
        "logits and loss": 0,
        "temporaries": 17 * BLOCK,
        "workspace": 17 * BLOCK,
        "inputs": 2 * BLOCK,
    }
    assert (found.phase, found.module) == ("optimizer", "")


def test_phases_and_steps_of_the_timeline() -> None:
    found, timeline = played(accumulating_trace(micro_batches=1), plan())
    names = [name for _, name in found.timeline.phases]
    assert names == ["load", *["forward", "forward", "backward", "optimizer"] * 3]
    starts = {name: [start for start, other in found.timeline.phases if other == name] for name in names}
    assert [timeline[start] for start in starts["backward"]] == ["+C9", "+L4", "+L4"]
    assert [timeline[start] for start in starts["optimizer"]] == ["+T1"] * 3
    assert [timeline[start] for start in starts["forward"][::2]] == ["+I2"] * 3
    assert [(timeline[start], step) for start, step in found.timeline.steps] == [("+I2", 1), ("+I2", 2), ("+I2", 3)]


def test_a_hand_written_loop_holds_logits_and_loss_until_the_next_forward_pass_is_over() -> None:
    _, timeline = played(accumulating_trace(micro_batches=1), plan(**NOTHING, loop="manual"))
    held = ["-L4", "-L1"]
    first = ["+I2", *FORWARD, "+L4", "+G10", "-L4", "+T6", "-A5", "-T6", "-G10"]
    later = ["+I2", "-I2", *FORWARD, *held, "+L4", "+G10", "-L4", "+T6", "-A5", "-T6", "-G10"]
    assert timeline == [*LOAD, *first, *later, *later]


def test_a_step_function_frees_logits_and_loss_when_it_returns() -> None:
    _, timeline = played(accumulating_trace(micro_batches=1), plan(**NOTHING, loop="function"))
    step = [*FORWARD, "+L4", "+G10", "-L4", "+T6", "-A5", "-T6", "-G10", "-L4", "-L1"]
    assert timeline == [*LOAD, "+I2", *step, *(2 * ["+I2", "-I2", *step])]


def test_a_step_function_of_each_accumulation_step_frees_them_before_the_next() -> None:
    _, timeline = played(accumulating_trace(), plan(**NOTHING, gradient_accumulation_steps=2, loop="function"))
    first = ["+I2", *FORWARD, "+L4", "+G10", "-L4", "+T6", "-A5", "-T6", "-L4", "-L1"]
    second = [*FORWARD, "+L4", "+T10", "-L4", "-T10", "+T6", "-A5", "-T6", "-G10", "-L4", "-L1"]
    assert timeline[: len([*LOAD, *first, *second])] == [*LOAD, *first, *second]


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


def test_kept_gradients_are_added_to_from_the_second_step_on() -> None:
    _, timeline = played(accumulating_trace(micro_batches=2), plan(**NOTHING, zero_grad_to_none=False))
    later = ["+I2", "-I2", *FORWARD, *BACKWARD_ADDING]
    assert timeline == [*LOAD, "+I2", *FORWARD, *BACKWARD, *later, *later]


@pytest.mark.parametrize("cut", [{"gradient_accumulation_steps": 2}, {"micro_batches": 2}], ids=["accumulated", "cut"])
def test_two_micro_batches_add_gradients(cut: dict[str, int]) -> None:
    inputs = ["+I2"] * cut.get("gradient_accumulation_steps", 1)
    found, timeline = played(accumulating_trace(), plan(**cut))
    second = [*FORWARD, *BACKWARD_ADDING]
    first_step = [*inputs, "+C8", *FORWARD, "+C9", *BACKWARD, *second, *FIRST_STEP]
    later = [*inputs, *("-I2" for _ in inputs), *FORWARD, *BACKWARD, *second, *STEP]
    assert timeline == [*LOAD, *first_step, *later, *later]
    assert found.peak_allocated == max(sums(timeline)) * BLOCK


@pytest.mark.parametrize(
    "cut",
    [{"gradient_accumulation_steps": 5}, {"micro_batches": 5}, {"gradient_accumulation_steps": 3, "micro_batches": 4}],
)
def test_further_micro_batches_repeat_the_second_and_hold_their_inputs(cut: dict[str, int]) -> None:
    _, timeline = played(accumulating_trace(), plan(**cut))
    inputs = ["+I2"] * cut.get("gradient_accumulation_steps", 1)
    first = [*inputs, "+C8", *FORWARD, "+C9", *BACKWARD, *[*FORWARD, *BACKWARD_ADDING] * 2, *FIRST_STEP]
    assert timeline[: 1 + len(first)] == [*LOAD, *first]
    assert sum(event == "+G10" for event in timeline) == 3


def shorter_trace() -> StepTrace:
    """Return ``accumulating_trace()`` for a shorter batch: every storage but weight and gradient is a block smaller."""
    trace = accumulating_trace()
    tracker = trace.tracker
    kept = {*trace.weights, *(number for number, size in enumerate(tracker.sizes) if size == 10 * BLOCK)}
    tracker.sizes[:] = [size if number in kept else size - BLOCK for number, size in enumerate(tracker.sizes)]
    tracker.events[:] = [
        (number, tracker.sizes[number] if delta > 0 else -tracker.sizes[number]) for number, delta in tracker.events
    ]
    return trace


def test_a_run_over_two_recordings() -> None:
    """The longer batch first and the shorter one second, then the other way round, then the shorter one alone."""
    allocator = CachingAllocator()
    order = ((0, 1), (1, 0), (1,))
    found = replay(
        accumulating_trace(), plan(**NOTHING, gradient_accumulation_steps=2, order=order), allocator, [shorter_trace()]
    )
    changes = np.diff(found.timeline.components.sum(axis=1), prepend=0) // BLOCK
    long, short = [5, 3, -3, 4, 1], [4, 2, -2, 3]  # the loss of one block is none in the shorter recording
    backward, backward_short = [4, 10, -4, 6, -5, -6, -4, -1], [3, 10, -3, 5, -4, -5, -3]
    adding, adding_short = [4, 10, -4, -10, 6, -5, -6, -4, -1], [3, 10, -3, -10, 5, -4, -5, -3]
    assert changes.tolist() == [
        *[10, 2, 1, *long, *backward, *short, *adding_short, -10],
        *[1, 2, -2, -1, *short, *backward_short, *long, *adding, -10],
        *[1, -1, -2, *short, *backward_short, -10],
    ]
    assert found.peak_reserved == allocator.peak_reserved == 2**21
    assert [step for _, step in found.timeline.steps] == [1, 2, 3]


def test_accumulation_costs_the_inputs_and_the_gradient_that_is_added() -> None:
    one, _ = played(accumulating_trace(micro_batches=1), plan(optimizer=OptimizerMemory((), 0, (), ()), clipping=()))
    five, _ = played(
        accumulating_trace(), plan(optimizer=OptimizerMemory((), 0, (), ()), clipping=(), gradient_accumulation_steps=5)
    )
    assert one.peak_allocated == (10 + 17 + 2 + 5 + 4 + 1 + 10 + 6) * BLOCK
    assert five.peak_allocated == (10 + 17 + 5 * 2 + 5 + 4 + 1 + 10 + 4 + 10) * BLOCK  # beside the logits' gradient


def test_temporaries_of_the_first_step_may_be_the_peak() -> None:
    first = OptimizerMemory(state=(), host_state_bytes=0, step=(), first_step=((70 * BLOCK,), (30 * BLOCK,)))
    found, timeline = played(accumulating_trace(micro_batches=1), plan(optimizer=first, clipping=()))
    assert timeline.count("+T70") == timeline.count("+T30") == 1
    assert timeline[timeline.index("+T70") :][:5] == ["+T70", "-T70", "+T30", "-T30", "-G10"]
    assert found.components["temporaries"] == 70 * BLOCK


def test_one_workspace_and_none() -> None:
    _, one = played(accumulating_trace(micro_batches=1), plan(workspaces=(8 * BLOCK,)))
    _, none = played(accumulating_trace(micro_batches=1), plan(workspaces=()))
    assert [event for event in one if event[1] == "C"] == ["+C8"]
    assert [event for event in none if event[1] == "C"] == []
    assert [event for event in one if event[1] != "C"] == none


def test_storages_without_bytes_take_no_event() -> None:
    script = Script()
    weight = script.allocated(0)
    empty = script.allocated(0)
    script.freed(empty)
    trace = StepTrace(script.tracker, weights=(weight,), inputs=())
    trace.micro_batches.append(RecordedPass(1, 2, 3, logits_event=2))
    found = replay(trace, plan(**NOTHING), CachingAllocator())
    assert (found.peak_allocated, found.peak_reserved, found.module) == (0, 0, "")
    assert found.components == dict.fromkeys(COMPONENTS, 0)
    assert found.timeline.components.shape == (0, len(COMPONENTS))


def test_sizes_count_as_the_allocator_rounds_them() -> None:
    script = Script()
    weight = script.allocated(1)
    script.tracker.sizes[weight] = 100
    trace = StepTrace(script.tracker, weights=(weight,), inputs=())
    trace.micro_batches.append(RecordedPass(1, 1, 1, logits_event=1))
    found, _ = played(trace, plan(**NOTHING))
    assert (found.peak_allocated, found.peak_reserved) == (512, 2 * 2**20)


# ---- What bytes are for ---------------------------------------------------------------------------------------------


def test_the_module_at_the_peak_is_that_of_the_storage_that_made_it() -> None:
    nothing = OptimizerMemory((), 0, (), ())
    found, _ = played(accumulating_trace(micro_batches=1, module="head"), plan(optimizer=nothing, clipping=()))
    assert (found.phase, found.module) == ("backward", "head")


def test_recomputed_activations_count_as_activations() -> None:
    script = Script()
    trace = StepTrace(script.tracker, weights=(), inputs=())
    kept = script.allocated(5)
    forward_end = script.now
    begin = script.now
    again, within = script.allocated(20), script.allocated(30)
    script.freed(within)
    script.tracker.recomputed.append((begin, script.now))
    after = script.allocated(40, sequence=1)
    script.freed(after, again, kept)
    trace.micro_batches.append(RecordedPass(0, forward_end, script.now, logits_event=forward_end))
    _, timeline = played(trace, plan(**NOTHING))
    assert timeline == ["+A5", "+A20", "+T30", "-T30", "+T40", "-T40", "-A20", "-A5"] * 3


def test_two_stretches_of_recomputation() -> None:
    script = Script()
    trace = StepTrace(script.tracker, weights=(), inputs=())
    forward_end = script.now
    for blocks in (20, 30):
        begin = script.now
        again = script.allocated(blocks)
        script.tracker.recomputed.append((begin, script.now))
        product = script.allocated(1)
        script.freed(product, again)
    trace.micro_batches.append(RecordedPass(0, forward_end, script.now, logits_event=forward_end))
    _, timeline = played(trace, plan(**NOTHING))
    assert timeline == ["+A20", "+T1", "-T1", "-A20", "+A30", "+T1", "-T1", "-A30"] * 3


def test_a_cache_of_the_model_is_allocated_once_and_stays() -> None:
    script = Script()
    trace = StepTrace(script.tracker, weights=(), inputs=())
    for index in range(2):
        start = script.now
        if not index:
            script.allocated(50)  # nothing frees it
        activation = script.allocated(5)
        forward_end = script.now
        script.freed(activation)
        trace.micro_batches.append(RecordedPass(start, forward_end, script.now, logits_event=forward_end))
    nothing = plan(**NOTHING, gradient_accumulation_steps=2)
    _, timeline = played(trace, nothing)
    assert timeline == ["+A50", *["+A5", "-A5"] * 6]


# ---- Gradient release -----------------------------------------------------------------------------------------------


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


def test_released_gradients_step_within_the_backward_pass() -> None:
    found, timeline = played(releasing_trace(), plan(optimizer=ALONE, clipping=()))
    first = ["+G20", "+S80", "+T6", "-T6", "-G20", "+G10", "+S40", "+T3", "-T3", "+T4", "-T4", "-G10", "-A5"]
    later = ["+A5", "+G20", "+T6", "-T6", "-G20", "+G10", "+T3", "-T3", "-G10", "-A5"]
    assert timeline == ["+W10", "+W20", "+C8", "+A5", "+C9", *first, *later, *later]
    assert "optimizer" not in [name for _, name in found.timeline.phases]
    assert found.peak_allocated == (30 + 17 + 120 + 5 + 20 + 6) * BLOCK
    assert (found.phase, found.components["gradients"]) == ("backward", 20 * BLOCK)


def test_state_is_allocated_once_where_every_micro_batch_steps() -> None:
    _, timeline = played(
        releasing_trace(micro_batches=2), plan(optimizer=ALONE, clipping=(), gradient_accumulation_steps=2)
    )
    assert [event for event in timeline if event[1] == "S"] == ["+S80", "+S40"]
    assert timeline.count("+G20") == timeline.count("-G20") == 6


# ---- Evaluation -----------------------------------------------------------------------------------------------------


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


def evaluated(eval_batches: int, *, gathers: bool = True) -> tuple[Replayed, list[str]]:
    nothing = plan(**NOTHING, eval_batch_size=1 if eval_batches else None, eval_batches=max(eval_batches, 1))
    found, timeline = played(evaluated_trace(gathers=gathers), nothing)
    training = ["+W10", "+I2", "+I2", "-I2", "+I2", "-I2"]
    assert timeline[: len(training)] == training
    return found, timeline[len(training) :]


PASS = ["+T6", "+L4", "-T6", "-L4"]


def test_one_evaluation_batch_keeps_its_logits() -> None:
    found, timeline = evaluated(1)
    assert timeline == ["+I3", *PASS, "+L4", "-I3"]
    assert found.timeline.phases[-1][1] == found.phase == "evaluation"
    assert found.peak_allocated == (10 + 2 + 3 + 6 + 4) * BLOCK


def test_gathered_logits_are_copied_beside_what_they_come_from() -> None:
    found, timeline = evaluated(3)
    assert timeline == [
        *["+I3", *PASS, "+L4", "-I3"],  # logits of the first batch are the first that are gathered
        *["+I3", *PASS, "+L4", "+L8", "-L4", "-I3"],
        *["+I3", *PASS, "-L4", "+L4", "+L12", "-L8", "-I3"],  # the second batch's logits lived on through the third
    ]
    assert found.components["logits and loss"] == (4 + 8 + 12) * BLOCK


@pytest.mark.parametrize("eval_batches", [2, 5, 9])
def test_at_the_end_the_gathered_logits_lie_twice(eval_batches: int) -> None:
    found, timeline = evaluated(eval_batches)
    assert timeline.count("+T6") == 3 if eval_batches > 2 else 2
    assert found.peak_allocated == (10 + 2 + 3 + 2 * 4 * eval_batches) * BLOCK
    assert sums(timeline)[-1] == 4 * eval_batches + 4


def test_logits_that_stay_a_list_lie_there_once() -> None:
    found, timeline = played(
        evaluated_trace(), plan(**NOTHING, eval_batch_size=1, eval_batches=4, eval_do_concat_batches=False)
    )
    assert timeline[6:] == [
        *["+I3", *PASS, "+L4", "-I3"] * 2,
        *["+I3", "+L4", "-I3"],  # a pass that repeats the second is not played
        *["+I3", *PASS, "+L4", "-I3"],
    ]
    assert found.peak_allocated == (10 + 2 + 3 + 3 * 4 + 6 + 4) * BLOCK


def test_evaluation_without_logits_gathers_nothing() -> None:
    found, timeline = evaluated(4, gathers=False)
    assert timeline == ["+I3", *PASS, "-I3", "+I3", *PASS, "-I3", "+I3", "-I3", "+I3", *PASS, "-I3"]
    assert found.peak_allocated == (10 + 2 + 3 + 6 + 4) * BLOCK


def test_no_evaluation_batches_no_evaluation() -> None:
    found, timeline = evaluated(0)
    assert timeline == []
    assert found.timeline.phases[-1][1] == "optimizer"


# ---- The allocator --------------------------------------------------------------------------------------------------


class CountingAllocator(CachingAllocator):
    """Counts how often its cache was emptied."""

    emptied = 0

    def empty_cache(self) -> None:
        self.emptied += 1
        super().empty_cache()


@pytest.mark.parametrize(("steps", "expected"), [(None, 0), (1, 6), (2, 4), (3, 2)])
def test_the_cache_is_emptied_before_backward_passes_of_every_such_step(steps: int | None, expected: int) -> None:
    allocator = CountingAllocator()
    played(accumulating_trace(), plan(gradient_accumulation_steps=2, torch_empty_cache_steps=steps), allocator)
    assert allocator.emptied == expected


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


def test_retries_of_the_evaluation_are_counted_apart() -> None:
    mib = 2**20 // BLOCK
    script = Script()
    trace = StepTrace(script.tracker, weights=(), inputs=())
    script.freed(script.allocated(50 * mib))
    trace.micro_batches.append(RecordedPass(0, script.now, script.now, logits_event=script.now))
    start = script.now
    script.freed(script.allocated(60 * mib))
    trace.evaluation = RecordedPass(start, script.now, script.now, logits_event=script.now)
    found, _ = played(trace, plan(**NOTHING, eval_batch_size=1), CachingAllocator(limit_bytes=64 * 2**20))
    assert found.retries == (0, 1)


def test_only_the_last_accumulation_step_reduces_under_fsdp2() -> None:
    """Of each kind two passes are recorded: the first, and one that adds to its gradients."""
    shared = plan(world_size=2, strategy="fsdp2")
    assert shared.passes((0,), 1, adds=False) == ([], [(0, 0)])
    assert shared.passes((0, 1), 1, adds=False) == ([(0, 0)], [(1, 1)])
    assert shared.passes((0, 1, 0), 2, adds=False) == ([(0, 0), (0, 1), (1, 1), (1, 1)], [(0, 2), (0, 3)])
    assert shared.passes((0,), 2, adds=True) == ([], [(0, 1), (0, 1)])
    assert plan().passes((0, 1), 2, adds=False) == ([], [(0, 0), (0, 1), (1, 1), (1, 1)])
