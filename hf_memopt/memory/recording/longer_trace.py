"""Turn the trace of a model without most of its identical layers into the trace of the whole model.

In each pass the events of the five units that were recorded follow each other, upwards in the forward and downwards in
the backward pass: first, second, middle, last but one, last. Their events are copied as they are; between the middle
one and its neighbour that of the later layers come the events of the middle one, once for each unit that was left out.
What a unit frees, it or a neighbour allocated: a copy frees what the corresponding copy allocated.

That is allowed where the middle unit and both of its neighbours have the same events: equal sizes in the same order, in
modules of the same name, storages of the same origin freed. Other stretches that free storages of all units in turn
(autocast's cache at the end of its region, ``zero_grad``) are found by what they free, and repeated in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memopt.memory.recording.identical_layers import KEPT_UNITS
from hf_memopt.memory.recording.repeated_layers import NotRepeatableError, RepeatedLayers, UnitStart
from hf_memopt.memory.recording.step import RecordedPass, StepTrace

__all__ = ["lengthen"]

_MIDDLE = 2


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The events of the kept units of a run, one after the other: (begin, end) by place; upwards or downwards."""

    run: int
    upwards: bool
    spans: dict[int, tuple[int, int]]

    @property
    def begin(self) -> int:
        return min(begin for begin, _ in self.spans.values())

    @property
    def end(self) -> int:
        return max(end for _, end in self.spans.values())


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit whose events are copied: its run, its place among those kept, and which unit of the model it becomes."""

    run: int
    place: int
    unit: int


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
        modules = trace.tracker.modules
        self._module_numbers = {name: number for number, name in enumerate(modules)}
        self._parameter_numbers = {name: number for number, name in enumerate(layers.parameters)}
        self._units = [self._kept(name) for name in modules]
        self._modules = [trace.tracker.module_number(number) for number in range(len(trace.tracker.sizes))]
        self._marks = self._marks_by_event()
        self._sweeps = sorted(self._sweeps_of_passes(), key=lambda sweep: sweep.begin)
        if any(one.end > other.begin for one, other in zip(self._sweeps, self._sweeps[1:], strict=False)):
            raise NotRepeatableError("the events of two runs overlap")
        self._owners: dict[int, tuple[int, int, int]] = {}  # by storage: sweep, place, event within the unit
        for index, sweep in enumerate(self._sweeps):
            for place, (begin, end) in sweep.spans.items():
                for event in filter(self._is_allocation, range(begin, end)):
                    self._owners[self._events[event][0]] = (index, place, event - begin)
        for sweep in self._sweeps:
            self._check(sweep)
        self._new = _Columns(releases=[[] for _ in trace.micro_batches])
        self._numbers: dict[int, int] = {}  # of what no unit owns
        self._numbers_of_units: dict[tuple[int, int, int], int] = {}  # by sweep, unit, event within the unit
        self._positions = [0] * (len(self._events) + 1)
        self._recomputing = -1

    # ---- What belongs to which unit ---------------------------------------------------------------------------------

    def _kept(self, name: str) -> tuple[int, int] | None:
        """Return (run, place) of the unit that a module or parameter belongs to; None outside the units kept."""
        found = self._layers.names.unit_of(name)
        if found is None:
            return None
        run, unit = found
        dropped = self._layers.runs[run].units - KEPT_UNITS
        if unit <= _MIDDLE:
            return run, unit
        return (run, unit - dropped) if unit > _MIDDLE + dropped else None

    def _is_allocation(self, event: int) -> bool:
        number, _ = self._events[event]
        return self._tracker.allocated_at[number] == event

    def _marks_by_event(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return what happens between two events, by the number of the second."""
        marks: dict[int, list[tuple[Any, ...]]] = {}
        for begin, end in self._tracker.recomputed:
            marks.setdefault(begin, []).append(("recomputation",))
            marks.setdefault(end, []).append(("recomputed",))
        for index, part in enumerate(self._trace.micro_batches):
            for event, parameter, number in part.releases:
                marks.setdefault(event, []).append(("release", index, parameter, number))
        return marks

    # ---- Where the units are in each pass ---------------------------------------------------------------------------

    def _sweeps_of_passes(self) -> Iterator[_Sweep]:
        passes = list(self._trace.micro_batches)
        evaluation = self._trace.evaluation
        for part in [*passes, evaluation] if evaluation is not None else passes:
            yield from self._forward_sweeps(part)
        for index, part in enumerate(passes):
            yield from self._backward_sweeps(index, part)

    def _forward_sweeps(self, part: RecordedPass) -> Iterator[_Sweep]:
        for run in range(len(self._layers.runs)):
            starts = self._starts(run, part)
            if not starts:
                continue
            if [start.place for start in starts] != list(range(KEPT_UNITS + 1)):
                raise NotRepeatableError("the layers do not run once each, in order")
            ends = [start.event for start in starts[1:]]
            spans = {start.place: (start.event, end) for start, end in zip(starts, ends, strict=False)}
            yield _Sweep(run, True, spans)

    def _starts(self, run: int, part: RecordedPass) -> list[UnitStart]:
        return [
            start for start in self._layers.starts if start.run == run and part.start <= start.event < part.forward_end
        ]

    def _backward_sweeps(self, index: int, part: RecordedPass) -> Iterator[_Sweep]:
        """Yield the units of a backward pass, each from the first allocation in one of its modules."""
        first: dict[tuple[int, int], int] = {}
        for event in range(part.forward_end, part.end):
            unit = self._units[self._modules[self._events[event][0]]]
            if unit is not None and unit not in first and self._is_allocation(event):
                first[unit] = event
        order = sorted(first, key=lambda unit: first[unit])
        for run in range(len(self._layers.runs)):
            places = [place for number, place in order if number == run]
            if places and places != list(reversed(range(KEPT_UNITS))):
                raise NotRepeatableError("the layers do not go backward once each, in order")
        borders = [*(first[unit] for unit in order), part.end]
        spans = {unit: (first[unit], end) for unit, end in zip(order, borders[1:], strict=True)}
        for run in dict.fromkeys(number for number, _ in order):
            yield _Sweep(run, False, {place: spans[run, place] for place in range(KEPT_UNITS)})

    # ---- Whether the units are the same -----------------------------------------------------------------------------

    def _check(self, sweep: _Sweep) -> None:
        """Compare the middle unit of a sweep with both of its neighbours.

        Raises:
            NotRepeatableError: they differ.
        """
        ours = self._tokens(sweep, _MIDDLE)
        for place in (_MIDDLE - 1, _MIDDLE + 1):
            other = self._tokens(sweep, place)
            if len(ours) != len(other) or not all(map(_agree, ours, other)):
                raise NotRepeatableError(f"units of {self._layers.runs[sweep.run].name} have different events")

    def _tokens(self, sweep: _Sweep, place: int) -> list[tuple[Any, Any]]:
        """Return for each event what it does, and which event of its unit allocated what it frees.

        The second is None where the first or the last unit allocated it, whose events differ.
        """
        begin, end = sweep.spans[place]
        tokens: list[tuple[Any, Any]] = []
        for event in range(begin, end):
            number, delta = self._events[event]
            if self._is_allocation(event):
                tokens.append(((delta, self._module_token(sweep.run, place, self._modules[number])), None))
            else:
                origin, event_of_unit = self._origin(sweep.run, place, number)
                tokens.append(((delta, origin), event_of_unit))
            for mark in self._marks.get(event + 1, ()):
                if mark[0] != "release":
                    tokens.append((mark, None))
                    continue
                _, index, parameter, gradient = mark
                origin, event_of_unit = self._origin(sweep.run, place, gradient)
                name = self._parameter_token(sweep.run, place, self._layers.parameters[parameter])
                tokens.append((("release", index, name, origin), event_of_unit))
        return tokens

    def _origin(self, run: int, place: int, number: int) -> tuple[Any, int | None]:
        owner = self._owners.get(number)
        if owner is None or self._sweeps[owner[0]].run != run or abs(owner[1] - place) > 1:
            return ("elsewhere", number), None
        sweep, of_place, event = owner
        return (sweep, of_place - place), event if 0 < of_place < KEPT_UNITS - 1 else None

    def _module_token(self, run: int, place: int, module: int) -> Any:
        unit = self._units[module]
        if unit is None or unit[0] != run or abs(unit[1] - place) > 1:
            return module
        return self._moved(self._tracker.modules[module], run, place, _MIDDLE)

    def _parameter_token(self, run: int, place: int, name: str) -> str:
        return self._moved(name, run, place, _MIDDLE)

    def _moved(self, name: str, run: int, place: int, unit: int) -> str:
        """Return the name of what stands to ``unit`` as ``name`` stands to the unit at ``place``."""
        return self._layers.names.moved(name, unit - self._layers.runs[run].kept_unit(place))

    # ---- Copying ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Copy all events, then translate what refers to them."""
        at = 0
        for sweep in self._sweeps:
            self._copy(at, sweep.begin, None)
            self._copy_sweep(sweep)
            at = sweep.end
        self._copy(at, len(self._events), None)
        trace, tracker, new = self._trace, self._tracker, self._new
        flops = [
            flops + self._missing_flops(part) for part, flops in zip(trace.micro_batches, trace.flops, strict=True)
        ]
        passes = [self._translated(part, index) for index, part in enumerate(trace.micro_batches)]
        evaluation = None if trace.evaluation is None else self._translated(trace.evaluation, None)
        trace.gradients = self._gradients(passes[0])
        trace.evaluation_inputs = tuple(self._number(number, None) for number in trace.evaluation_inputs)
        trace.micro_batches, trace.evaluation, trace.flops = passes, evaluation, flops
        tracker.flops = sum(flops)
        for name in ("events", "sizes", "allocated_at", "sequences", "places", "recomputed"):
            setattr(tracker, name, getattr(new, name))

    def _copy_sweep(self, sweep: _Sweep) -> None:
        run = self._layers.runs[sweep.run]
        for place in sorted(sweep.spans, reverse=not sweep.upwards):
            if place == _MIDDLE:
                self._copy_middle(sweep)
            else:
                self._copy(*sweep.spans[place], _Unit(sweep.run, place, run.kept_unit(place)))

    def _copy_middle(self, sweep: _Sweep) -> None:
        """Copy the events of the middle unit, for itself and for all units up to the last but one."""
        units = range(_MIDDLE, self._layers.runs[sweep.run].units - 2)
        for unit in units if sweep.upwards else reversed(units):
            self._copy(*sweep.spans[_MIDDLE], _Unit(sweep.run, _MIDDLE, unit))

    def _copy(self, begin: int, end: int, unit: _Unit | None) -> None:
        """Copy events as those of a unit, or of no unit."""
        event = begin
        while event < end:
            if self._is_allocation(event):
                self._allocate(event, event - begin, unit)
            else:
                number, delta = self._events[event]
                if self._is_of_all(number, unit):
                    sweep = self._sweep_at(event, begin, end)
                    self._copy_middle(sweep)  # the neighbours are copied as what surrounds it
                    event = sweep.spans[_MIDDLE][1]
                    continue
                self._new.events.append((self._number(number, unit), delta))
            self._note_marks(event + 1, unit)
            event += 1

    def _allocate(self, event: int, event_of_unit: int, unit: _Unit | None) -> None:
        old, size_bytes = self._events[event]
        new = self._new
        number = len(new.sizes)
        owner = self._owners.get(old)
        if owner is None:
            self._numbers[old] = number
        else:
            assert unit is not None  # a sweep's allocations are copied as those of its units
            self._numbers_of_units[owner[0], unit.unit, event_of_unit] = number
        new.sizes.append(size_bytes)
        new.allocated_at.append(len(new.events))
        new.sequences.append(self._tracker.sequences[old])
        new.places.append(self._module(self._modules[old], unit))
        new.events.append((number, size_bytes))

    def _note_marks(self, position: int, unit: _Unit | None) -> None:
        new = self._new
        self._positions[position] = len(new.events)
        for mark in self._marks.get(position, ()):
            if mark[0] == "recomputation":
                self._recomputing = len(new.events)
            elif mark[0] == "recomputed":
                new.recomputed.append((self._recomputing, len(new.events)))
            else:
                _, index, parameter, gradient = mark
                release = len(new.events), self._parameter(parameter, unit), self._number(gradient, unit)
                new.releases[index].append(release)

    # ---- Stretches that free storages of all units in turn ----------------------------------------------------------

    def _is_of_all(self, number: int, unit: _Unit | None) -> bool:
        """Return whether the middle unit allocated the storage, seen from where that is not a neighbour."""
        owner = self._owners.get(number)
        return (
            owner is not None and owner[1] == _MIDDLE and not self._is_near(self._sweeps[owner[0]].run, _MIDDLE, unit)
        )

    @staticmethod
    def _is_near(run: int, place: int, unit: _Unit | None) -> bool:
        return unit is not None and unit.run == run and abs(unit.place - place) <= 1

    def _sweep_at(self, event: int, begin: int, end: int) -> _Sweep:
        """Return the three stretches of equal length of which the middle one begins with this event.

        Raises:
            NotRepeatableError: they reach beyond (begin, end), allocate, or differ.
        """
        run = self._sweeps[self._owners[self._events[event][0]][0]].run
        for later in range(event + 1, end):
            owner = self._owners.get(self._events[later][0])
            if owner is None or self._sweeps[owner[0]].run != run or owner[1] not in (_MIDDLE - 1, _MIDDLE + 1):
                continue
            length, step = later - event, owner[1] - _MIDDLE
            spans = {
                _MIDDLE - step: (event - length, event),
                _MIDDLE: (event, later),
                _MIDDLE + step: (later, later + length),
            }
            allocates = any(map(self._is_allocation, range(event - length, min(later + length, end))))
            if event - length < begin or later + length > end or allocates:
                break
            found = _Sweep(run, step > 0, spans)
            self._check(found)
            return found
        raise NotRepeatableError("what a unit in the middle allocated is freed alone")

    # ---- Translating ------------------------------------------------------------------------------------------------

    def _number(self, number: int, unit: _Unit | None) -> int:
        """Return the new number of a storage, seen from the unit that is copied or from none."""
        owner = self._owners.get(number)
        if owner is None:
            return self._numbers[number] if number >= 0 else number
        sweep, place, event = owner
        run = self._sweeps[sweep].run
        if unit is not None and self._is_near(run, place, unit):
            key = sweep, unit.unit + place - unit.place, event
        else:
            key = sweep, self._same_unit(run, place), event
        if key not in self._numbers_of_units:
            raise NotRepeatableError("a unit frees what its counterpart did not allocate")
        return self._numbers_of_units[key]

    def _same_unit(self, run: int, place: int) -> int:
        if place == _MIDDLE:
            raise NotRepeatableError("something else than its neighbours refers to a unit in the middle")
        return self._layers.runs[run].kept_unit(place)

    def _name(self, name: str, unit: _Unit | None) -> str:
        """Return the name of the counterpart of a module or parameter, seen from the unit that is copied."""
        found = self._kept(name)
        if found is None:
            return name
        run, place = found
        if unit is None or not self._is_near(run, place, unit):
            self._same_unit(run, place)
            return name
        return self._moved(name, run, unit.place, unit.unit)

    def _module(self, module: int, unit: _Unit | None) -> int:
        return self._module_numbers[self._name(self._tracker.modules[module], unit)]

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
            logits_event=self._new.allocated_at[min(logits)] if logits else forward_end,
            outputs=tuple(self._number(number, None) for number in part.outputs),
            releases=() if index is None else tuple(self._new.releases[index]),
        )

    def _gradients(self, first: RecordedPass) -> tuple[int, ...]:
        """Return the gradients of the whole model: those held after the passes by parameter, then those released."""
        gradients, names = self._trace.gradient_of, self._layers.names
        held = []
        for index, name in enumerate(self._layers.parameters):
            found, kept, unit = names.unit_of(name), self._kept(name), None
            if found is not None:
                place = _MIDDLE if kept is None else kept[1]
                unit = _Unit(found[0], place, found[1])
            if found is not None and kept is None:
                index = self._parameter_numbers[names.moved(name, _MIDDLE - found[1])]
            if index in gradients:
                held.append(self._number(gradients[index], unit))
        return tuple(dict.fromkeys(held + [number for _, _, number in first.releases]))

    def _missing_flops(self, part: RecordedPass) -> int:
        """Return the operations of the units that were left out of a pass.

        Raises:
            NotRepeatableError: the middle unit and its neighbour have different ones.
        """
        tracker, missing = self._tracker, 0
        for sweep in self._sweeps:
            if not part.start <= sweep.begin < part.end:
                continue
            if sweep.upwards:
                at = {start.place: start.flops for start in self._starts(sweep.run, part)}
            else:
                at = {place: -tracker.flops_at[self._events[begin][0]] for place, (begin, _) in sweep.spans.items()}
            each = at[_MIDDLE + 1] - at[_MIDDLE]
            if each != at[_MIDDLE] - at[_MIDDLE - 1]:
                raise NotRepeatableError("units have different numbers of operations")
            run = self._layers.runs[sweep.run]
            missing += (run.units - KEPT_UNITS) * each
        return missing


def _agree(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and (one[1] is None or other[1] is None or one[1] == other[1])
