"""Find the events of the recorded units of identical layers in a trace, and check that they are the same.

In each pass the events of the five units follow each other, upwards in the forward and downwards in the backward pass:
such a stretch is a sweep. A unit begins with the forward pass of its first layer, or, in a backward pass, with the
first allocation in one of its modules; where exactly does not matter, as long as it is the same in all.

The middle unit and both of its neighbours have to have the same events: equal sizes in the same order, in modules of
the same name, storages of the same origin freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hf_memopt.memory.recording.identical_layers import KEPT_UNITS
from hf_memopt.memory.recording.repeated_layers import NotRepeatableError, RepeatedLayers, UnitStart
from hf_memopt.memory.recording.step_trace import RecordedPass, StepTrace
from hf_memopt.memory.step_time.operations import Operation

__all__ = ["MIDDLE", "Sweep", "UnitEvents"]

MIDDLE = 2
"""The place of the unit that is repeated."""


@dataclass(frozen=True, slots=True)
class Sweep:
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


class UnitEvents:
    """Which events and storages of a trace belong to which recorded unit.

    Args:
        trace: recorded inside ``layers.cut``.
        layers: what was left out, and where the units begin.

    Attributes:
        sweeps: in order.
        owners: (sweep, place, event within the unit) of the allocation, by storage; others belong to no unit.
        modules: index in the tracker's ``modules`` by storage.
        marks: what happens between two events, by the number of the second.

    Raises:
        NotRepeatableError: the units do not follow each other, or the middle one and its neighbours differ.
    """

    def __init__(self, trace: StepTrace, layers: RepeatedLayers) -> None:
        self._trace, self._tracker, self._layers = trace, trace.tracker, layers
        self._events = trace.tracker.events
        self._units = [self.kept(name) for name in trace.tracker.modules]
        self.modules = [trace.tracker.module_number(number) for number in range(len(trace.tracker.sizes))]
        self.marks = self._marks_by_event()
        self.sweeps = sorted(self._sweeps_of_passes(), key=lambda sweep: sweep.begin)
        if any(one.end > other.begin for one, other in pairwise(self.sweeps)):
            raise NotRepeatableError("the events of two runs overlap")
        self.owners: dict[int, tuple[int, int, int]] = {}
        for index, sweep in enumerate(self.sweeps):
            for place, (begin, end) in sweep.spans.items():
                for event in filter(self.is_allocation, range(begin, end)):
                    self.owners[self._events[event][0]] = (index, place, event - begin)
        for sweep in self.sweeps:
            self._check(sweep)

    # ---- What belongs to which unit ---------------------------------------------------------------------------------

    def kept(self, name: str) -> tuple[int, int] | None:
        """Return (run, place) of the unit that a module or parameter belongs to; None outside the units kept."""
        found = self._layers.names.unit_of(name)
        if found is None:
            return None
        run, unit = found
        dropped = self._layers.runs[run].units - KEPT_UNITS
        if unit <= MIDDLE:
            return run, unit
        return (run, unit - dropped) if unit > MIDDLE + dropped else None

    def is_allocation(self, event: int) -> bool:
        number, _ = self._events[event]
        return self._tracker.allocated_at[number] == event

    def _marks_by_event(self) -> dict[int, list[tuple[Any, ...]]]:
        """Return what happens between two events, by the number of the second."""
        marks: dict[int, list[tuple[Any, ...]]] = {}
        for begin, end in self._tracker.recomputed:
            marks.setdefault(begin, []).append(("recomputation",))
            marks.setdefault(end, []).append(("recomputed",))
        for event, delta in self._tracker.host_events:
            marks.setdefault(event, []).append(("host", delta))
        for index, part in enumerate(self._trace.micro_batches):
            for event, parameter, number in part.releases:
                marks.setdefault(event, []).append(("release", index, parameter, number))
        return marks

    # ---- Where the units are in each pass ---------------------------------------------------------------------------

    def _sweeps_of_passes(self) -> Iterator[Sweep]:
        passes = list(self._trace.micro_batches)
        evaluation = self._trace.evaluation
        for part in [*passes, evaluation] if evaluation is not None else passes:
            yield from self._forward_sweeps(part)
        for index, part in enumerate(passes):
            yield from self._backward_sweeps(index, part)

    def _forward_sweeps(self, part: RecordedPass) -> Iterator[Sweep]:
        for run in range(len(self._layers.runs)):
            starts = self._starts(run, part)
            if not starts:
                continue
            if [start.place for start in starts] != list(range(KEPT_UNITS + 1)):
                raise NotRepeatableError("the layers do not run once each, in order")
            ends = [start.event for start in starts[1:]]
            spans = {start.place: (start.event, end) for start, end in zip(starts, ends, strict=False)}
            yield Sweep(run, True, spans)

    def _starts(self, run: int, part: RecordedPass) -> list[UnitStart]:
        return [
            start for start in self._layers.starts if start.run == run and part.start <= start.event < part.forward_end
        ]

    def _backward_sweeps(self, index: int, part: RecordedPass) -> Iterator[Sweep]:
        """Yield the units of a backward pass, each from the first allocation in one of its modules."""
        first: dict[tuple[int, int], int] = {}
        for event in range(part.forward_end, part.end):
            unit = self._units[self.modules[self._events[event][0]]]
            if unit is not None and unit not in first and self.is_allocation(event):
                first[unit] = event
        order = sorted(first, key=lambda unit: first[unit])
        for run in range(len(self._layers.runs)):
            places = [place for number, place in order if number == run]
            if places and places != list(reversed(range(KEPT_UNITS))):
                raise NotRepeatableError("the layers do not go backward once each, in order")
        borders = [*(first[unit] for unit in order), part.end]
        spans = {unit: (first[unit], end) for unit, end in zip(order, borders[1:], strict=True)}
        for run in dict.fromkeys(number for number, _ in order):
            yield Sweep(run, False, {place: spans[run, place] for place in range(KEPT_UNITS)})

    # ---- Whether the units are the same -----------------------------------------------------------------------------

    def _check(self, sweep: Sweep) -> None:
        """Compare the middle unit of a sweep with both of its neighbours.

        Raises:
            NotRepeatableError: they differ.
        """
        ours = self._tokens(sweep, MIDDLE)
        for place in (MIDDLE - 1, MIDDLE + 1):
            other = self._tokens(sweep, place)
            if len(ours) != len(other) or not all(map(_agree, ours, other)):
                raise NotRepeatableError(f"units of {self._layers.runs[sweep.run].name} have different events")

    def _tokens(self, sweep: Sweep, place: int) -> list[tuple[Any, Any]]:
        """Return for each event what it does, and which event of its unit allocated what it frees.

        The second is None where the first or the last unit allocated it, whose events differ.
        """
        begin, end = sweep.spans[place]
        tokens: list[tuple[Any, Any]] = []
        for event in range(begin, end):
            number, delta = self._events[event]
            if self.is_allocation(event):
                tokens.append(((delta, self._module_token(sweep.run, place, self.modules[number])), None))
            else:
                origin, event_of_unit = self._origin(sweep.run, place, number)
                tokens.append(((delta, origin), event_of_unit))
            for mark in self.marks.get(event + 1, ()):
                if mark[0] != "release":
                    tokens.append((mark, None))
                    continue
                _, index, parameter, gradient = mark
                origin, event_of_unit = self._origin(sweep.run, place, gradient)
                name = self._parameter_token(sweep.run, place, self._layers.parameters[parameter])
                tokens.append((("release", index, name, origin), event_of_unit))
        return tokens

    def _origin(self, run: int, place: int, number: int) -> tuple[Any, int | None]:
        owner = self.owners.get(number)
        if owner is None or self.sweeps[owner[0]].run != run or abs(owner[1] - place) > 1:
            return ("elsewhere", number), None
        sweep, of_place, event = owner
        return (sweep, of_place - place), event if 0 < of_place < KEPT_UNITS - 1 else None

    def _module_token(self, run: int, place: int, module: int) -> Any:
        unit = self._units[module]
        if unit is None or unit[0] != run or abs(unit[1] - place) > 1:
            return module
        return self.moved(self._tracker.modules[module], run, place, MIDDLE)

    def _parameter_token(self, run: int, place: int, name: str) -> str:
        return self.moved(name, run, place, MIDDLE)

    def moved(self, name: str, run: int, place: int, unit: int) -> str:
        """Return the name of what stands to ``unit`` as ``name`` stands to the unit at ``place``."""
        return self._layers.names.moved(name, unit - self._layers.runs[run].kept_unit(place))

    def sweep_at(self, event: int, begin: int, end: int) -> Sweep:
        """Return the three stretches of equal length of which the middle one begins with this event.

        Raises:
            NotRepeatableError: they reach beyond (begin, end), allocate, or differ.
        """
        run = self.sweeps[self.owners[self._events[event][0]][0]].run
        for later in range(event + 1, end):
            owner = self.owners.get(self._events[later][0])
            if owner is None or self.sweeps[owner[0]].run != run or owner[1] not in (MIDDLE - 1, MIDDLE + 1):
                continue
            length, step = later - event, owner[1] - MIDDLE
            spans = {
                MIDDLE - step: (event - length, event),
                MIDDLE: (event, later),
                MIDDLE + step: (later, later + length),
            }
            allocates = any(map(self.is_allocation, range(event - length, min(later + length, end))))
            if event - length < begin or later + length > end or allocates:
                break
            found = Sweep(run, step > 0, spans)
            self._check(found)
            return found
        raise NotRepeatableError("what a unit in the middle allocated is freed alone")

    def missing_flops(self, part: RecordedPass) -> int:
        """Return the operations of the units that were left out of a pass.

        Raises:
            NotRepeatableError: the middle unit and its neighbour have different ones.
        """
        tracker, missing = self._tracker, 0
        for sweep in self.sweeps:
            if not part.start <= sweep.begin < part.end:
                continue
            if sweep.upwards:
                at = {start.place: start.flops for start in self._starts(sweep.run, part)}
            else:
                at = {place: -tracker.flops_at[self._events[begin][0]] for place, (begin, _) in sweep.spans.items()}
            each = at[MIDDLE + 1] - at[MIDDLE]
            if each != at[MIDDLE] - at[MIDDLE - 1]:
                raise NotRepeatableError("units have different numbers of operations")
            run = self._layers.runs[sweep.run]
            missing += (run.units - KEPT_UNITS) * each
        return missing

    def with_missing_operations(
        self, part: RecordedPass, costs: Sequence[tuple[int, Operation]]
    ) -> list[tuple[Operation, int]]:
        """Return (cost, times) of the operations of a pass; ``costs`` are (event before which it ran, cost).

        An operation that allocates nothing, at the border of two units, counts with the later one: a whole period later
        it does so again, so that each stretch has those of one unit.

        Raises:
            NotRepeatableError: the middle unit and its neighbour have different ones.
        """
        repeated: list[tuple[int, int, int]] = []  # first event, end, how often it was left out
        for sweep in self.sweeps:
            if not part.start <= sweep.begin < part.end:
                continue
            ours, other = (
                Counter(cost for event, cost in costs if begin <= event < end)
                for begin, end in (sweep.spans[MIDDLE], sweep.spans[MIDDLE - 1 if sweep.upwards else MIDDLE + 1])
            )
            if ours != other:
                raise NotRepeatableError("units have different operations")
            repeated.append((*sweep.spans[MIDDLE], self._layers.runs[sweep.run].units - KEPT_UNITS))
        return [
            (cost, 1 + sum(times for begin, end, times in repeated if begin <= event < end)) for event, cost in costs
        ]


def _agree(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and (one[1] is None or other[1] is None or one[1] == other[1])
