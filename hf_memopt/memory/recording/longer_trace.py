"""Turn the trace of a model without most of its identical layers into the trace of the whole model.

The events of the recorded units are copied as they are; between the middle one and its neighbour that belongs to later
layers come the events of the middle one, once for each unit that was left out. What a unit frees, it or a neighbour
allocated: a copy frees what the corresponding copy allocated.

Other stretches that free storages of all units in turn (autocast's cache at the end of its region, ``zero_grad``) are
found by what they free, and repeated in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hf_memopt.memory.recording.repeated_layers import NotRepeatableError, RepeatedLayers
from hf_memopt.memory.recording.step_trace import RecordedPass, StepTrace
from hf_memopt.memory.recording.unit_events import MIDDLE, Sweep, UnitEvents

__all__ = ["lengthen"]


class _Unit(NamedTuple):
    """The unit whose events are copied: its run, its place among those kept, and which unit of the model it becomes."""

    run: int
    place: int
    unit: int


class _Step(NamedTuple):
    """An event of the middle unit, as seen from any unit in its place.

    Attributes:
        allocates: whether it is an allocation.
        delta: its bytes.
        sweep: in which its storage was allocated, by a unit; -1 for a storage of no such unit.
        units_later: the distance to that unit.
        event: of that unit, which allocated; of no unit the number of the storage.
    """

    allocates: bool
    delta: int
    sweep: int
    units_later: int
    event: int


@dataclass(slots=True)
class _Columns:
    """The lists of the longer trace; see ``StorageTracker`` and ``RecordedPass``."""

    events: list[tuple[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    allocated_at: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    recomputed: list[tuple[int, int]] = field(default_factory=list)
    releases: list[list[tuple[int, int, int]]] = field(default_factory=list)


def lengthen(trace: StepTrace, layers: RepeatedLayers) -> None:
    """Replace the recorded events, passes and gradients of ``trace`` by those of the whole model.

    Sequence numbers stay those of the recording: a copy has those of its original, which are as far from the loss.

    Args:
        trace: recorded inside ``layers.cut``, with all weights.
        layers: what was left out, and where the kept units begin.

    Raises:
        NotRepeatableError: the middle unit and its neighbours have different events.
    """
    _Lengthened(trace, layers).finish()


class _Lengthened:
    """Copies events; numbers of storages and positions of events are translated on the way."""

    def __init__(self, trace: StepTrace, layers: RepeatedLayers) -> None:
        self._trace, self._tracker, self._layers = trace, trace.tracker, layers
        self._events = trace.tracker.events
        self._units = UnitEvents(trace, layers)
        self._module_numbers = {name: number for number, name in enumerate(trace.tracker.modules)}
        self._parameter_numbers = {name: number for number, name in enumerate(layers.parameters)}
        self._new = _Columns(releases=[[] for _ in trace.micro_batches])
        self._numbers: dict[int, int] = {}  # of what no unit owns
        self._numbers_of_units: dict[tuple[int, int, int], int] = {}  # by sweep, unit, event within the unit
        self._positions = [0] * (len(self._events) + 1)
        self._modules: dict[tuple[int, _Unit | None], int] = {}
        self._recomputing = -1
        self._host_bytes = self._peak_host_bytes = 0

    # ---- Copying ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Copy all events, then translate what refers to them."""
        at = 0
        for sweep in self._units.sweeps:
            self._copy(at, sweep.begin, None)
            self._copy_sweep(sweep)
            at = sweep.end
        self._copy(at, len(self._events), None)
        if self._host_bytes != sum(delta for _, delta in self._tracker.host_events):
            raise NotRepeatableError("what the host holds for the units is not let go unit by unit")
        trace, tracker, new = self._trace, self._tracker, self._new
        flops = [
            flops + self._units.missing_flops(part)
            for part, flops in zip(trace.micro_batches, trace.flops, strict=True)
        ]
        passes = [self._translated(part, index) for index, part in enumerate(trace.micro_batches)]
        evaluation = None if trace.evaluation is None else self._translated(trace.evaluation, None)
        trace.operations = [
            self._units.with_missing_operations(part, costs)
            for part, costs in zip(trace.micro_batches, tracker.operations, strict=True)
        ]
        trace.gradients = self._gradients(passes[0])
        trace.evaluation_inputs = tuple(self._number(number, None) for number in trace.evaluation_inputs)
        trace.micro_batches, trace.evaluation, trace.flops = passes, evaluation, flops
        trace.host_bytes = self._peak_host_bytes
        tracker.flops = sum(flops)
        for name in ("events", "sizes", "allocated_at", "sequences", "places", "recomputed"):
            setattr(tracker, name, getattr(new, name))

    def _copy_sweep(self, sweep: Sweep) -> None:
        run = self._layers.runs[sweep.run]
        for place in sorted(sweep.spans, reverse=not sweep.upwards):
            if place == MIDDLE:
                self._copy_middle(sweep)
            else:
                self._copy(*sweep.spans[place], _Unit(sweep.run, place, run.kept_unit(place)))

    def _copy_middle(self, sweep: Sweep) -> None:
        """Copy the events of the middle unit, for itself and for all units up to the last but one.

        The first copy shows what the others do: they differ in the numbers of their units alone.
        """
        units = range(MIDDLE, self._layers.runs[sweep.run].units - 2)
        first, *others = (_Unit(sweep.run, MIDDLE, unit) for unit in (units if sweep.upwards else reversed(units)))
        begin, end = sweep.spans[MIDDLE]
        self._copy(begin, end, first)
        steps = self._steps(begin, end, first) if others else None
        for unit in others:
            if steps is None:
                self._copy(begin, end, unit)
            else:
                self._copy_again(begin, end, unit, steps)

    def _steps(self, begin: int, end: int, unit: _Unit) -> list[_Step] | None:
        """Return what the middle unit does, as seen from any unit in its place; None where it needs other runs."""
        steps = []
        for event in range(begin, end):
            number, delta = self._events[event]
            owner = self._units.owners.get(number)
            if owner is None:
                steps.append(_Step(False, delta, -1, 0, self._number(number, unit)))
                continue
            sweep, place, event_of_unit = owner
            is_near = self._is_near(self._units.sweeps[sweep].run, place, unit)
            if self._units.is_allocation(event):
                steps.append(_Step(True, delta, sweep, 0, event_of_unit))
            elif is_near:
                steps.append(_Step(False, delta, sweep, place - MIDDLE, event_of_unit))
            elif place == MIDDLE:
                return None
            else:
                steps.append(_Step(False, delta, -1, 0, self._number(number, unit)))
        return steps

    def _copy_again(self, begin: int, end: int, unit: _Unit, steps: Sequence[_Step]) -> None:
        """Copy the events of the middle unit by its steps."""
        new, tracker, numbers = self._new, self._tracker, self._numbers_of_units
        start, number, at = len(new.events), len(new.sizes), unit.unit
        note = new.events.append
        try:
            for allocates, delta, sweep, units_later, event in steps:
                if allocates:
                    numbers[sweep, at, event] = number
                    note((number, delta))
                    number += 1
                else:
                    note((event if sweep < 0 else numbers[sweep, at + units_later, event], delta))
        except KeyError:
            raise NotRepeatableError("a unit frees what its counterpart did not allocate") from None
        places = [place for place, step in enumerate(steps) if step.allocates]
        old = [self._events[begin + place][0] for place in places]
        modules = {module: self._module(module, unit) for module in {self._units.modules[one] for one in old}}
        new.sizes += [tracker.sizes[one] for one in old]
        new.sequences += [tracker.sequences[one] for one in old]
        new.places += [modules[self._units.modules[one]] for one in old]
        new.allocated_at += [start + place for place in places]
        self._positions[begin + 1 : end + 1] = range(start + 1, start + end - begin + 1)
        for position in range(begin + 1, end + 1):
            if position in self._units.marks:
                self._note_marks(position, start + position - begin, unit)

    def _copy(self, begin: int, end: int, unit: _Unit | None) -> None:
        """Copy events as those of a unit, or of no unit."""
        event = begin
        while event < end:
            if self._units.is_allocation(event):
                self._allocate(event, event - begin, unit)
            else:
                number, delta = self._events[event]
                if self._is_of_all(number, unit):
                    sweep = self._units.sweep_at(event, begin, end)
                    self._copy_middle(sweep)  # the neighbours are copied as what surrounds it
                    event = sweep.spans[MIDDLE][1]
                    continue
                self._new.events.append((self._number(number, unit), delta))
            self._positions[event + 1] = len(self._new.events)
            self._note_marks(event + 1, len(self._new.events), unit)
            event += 1

    def _allocate(self, event: int, event_of_unit: int, unit: _Unit | None) -> None:
        old, size_bytes = self._events[event]
        new = self._new
        number = len(new.sizes)
        owner = self._units.owners.get(old)
        if owner is None:
            self._numbers[old] = number
        else:
            assert unit is not None  # a sweep's allocations are copied as those of its units
            self._numbers_of_units[owner[0], unit.unit, event_of_unit] = number
        new.sizes.append(size_bytes)
        new.allocated_at.append(len(new.events))
        new.sequences.append(self._tracker.sequences[old])
        new.places.append(self._module(self._units.modules[old], unit))
        new.events.append((number, size_bytes))

    def _note_marks(self, position: int, now: int, unit: _Unit | None) -> None:
        """Note what happens before an event of the recording, which is event ``now`` of the longer trace."""
        new = self._new
        for mark in self._units.marks.get(position, ()):
            if mark[0] == "recomputation":
                self._recomputing = now
            elif mark[0] == "recomputed":
                new.recomputed.append((self._recomputing, now))
            elif mark[0] == "host":
                self._host_bytes += mark[1]
                self._peak_host_bytes = max(self._peak_host_bytes, self._host_bytes)
            else:
                _, index, parameter, gradient = mark
                release = now, self._parameter(parameter, unit), self._number(gradient, unit)
                new.releases[index].append(release)

    def _is_of_all(self, number: int, unit: _Unit | None) -> bool:
        """Return whether the middle unit allocated the storage, seen from where that is not a neighbour."""
        owner = self._units.owners.get(number)
        return (
            owner is not None
            and owner[1] == MIDDLE
            and not self._is_near(self._units.sweeps[owner[0]].run, MIDDLE, unit)
        )

    @staticmethod
    def _is_near(run: int, place: int, unit: _Unit | None) -> bool:
        return unit is not None and unit.run == run and abs(unit.place - place) <= 1

    # ---- Translating ------------------------------------------------------------------------------------------------

    def _number(self, number: int, unit: _Unit | None) -> int:
        """Return the new number of a storage, seen from the unit that is copied or from none."""
        owner = self._units.owners.get(number)
        if owner is None:
            return self._numbers[number] if number >= 0 else number  # -1: not counted
        sweep, place, event = owner
        run = self._units.sweeps[sweep].run
        if unit is not None and self._is_near(run, place, unit):
            key = sweep, unit.unit + place - unit.place, event
        else:
            key = sweep, self._same_unit(run, place), event
        if key not in self._numbers_of_units:
            raise NotRepeatableError("a unit frees what its counterpart did not allocate")
        return self._numbers_of_units[key]

    def _same_unit(self, run: int, place: int) -> int:
        if place == MIDDLE:
            raise NotRepeatableError("something else than its neighbours refers to a unit in the middle")
        return self._layers.runs[run].kept_unit(place)

    def _name(self, name: str, unit: _Unit | None) -> str:
        """Return the name of the counterpart of a module or parameter, seen from the unit that is copied."""
        found = self._units.kept(name)
        if found is None:
            return name
        run, place = found
        if unit is None or not self._is_near(run, place, unit):
            self._same_unit(run, place)
            return name
        return self._units.moved(name, run, unit.place, unit.unit)

    def _module(self, module: int, unit: _Unit | None) -> int:
        key = module, unit
        if key not in self._modules:
            self._modules[key] = self._module_numbers[self._name(self._tracker.modules[module], unit)]
        return self._modules[key]

    def _parameter(self, index: int, unit: _Unit | None) -> int:
        return self._parameter_numbers[self._name(self._layers.parameters[index], unit)]

    def _translated(self, part: RecordedPass, index: int | None) -> RecordedPass:
        positions = self._positions
        start, forward_end, end = positions[part.start], positions[part.forward_end], positions[part.end]
        logits = frozenset(self._number(number, None) for number in part.logits)
        return replace(
            part,
            start=start,
            forward_end=forward_end,
            end=end,
            logits=logits,
            logits_event=self._new.allocated_at[min(logits)] if logits else positions[part.logits_event],
            outputs=tuple(self._number(number, None) for number in part.outputs),
            releases=() if index is None else tuple(self._new.releases[index]),
        )

    def _gradients(self, first: RecordedPass) -> tuple[int, ...]:
        """Return the gradients of the whole model: those held after the passes by parameter, then those released."""
        gradients, names = self._trace.gradient_of, self._layers.names
        held = []
        for index, name in enumerate(self._layers.parameters):
            found, kept, unit = names.unit_of(name), self._units.kept(name), None
            if found is not None:
                place = MIDDLE if kept is None else kept[1]
                unit = _Unit(found[0], place, found[1])
            if found is not None and kept is None:
                index = self._parameter_numbers[names.moved(name, MIDDLE - found[1])]
            if index in gradients:
                held.append(self._number(gradients[index], unit))
        return tuple(dict.fromkeys(held + [number for _, _, number in first.releases]))
