"""Replay a recorded step through the allocator: several optimizer steps, accumulation, the optimizer, evaluation.

A step is recorded once and replayed three times: the first has no optimizer state before its end, the second has it,
the third shows the fragmentation that they leave. Of more than three forward and backward passes three are replayed,
since every further one repeats the third; of many evaluation batches the first two and the last, while the outputs of
all are gathered. A run over batches of differing lengths has a recording of each length, and every batch is replayed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_memopt.prediction.memory.allocator.caching_allocator import (
    LARGEST_SMALL_BYTES,
    AllocationError,
    CachingAllocator,
)
from hf_memopt.prediction.memory.allocator.planned_replay import ReplayPlan
from hf_memopt.prediction.memory.optimizers import OptimizerMemory
from hf_memopt.prediction.memory.recording import RecordedPass, StepTrace
from hf_memopt.prediction.memory.settings import Fragmentation, LengthPlan
from hf_memopt.prediction.memory.tracking import COMPONENTS, Timeline
from hf_memopt.state_chunks import SMALLEST_BYTES

if TYPE_CHECKING:
    from hf_memopt.training.devices import Gpu

_WEIGHTS, _GRADIENTS, _STATE, _ACTIVATIONS, _LOGITS, _TEMPORARIES, _WORKSPACE, _INPUTS = range(len(COMPONENTS))
_STEPS = 3
_PASSES = 3
_KEYS = 2**32  # of the storages of one recording


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: the peaks in bytes, and the moment that decides the total: what it consists of, and when.

    That is ``Timeline.deciding_event``. ``retries`` counts how often the allocator
    emptied its cache at its limit: in the training steps, in the evaluation.
    """

    peak_allocated: int
    peak_reserved: int
    components: dict[str, int]
    phase: str
    module: str
    timeline: Timeline
    retries: tuple[int, int] = (0, 0)


def replay(
    trace: StepTrace, plan: ReplayPlan, allocator: CachingAllocator, others: Sequence[StepTrace] = ()
) -> Replayed:
    """Run loading, the optimizer steps and an evaluation through ``allocator``.

    ``others`` are recordings of the same model with batches of other shapes; ``plan.order`` counts from ``trace`` on.
    """
    run = _Run((trace, *others), plan, allocator)
    run.load()
    for step, batches in enumerate(plan.order or ((0,) * plan.settings.gradient_accumulation_steps,) * _STEPS):
        run.step(step, batches)
    run.use(0)
    run.retries_in_steps = allocator.retries
    if trace.evaluation is not None and plan.eval_batches:
        run.evaluation(trace.evaluation)
    return run.result()


# ---- On a GPU of a given size


def replay_on_gpu(trace: StepTrace, plan: ReplayPlan, gpu: Gpu | None, others: Sequence[StepTrace]) -> Replayed:
    """Return the replay on a GPU of this size: at its limit the allocator empties its cache.

    Where even that does not help, the run would end in an out-of-memory error. Then the limit grows until the replay
    ends, from what the tensors hold at their peak in steps of 5 %. Without a limit the allocator would keep every block
    that it ever had, and the estimate would be a multiple of what the run needs.
    """
    expandable = plan.settings.expandable_segments
    unlimited = replay(trace, plan, CachingAllocator(expandable), others)
    limit_bytes = None if gpu is None else max(gpu.usable_bytes - (gpu.context_bytes or 0), 0)
    if limit_bytes is None or unlimited.peak_reserved <= limit_bytes:
        return unlimited
    tried_bytes = limit_bytes
    if unlimited.peak_allocated > limit_bytes:
        tried_bytes = unlimited.peak_allocated + unlimited.peak_allocated // 20 + 1
    while tried_bytes < unlimited.peak_reserved:
        with suppress(AllocationError):
            return replay(trace, plan, CachingAllocator(expandable, tried_bytes), others)
        tried_bytes += tried_bytes // 20 + 1
    return unlimited


def fragmentation_of(
    trace: StepTrace,
    others: Sequence[StepTrace],
    plan: ReplayPlan,
    lengths: LengthPlan,
    replayed: Replayed,
) -> Fragmentation:
    """Return what the batches reserve with each kind of segments, and what the longest alone does."""

    def reserved_bytes(expandable_segments: bool, plan: ReplayPlan = plan) -> int:
        return replay(trace, plan, CachingAllocator(expandable_segments), others).peak_reserved

    expandable = plan.settings.expandable_segments
    own = reserved_bytes(expandable) if any(replayed.retries) else replayed.peak_reserved
    other = reserved_bytes(not expandable)
    return Fragmentation(
        batches=sum(map(len, lengths.steps)),
        lengths=lengths.lengths,
        recorded_lengths=len(lengths.recorded),
        reserved_bytes=other if expandable else own,
        reserved_expandable_bytes=own if expandable else other,
        reserved_longest_bytes=reserved_bytes(expandable, replace(plan, order=())),
    )


# ---- One replay


class _Recorded:
    """A recording as the replay needs it: its events by pass, under keys from ``first_key`` on."""

    @classmethod
    def of(cls, trace: StepTrace, first_key: int) -> _Recorded:
        """Return what an earlier replay made of a trace, which does not change once it is recorded."""
        if first_key not in trace.replayed:
            trace.replayed[first_key] = cls(trace, first_key)
        found: _Recorded = trace.replayed[first_key]
        return found

    def __init__(self, trace: StepTrace, first_key: int) -> None:
        self.tracker, self.evaluation = trace.tracker, trace.evaluation  # not the trace, which refers to this
        self.apart = {*trace.weights, *trace.inputs, *trace.evaluation_inputs}
        self.first_key = first_key
        self.gradients = frozenset(trace.gradients)
        self.freed_at = {number: event for event, (number, delta) in enumerate(trace.tracker.events) if delta < 0}
        self.passes = [self.classified(part) for part in trace.micro_batches]

    @cached_property
    def evaluated(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """The events of the evaluation that are replayed, up to the end of what it generates and after it."""
        part, tracker = self.evaluation, self.tracker
        assert part is not None
        numbers, deltas = np.array(tracker.events[part.start : part.end], np.int64).reshape(-1, 2).T
        lives = np.full(len(tracker.sizes), part.end)
        lives[list(self.freed_at)] = list(self.freed_at.values())
        lives -= np.array(tracker.allocated_at)
        first, end = (event - part.start for event in (part.computed.start, part.computed.stop))
        is_left_out = (lives[numbers] < part.computed.step) & (abs(deltas) <= LARGEST_SMALL_BYTES)
        is_left_out[: max(first, 0)] = is_left_out[max(end, 0) :] = False
        events = (np.flatnonzero(~is_left_out) + part.start).tolist()
        border = bisect_left(events, part.generation_end)
        return self.classified(part, events[:border]), self.classified(part, events[border:])

    def classified(self, part: RecordedPass, events: Iterable[int] | None = None) -> list[tuple[int, int, int]]:
        """Return events of a pass, by default all, as (key, delta, component); delta 0 for those of weights and inputs.

        Nothing says what a storage is for, so that follows from when it is allocated and freed. A gradient is what a
        parameter's ``grad`` held. In the forward pass, what is allocated after the model made its logits belongs to
        logits and loss; before that, what is still allocated when the backward pass starts is an activation, and what
        is not is a temporary. In the backward pass, what outlives the recomputation it was allocated in is an
        activation again, and what a node of the loss allocates belongs to logits and loss, by autograd's sequence
        numbers.
        """
        tracker, apart = self.tracker, self.apart
        stretches = iter([*tracker.recomputed, (2**63, 2**63)])
        begin, end = next(stretches)
        found = []
        for event in range(part.start, part.end) if events is None else events:
            number, delta = tracker.events[event]
            while event >= end:
                begin, end = next(stretches)
            if delta < 0 or number in apart:
                found.append((number + self.first_key, 0 if number in apart else delta, 0))
                continue
            freed = self.freed_at.get(number, part.end)
            if number in self.gradients:
                component = _GRADIENTS
            elif event < part.forward_end:
                lives_on = freed >= part.forward_end and part.end > part.forward_end
                component = _LOGITS if event >= part.logits_event else _ACTIVATIONS if lives_on else _TEMPORARIES
            elif event >= begin and freed >= end:
                component = _ACTIVATIONS
            else:
                component = _LOGITS if tracker.sequences[number] in part.logits_sequences else _TEMPORARIES
            found.append((number + self.first_key, delta, component))
        return found


class _Run:
    """The state of a replay: what is allocated, by component, and the timeline so far."""

    def __init__(self, traces: Sequence[StepTrace], plan: ReplayPlan, allocator: CachingAllocator) -> None:
        self.plan, self.allocator = plan, allocator
        self._alive: dict[Any, int] = {}  # the component of each key
        self._columns: list[int] = []
        self._deltas: list[int] = []
        self._reserved: list[int] = []
        self._phases: list[tuple[int, str]] = []
        self._steps: list[tuple[int, int]] = []
        self.retries_in_steps = 0
        self._keys: list[Any] = []  # of what each event allocates or frees
        self._held: list[Any] = []
        self._traces = [(trace, _Recorded.of(trace, index * _KEYS)) for index, trace in enumerate(traces)]
        self.use(0)

    def use(self, index: int) -> None:
        """Go on with this recording."""
        self.trace, self._recorded = self._traces[index]
        self._tracker = self.trace.tracker

    # ---- The allocator and the timeline -----------------------------------------------------------------------------

    def malloc(self, key: Any, size_bytes: int, component: int) -> None:
        self.play([(key, size_bytes, component)])

    def free(self, key: Any) -> None:
        self.play([(key, -1, 0)])

    def play(self, events: Iterable[tuple[Any, int, int]]) -> None:
        """Replay (key, delta, component): allocate what is not there yet, free what is.

        Nearly all of a replay's time is spent here, a hundred thousand events in each, so nothing is called that need
        not be.
        """
        alive, allocator = self._alive, self.allocator
        malloc, free = allocator.malloc, allocator.free
        note_component, note_delta, note_reserved = self._columns.append, self._deltas.append, self._reserved.append
        note_key = self._keys.append
        for key, delta, component in events:
            if delta < 0:
                if key not in alive:
                    continue
                note_component(alive.pop(key))
                note_delta(-free(key))
            elif delta and key not in alive:
                alive[key] = component
                note_component(component)
                note_delta(malloc(key, delta))
            else:
                continue
            note_key(key)
            note_reserved(allocator.reserved)

    def phase(self, name: str) -> None:
        self._phases.append((len(self._deltas), name))

    def load(self) -> None:
        """Load the weights; the Trainer empties the cache before its first step (``Accelerator.free_memory``)."""
        self.phase("load")
        trace, stays = self.trace, frozenset(self.trace.weights)
        for index, stretch in enumerate(trace.loading):
            if index:
                self.allocator.empty_cache()
            self.play((key, delta, _WEIGHTS if key in stays else _TEMPORARIES) for key, delta in stretch)
        self.play((number, self._tracker.sizes[number], _WEIGHTS) for number in trace.weights)
        if trace.loading and not self.plan.is_manual:
            self.allocator.empty_cache()

    # ---- Forward and backward passes --------------------------------------------------------------------------------

    def step(self, step: int, batches: Sequence[int]) -> None:
        """Replay one optimizer step, the first is 0, with these recordings as its accumulation steps."""
        plan = self.plan
        self._steps.append((len(self._deltas), step + 1))
        self.phase("forward")
        for batch, index in enumerate(batches):
            self.use(index)
            for number in self.trace.inputs if not plan.is_manual or batch == 0 else ():
                self.malloc(("input", step, batch, number), self._tracker.sizes[number], _INPUTS)
        for key in [key for key in self._alive if isinstance(key, tuple) and key[:2] == ("input", step - 1)]:
            self.free(key)
        self.use(batches[0])
        passes = plan.passes(
            batches, min(plan.micro_batches, _PASSES), adds=not plan.settings.zero_grad_to_none and step > 0
        )
        for index, which in passes if plan.order else passes[:_PASSES]:
            self._go_on_with(index)
            recorded = min(which, len(self.trace.micro_batches) - 1)
            self._pass(self.trace.micro_batches[recorded], self._recorded.passes[recorded], step)
        if not isinstance(plan.optimizer, Sequence):
            self.phase("optimizer")
            self._together("clip", plan.clipping)
            self._optimizer(plan.optimizer, "state", first=step == 0)
        first_key = self._recorded.first_key
        self.play(
            (number + first_key, -1, 0) for number in (self.trace.gradients if plan.settings.zero_grad_to_none else ())
        )
        if plan.settings.loop == "function":
            self._drop_held()

    def _go_on_with(self, index: int) -> None:
        """Go on with another recording, under whose keys the gradients are from then on."""
        before, first_key = self.trace, self._recorded.first_key
        self.use(index)
        if self.trace is not before:
            for number, own in zip(before.gradients, self.trace.gradients, strict=True):
                if first_key + number in self._alive:
                    self._rename(first_key + number, self._recorded.first_key + own)

    def _pass(self, part: RecordedPass, events: list[tuple[int, int, int]], step: int) -> None:
        if self.plan.settings.loop == "function":
            self._drop_held()  # of the accumulation step before
        self.phase("forward")
        start, border = part.start, part.forward_end - part.start
        products = self._tracker.first_products
        first = min(max(products[0], start), part.forward_end) - start  # cuBLAS allocates after the first product
        self.play(events[:first])
        self._workspace(0)
        self.play(events[first:border])
        self._drop_held()
        empty_cache_steps = self.plan.settings.torch_empty_cache_steps
        if empty_cache_steps is not None and step % empty_cache_steps == 0:
            self.allocator.empty_cache()
        self.phase("backward")
        stops = [(min(max(products[1], part.forward_end), part.end), -1), *(stop[:2] for stop in part.releases)]
        for event, parameter in sorted(stops, key=itemgetter(0)):
            self.play(events[border : event - start])
            border = event - start
            if parameter < 0:
                self._workspace(1)
            elif isinstance(self.plan.optimizer, Sequence):
                self._optimizer(self.plan.optimizer[parameter], ("state", parameter), first=step == 0)
        self.play(events[border:])
        self._forget(part)

    def _forget(self, part: RecordedPass) -> None:
        """Free what was freed after a recorded pass: loss and outputs. What was never freed is a cache of the model.

        A hand-written loop holds them; they get keys of their own, since the next pass allocates these numbers again.
        """
        recorded = self._recorded
        first, end = recorded.first_key, recorded.first_key + _KEYS
        for key in [key for key in self._alive if isinstance(key, int) and first <= key < end]:
            number = key - first
            between = recorded.freed_at.get(number, -1) >= part.end and self._tracker.allocated_at[number] >= part.start
            if between and number not in recorded.gradients:
                if self.plan.is_manual and part is not self.trace.evaluation:
                    self._hold(key)
                else:
                    self.free(key)

    def _hold(self, key: int) -> None:
        self._rename(key, ("held", key))
        self._held.append(("held", key))

    def _rename(self, key: Any, name: Any) -> None:
        self._alive[name] = self._alive.pop(key)
        self.allocator.rename(key, name)

    def _drop_held(self) -> None:
        for key in self._held:
            self.free(key)
        self._held = []

    def _workspace(self, thread: int) -> None:
        if thread < len(self.plan.workspaces) and ("workspace", thread) not in self._alive:
            self.malloc(("workspace", thread), self.plan.workspaces[thread], _WORKSPACE)

    # ---- Optimizer and evaluation -----------------------------------------------------------------------------------

    def _optimizer(self, memory: OptimizerMemory, key: Any, *, first: bool) -> None:
        if memory.chunks:
            self._visits(memory, first=first)
            return
        if first:
            # with gradient release a later pass of the first step has it already
            self.play(((key, index), size_bytes, _STATE) for index, size_bytes in enumerate(memory.state))
        for group in memory.first_step if first else memory.step:
            self._together("step", group)

    def _visits(self, memory: OptimizerMemory, *, first: bool) -> None:
        """Replay the chunks of a state that waits on the host: the next one comes when the last one has gone."""
        chunks = memory.alone if first else memory.chunks
        self._arrive(chunks[:1], 0)  # in the first step each parameter is a chunk, and makes its state
        for number, chunk in enumerate(chunks):
            self.play((("chunk", number - 1, index), -1, _STATE) for index in range(len(chunks[number - 1].state)))
            self._arrive(
                chunks[number : number + 1] if first else chunks[number + 1 : number + 2], number + (not first)
            )
            for group in chunk.first_step if first else chunk.step:
                self._together("step", group)
        self.play((("chunk", len(chunks) - 1, index), -1, _STATE) for index in range(len(chunks[-1].state)))

    def _arrive(self, chunks: Sequence[OptimizerMemory], number: int) -> None:
        for chunk in chunks:
            kinds = ("state" if size_bytes < SMALLEST_BYTES else "chunk" for size_bytes in chunk.state)
            self.play(
                ((kind, number, index), size_bytes, _STATE)
                for index, (kind, size_bytes) in enumerate(zip(kinds, chunk.state, strict=True))
            )

    def _together(self, name: str, sizes: tuple[int, ...]) -> None:
        self.play(((name, index), size_bytes, _TEMPORARIES) for index, size_bytes in enumerate(sizes))
        self.play(((name, index), -1, _TEMPORARIES) for index in range(len(sizes)))

    def evaluation(self, part: RecordedPass) -> None:
        """Replay evaluation batches whose outputs are gathered on the GPU, as the Trainer does.

        Concatenated: the outputs of the first batch are the first of the gathered ones; those of a later one are held,
        besides the tensor that they were copied into, until the next forward pass is over, as are the inputs of the
        last training step. As a list, each batch's outputs are held once.
        """
        generated, evaluated = self._recorded.evaluated
        sizes = [self._tracker.sizes[number] for number in part.outputs]
        last = self.plan.eval_batches - 1
        for batch in range(self.plan.eval_batches):
            for number in self.trace.evaluation_inputs:
                self.malloc(("evaluated", batch, number), self._tracker.sizes[number], _INPUTS)
            if batch < 2 or batch == last:
                if generated:
                    self.phase("generation")
                    self.play(generated)
                self.phase("evaluation")
                self.play(evaluated)
            self._drop_held()
            self._forget(part)
            self._gather(batch, sizes)
            self._forget(part)
            for number in self.trace.evaluation_inputs:
                self.free(("evaluated", batch, number))

    def _gather(self, batch: int, sizes: list[int]) -> None:
        if not self.plan.settings.eval_do_concat_batches:
            for index, size_bytes in enumerate(sizes):
                self.malloc(("output", batch, index), size_bytes, _LOGITS)
            return
        for index, size_bytes in enumerate(sizes):
            self.free(("output", batch - 1, index))
            self.malloc(("output", batch, index) if batch else ("gathered", 0, index), size_bytes, _LOGITS)
        if batch:
            for index, size_bytes in enumerate(sizes):
                self.malloc(("gathered", batch, index), (batch + 1) * size_bytes, _LOGITS)
            for index in range(len(sizes)):
                self.free(("gathered", batch - 1, index))

    # ---- The end ----------------------------------------------------------------------------------------------------

    def result(self) -> Replayed:
        """Return the peaks, what the deciding moment consists of, and the timeline."""
        changed, deltas = np.array(self._columns, np.int8), np.array(self._deltas, np.int64)
        reserved = np.array(self._reserved, np.int64)
        table = np.zeros((len(deltas), len(COMPONENTS)), np.int64)
        table[np.arange(len(deltas)), changed] = deltas
        timeline = Timeline(table.cumsum(axis=0), reserved, tuple(self._phases), tuple(self._steps))
        peak = timeline.deciding_event if deltas.size else 0
        phase = next((name for start, name in reversed(self._phases) if start <= peak), "load")
        module, key = "", self._keys[peak] if deltas.size else None
        if isinstance(key, int):
            self.use(key // _KEYS)
            module = self._tracker.module_of(key % _KEYS)
        return Replayed(
            peak_allocated=self.allocator.peak_allocated,
            peak_reserved=self.allocator.peak_reserved,
            components=timeline.parts_at(peak) if deltas.size else dict.fromkeys(COMPONENTS, 0),
            phase=phase,
            module=module,
            timeline=timeline,
            retries=(self.retries_in_steps, self.allocator.retries - self.retries_in_steps),
        )
