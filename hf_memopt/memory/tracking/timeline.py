"""The allocated and reserved bytes of a simulated run, event by event, and its phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from hf_memopt.components import COMPONENTS

if TYPE_CHECKING:
    import numpy as np

__all__ = ["COMPONENTS", "SimulatedTimeline", "Timeline", "phase_peaks", "phase_spans"]


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


class SimulatedTimeline(Timeline):
    """A timeline by changes: each event changes one component, and the bytes of all are added up when asked for.

    A comparison looks at few of the timelines that it simulates.

    Args:
        changed: (events,) index in ``COMPONENTS`` of what each event changes.
        deltas: (events,) int64, by how many bytes.
        reserved: as in ``Timeline``, and so on.
    """

    def __init__(
        self,
        changed: np.ndarray,
        deltas: np.ndarray,
        reserved: np.ndarray,
        phases: tuple[tuple[int, str], ...],
        steps: tuple[tuple[int, int], ...],
    ) -> None:
        vars(self).update(changed=changed, deltas=deltas, reserved=reserved, phases=phases, steps=steps)

    @cached_property
    def components(self) -> np.ndarray:  # a field there, which no one sets
        """As in ``Timeline``."""
        import numpy as np

        changed, deltas = vars(self)["changed"], vars(self)["deltas"]
        table = np.zeros((len(deltas), len(COMPONENTS)), np.int64)
        table[np.arange(len(deltas)), changed] = deltas
        return np.cumsum(table, axis=0)


def phase_peaks(timeline: Timeline) -> dict[str, dict[str, int]]:
    """Return the peaks of allocated and reserved bytes by phase, each over all its spans."""
    allocated = timeline.components.sum(axis=1)
    peaks: dict[str, dict[str, int]] = {}
    for first, end, name in phase_spans(timeline):
        known = peaks.setdefault(name, {"allocated_bytes": 0, "reserved_bytes": 0})
        for kind, values in (("allocated_bytes", allocated), ("reserved_bytes", timeline.reserved)):
            known[kind] = max(known[kind], int(values[first:end].max()))
    return peaks


def phase_spans(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield first event, end and name of each phase that has events; adjacent phases of one name are merged."""
    starts = dict(timeline.phases)  # of several at one event, the last has events
    changes = [first for first in starts if first < len(timeline.reserved)]
    changes = [first for before, first in pairwise([-1, *changes]) if starts.get(before) != starts[first]]
    for first, end in pairwise([*changes, len(timeline.reserved)]):
        yield first, end, starts[first]
