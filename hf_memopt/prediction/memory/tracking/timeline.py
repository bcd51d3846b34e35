"""The allocated and reserved bytes of a simulated run, event by event, and its phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from hf_memopt.components import COMPONENTS as COMPONENTS

if TYPE_CHECKING:
    import numpy as np


class PhasePeak(NamedTuple):
    """What a phase needs: its peaks in bytes, and what the allocated one consists of, by component."""

    allocated_bytes: int
    reserved_bytes: int
    components: dict[str, int]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes over the events of a run: loading, the first steps, evaluation.

    Attributes:
        components: (events, len(COMPONENTS)) int64, allocated bytes after each event.
        reserved: (events,) int64, what the allocator holds after each event.
        phases: (first event, name) of each phase, in order: "load", "forward", "backward", "optimizer",
            "generation", "evaluation".
        steps: (first event, step number from 1) of each optimizer step.
    """

    components: np.ndarray
    reserved: np.ndarray
    phases: tuple[tuple[int, str], ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def allocated(self) -> np.ndarray:
        """Allocated bytes after each event, (events,) int64."""
        found: np.ndarray = self.components.sum(axis=1)
        return found

    @property
    def deciding_event(self) -> int:
        """The event that shows what decides the total: the fullest of those within 1 % of the most reserved bytes.

        Where the allocator reserves a little more after the peak, what it has free then was in use just before.
        """
        near = self.reserved >= 0.99 * self.reserved.max()
        return int((near * self.allocated).argmax())

    def parts_at(self, event: int) -> dict[str, int]:
        """Return the allocated bytes of every component after an event."""
        return dict(zip(COMPONENTS, self.components[event].tolist(), strict=True))

    def phase_peaks(self) -> dict[str, PhasePeak]:
        """Return the peaks of each phase over all its spans; reserved bytes include what earlier phases left unused."""
        allocated, fullest, reserved = self.allocated, dict[str, int](), dict[str, int]()
        for first, end, name in phase_spans(self):
            first = max(first - 1, 0)  # what a phase begins with counts: SGD's step allocates nothing
            event = first + int(allocated[first:end].argmax())
            fullest[name] = max(fullest.get(name, event), event, key=lambda one: int(allocated[one]))
            reserved[name] = max(reserved.get(name, 0), int(self.reserved[first:end].max()))
        found = ((name, event, self.parts_at(event)) for name, event in fullest.items())
        return {name: PhasePeak(int(allocated[event]), reserved[name], parts) for name, event, parts in found}


def phase_spans(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield first event, end and name of each phase that has events; adjacent phases of one name are merged."""
    starts = dict(timeline.phases)  # of several at one event, the last has events
    changes = [first for first in starts if first < len(timeline.reserved)]
    changes = [first for before, first in pairwise([-1, *changes]) if starts.get(before) != starts[first]]
    for first, end in pairwise([*changes, len(timeline.reserved)]):
        yield first, end, starts[first]
