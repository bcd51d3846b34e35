"""Replay a recorded step through the allocator: several optimizer steps, accumulation, the optimizer, evaluation.

A step is recorded once and replayed three times: the first step has no optimizer state before its end, the second has
it, the third shows what fragmentation has left behind. Of more than three micro-batches three are replayed, for every
further one repeats the third; of many evaluation batches only the first two and the last run, the others gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_memopt.memory.allocator.caching_allocator import CachingAllocator
from hf_memopt.memory.optimizers.optimizer_memory import OptimizerMemory
from hf_memopt.memory.recording.step import MicroBatch, StepTrace
from hf_memopt.memory.timeline import COMPONENTS, Timeline

__all__ = ["ReplayPlan", "Replayed", "replay"]

_WEIGHTS, _GRADIENTS, _STATE, _ACTIVATIONS, _LOGITS, _TEMPORARIES, _WORKSPACE, _INPUTS = range(len(COMPONENTS))
_STEPS = 3
_MICRO_BATCHES = 3


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How the recorded parts follow each other.

    Attributes:
        optimizer: the optimizer's bytes; of each trainable parameter by itself with gradient release.
        clipping: temporaries of gradient clipping.
        batches: batches that the Trainer holds per optimizer step (the accumulation).
        pieces: pieces that each of them is cut into.
        workspaces: blocks that cuBLAS keeps for the forward thread, then for the backward thread.
        eval_batches: evaluation batches whose outputs gather on the card; 0 for no evaluation.
        eval_concat: whether they are concatenated at every batch, or stay a list.
        empty_cache_steps: steps between two returns of unused blocks to the driver, each before a backward pass; None
            for no return.
    """

    optimizer: OptimizerMemory | Sequence[OptimizerMemory]
    clipping: tuple[int, ...]
    batches: int
    pieces: int
    workspaces: tuple[int, ...]
    eval_batches: int = 0
    eval_concat: bool = True
    empty_cache_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the replay found: peaks in bytes, what stands at the allocated one, how often the cache had to be emptied.

    ``retries`` are those of the allocator at its limit: in the training steps, in the evaluation.
    """

    peak_allocated: int
    peak_reserved: int
    components: dict[str, int]
    phase: str
    module: str
    timeline: Timeline
    retries: tuple[int, int] = (0, 0)


def replay(trace: StepTrace, plan: ReplayPlan, allocator: CachingAllocator) -> Replayed:
    """Run loading, three optimizer steps and an evaluation through ``allocator``."""
    run = _Run(trace, plan, allocator)
    run.phase("load")
    for number in trace.weights:
        run.malloc(number, trace.tracker.sizes[number], _WEIGHTS)
    for step in range(_STEPS):
        run.step(step)
    run.retries_in_steps = allocator.retries
    if trace.evaluation is not None and plan.eval_batches:
        run.evaluation(trace.evaluation)
    return run.result()


class _Run:
    """The state of a replay: what is alive in the allocator, by component, and the timeline so far."""

    def __init__(self, trace: StepTrace, plan: ReplayPlan, allocator: CachingAllocator) -> None:
        self.trace, self.plan, self.allocator = trace, plan, allocator
        self._tracker = trace.tracker
        self._alive: dict[Any, tuple[int, int]] = {}
        self._columns: list[int] = []
        self._deltas: list[int] = []
        self._reserved: list[int] = []
        self._phases: list[tuple[int, str]] = []
        self._steps: list[tuple[int, int]] = []
        self.retries_in_steps = 0
        self._peak = 0
        self._peak_event = 0
        self._peak_key: Any = None
        self._gradients = frozenset(trace.gradients)
        self._died = {number: event for event, (number, delta) in enumerate(self._tracker.events) if delta < 0}
        self._micro_batches = [self._classified(part) for part in trace.micro_batches]

    # ---- The allocator and the timeline -----------------------------------------------------------------------------

    def malloc(self, key: Any, size_bytes: int, component: int) -> None:
        if not size_bytes:
            return
        before = self.allocator.allocated
        self.allocator.malloc(key, size_bytes)
        block_bytes = self.allocator.allocated - before
        self._alive[key] = (component, block_bytes)
        self._note(component, block_bytes)
        if self.allocator.allocated > self._peak:
            self._peak, self._peak_event, self._peak_key = self.allocator.allocated, len(self._deltas) - 1, key

    def free(self, key: Any) -> None:
        component, block_bytes = self._alive.pop(key, (0, 0))
        if block_bytes:
            self.allocator.free(key)
            self._note(component, -block_bytes)

    def _note(self, component: int, delta: int) -> None:
        self._columns.append(component)
        self._deltas.append(delta)
        self._reserved.append(self.allocator.reserved)

    def phase(self, name: str) -> None:
        self._phases.append((len(self._deltas), name))

    # ---- Micro-batches ----------------------------------------------------------------------------------------------

    def _classified(self, part: MicroBatch) -> list[tuple[int, int, int]]:
        """Return the events of a part as (storage, delta, component); delta 0 for those of weights and inputs."""
        trace, tracker = self.trace, self._tracker
        apart = {*trace.weights, *trace.inputs, *trace.evaluation_inputs}
        stretches = iter([*tracker.recomputed, (2**63, 2**63)])
        begin, end = next(stretches)
        found = []
        for event in range(part.start, part.end):
            number, delta = tracker.events[event]
            while event >= end:
                begin, end = next(stretches)
            if delta < 0 or number in apart:
                found.append((number, 0 if number in apart else delta, 0))
                continue
            died = self._died.get(number, part.end)
            if number in self._gradients:
                component = _GRADIENTS
            elif event < part.forward_end:
                lives_on = died >= part.forward_end and part.end > part.forward_end
                component = _LOGITS if event >= part.logits_event else _ACTIVATIONS if lives_on else _TEMPORARIES
            elif event >= begin and died >= end:
                component = _ACTIVATIONS
            else:
                component = _LOGITS if tracker.sequences[number] in part.logits_sequences else _TEMPORARIES
            found.append((number, delta, component))
        return found

    def _play(self, events: Iterable[tuple[int, int, int]]) -> None:
        alive, malloc, free = self._alive, self.malloc, self.free
        for number, delta, component in events:
            if delta < 0:
                free(number)
            elif delta and number not in alive:
                malloc(number, delta, component)

    def step(self, step: int) -> None:
        """Replay one optimizer step; the first is 0."""
        trace, plan = self.trace, self.plan
        self._steps.append((len(self._deltas), step + 1))
        self.phase("forward")
        for batch in range(plan.batches):
            for number in trace.inputs:
                self.malloc(("input", step, batch, number), self._tracker.sizes[number], _INPUTS)
        for key in [key for key in self._alive if isinstance(key, tuple) and key[:2] == ("input", step - 1)]:
            self.free(key)
        for index in range(min(plan.batches * plan.pieces, _MICRO_BATCHES)):
            recorded = min(index, len(trace.micro_batches) - 1)
            self._micro_batch(trace.micro_batches[recorded], self._micro_batches[recorded], step)
        if not isinstance(plan.optimizer, Sequence):
            self.phase("optimizer")
            self._together("clip", plan.clipping)
            self._optimizer(plan.optimizer, "state", first=step == 0)
        for number in trace.gradients:
            self.free(number)

    def _micro_batch(self, part: MicroBatch, events: list[tuple[int, int, int]], step: int) -> None:
        self.phase("forward")
        self._workspace(0)
        border = part.forward_end - part.start
        self._play(events[:border])
        if self.plan.empty_cache_steps is not None and step % self.plan.empty_cache_steps == 0:
            self.allocator.empty_cache()
        self.phase("backward")
        self._workspace(1)
        for event, parameter, _ in part.releases:
            self._play(events[border : event - part.start])
            border = event - part.start
            if isinstance(self.plan.optimizer, Sequence):
                self._optimizer(self.plan.optimizer[parameter], ("state", parameter), first=step == 0)
        self._play(events[border:])
        self._forget(part)

    def _forget(self, part: MicroBatch) -> None:
        """Free what died between the recorded parts: loss and outputs. What never died is a cache of the model."""
        for key in [key for key in self._alive if isinstance(key, int)]:
            between = self._died.get(key, -1) >= part.end and self._tracker.births[key] >= part.start
            if between and key not in self._gradients:
                self.free(key)

    def _workspace(self, thread: int) -> None:
        if thread < len(self.plan.workspaces) and ("workspace", thread) not in self._alive:
            self.malloc(("workspace", thread), self.plan.workspaces[thread], _WORKSPACE)

    # ---- Optimizer and evaluation -----------------------------------------------------------------------------------

    def _optimizer(self, memory: OptimizerMemory, key: Any, *, first: bool) -> None:
        if first:
            for index, size_bytes in enumerate(memory.state):
                if (key, index) not in self._alive:  # a later micro-batch of the step, where each of them steps
                    self.malloc((key, index), size_bytes, _STATE)
        for group in memory.first_step if first else memory.step:
            self._together("step", group)

    def _together(self, name: str, sizes: tuple[int, ...]) -> None:
        for index, size_bytes in enumerate(sizes):
            self.malloc((name, index), size_bytes, _TEMPORARIES)
        for index in range(len(sizes)):
            self.free((name, index))

    def evaluation(self, part: MicroBatch) -> None:
        """Replay evaluation batches whose outputs gather on the card, as the Trainer does.

        Concatenated: the outputs of the first batch are the first of the gathered ones; those of a later one are held
        beside what they were concatenated into until the next forward pass is over, as are the inputs of the last
        training step. As a list, each batch's outputs lie there once.
        """
        self.phase("evaluation")
        events = self._classified(part)
        sizes = [self._tracker.sizes[number] for number in part.outputs]
        last = self.plan.eval_batches - 1
        for batch in range(self.plan.eval_batches):
            for number in self.trace.evaluation_inputs:
                self.malloc(("evaluated", batch, number), self._tracker.sizes[number], _INPUTS)
            if batch < 2 or batch == last:
                self._play(events)
            self._forget(part)
            self._gather(batch, sizes)
            for number in self.trace.evaluation_inputs:
                self.free(("evaluated", batch, number))

    def _gather(self, batch: int, sizes: list[int]) -> None:
        if not self.plan.eval_concat:
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
        """Return peaks, what stands at the allocated one, and the timeline."""
        table = np.zeros((len(self._deltas), len(COMPONENTS)), np.int64)
        table[np.arange(len(self._deltas)), self._columns] = self._deltas
        table = np.cumsum(table, axis=0)
        at_peak = table[self._peak_event] if len(table) else np.zeros(len(COMPONENTS), np.int64)
        phase = next((name for start, name in reversed(self._phases) if start <= self._peak_event), "load")
        module = self._tracker.module_of(self._peak_key) if isinstance(self._peak_key, int) else ""
        timeline = Timeline(table, np.array(self._reserved, np.int64), tuple(self._phases), tuple(self._steps))
        components = {name: int(size) for name, size in zip(COMPONENTS, at_peak, strict=True)}
        return Replayed(
            peak_allocated=self.allocator.peak_allocated,
            peak_reserved=self.allocator.peak_reserved,
            components=components,
            phase=phase,
            module=module,
            timeline=timeline,
            retries=(self.retries_in_steps, self.allocator.retries - self.retries_in_steps),
        )
