"""Record a few of the many equal slices of a fused loss, and repeat what the last of them did.

In 16 bits the gradients of a large vocabulary are made in dozens of slices (``binding/fused_loss``), most of what runs
where identical layers are left out. Each slice frees what it allocated, so the events of one are those of the next with
other numbers of storages. Two slices are compared before the second is repeated; where they differ, all run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hf_memopt.binding.fused_loss.chunked_loss import each_slice
from hf_memopt.memory.step_time.operations import Operation
from hf_memopt.memory.storage_tracker import StorageTracker

__all__ = ["repeated_slices"]

_RUN = 3  # the first may differ, the others are compared


@contextmanager
def repeated_slices(tracker: StorageTracker) -> Iterator[None]:
    """Run only the first slices of fused losses inside, where they are recorded on the meta device."""

    def each(run: Callable[[slice], None], slices: Sequence[slice]) -> None:
        width = slices[0].stop - slices[0].start
        equal = sum(columns.stop - columns.start == width for columns in slices)  # all, or all but the last
        marks = []
        for columns in slices[:_RUN]:
            marks.append(_Mark.of(tracker))
            run(columns)
        repeats = equal > _RUN and _repeat(tracker, *marks[-2:], times=equal - _RUN)
        for columns in slices[equal if repeats else _RUN :]:
            run(columns)

    if tracker.device_type != "meta":  # there are values, which every slice changes
        yield
        return
    token = each_slice.set(each)
    try:
        yield
    finally:
        each_slice.reset(token)


class _Mark(NamedTuple):
    """The lengths of a tracker's lists, and its floating-point operations, at one moment."""

    events: int
    storages: int
    operations: int
    flops: int
    others: tuple[int, int]

    @classmethod
    def of(cls, tracker: StorageTracker) -> _Mark:
        others = len(tracker.host_events), len(tracker.recomputed)
        return cls(len(tracker.events), len(tracker.sizes), len(_operations(tracker)), tracker.flops, others)


def _operations(tracker: StorageTracker) -> list[tuple[int, Operation]]:
    """Return the operations of the pass that runs."""
    return tracker.operations[-1] if tracker.operations else []


def _repeat(tracker: StorageTracker, before: _Mark, begin: _Mark, *, times: int) -> bool:
    """Note ``times`` times more what was noted since ``begin``.

    Returns:
        Whether it was: only if the same was noted between ``before`` and ``begin``, and if both stretches freed what
        they allocated and nothing else.
    """
    end = _Mark.of(tracker)
    first, second = _stretch(tracker, before, begin), _stretch(tracker, begin, end)
    if first is None or first != second:
        return False
    events, storages, flops = end.events - begin.events, end.storages - begin.storages, end.flops - begin.flops
    later, since = range(1, times + 1), slice(begin.storages, end.storages)
    allocated_at, flops_at = tracker.allocated_at[since], tracker.flops_at[since]
    tracker.allocated_at += [event + events * time for time in later for event in allocated_at]
    tracker.flops_at += [before_it + flops * time for time in later for before_it in flops_at]
    for column in (tracker.sizes, tracker.sequences, tracker.places):
        column += column[since] * times
    happened, costs = tracker.events[begin.events :], _operations(tracker)[begin.operations :]
    tracker.events += [(number + storages * time, delta) for time in later for number, delta in happened]
    _operations(tracker).extend((event + events * time, cost) for time in later for event, cost in costs)
    tracker.flops += flops * times
    return True


def _stretch(tracker: StorageTracker, begin: _Mark, end: _Mark) -> tuple[Any, ...] | None:
    """Return what was noted between two marks, counted from the first; None where it reaches beyond."""
    events = [(number - begin.storages, delta) for number, delta in tracker.events[begin.events : end.events]]
    is_alone = all(number >= 0 for number, _ in events) and len(events) == 2 * (end.storages - begin.storages)
    if not is_alone or begin.others != end.others:
        return None
    storages = slice(begin.storages, end.storages)
    return (
        events,
        tracker.sequences[storages],
        tracker.places[storages],
        [flops - begin.flops for flops in tracker.flops_at[storages]],
        [(event - begin.events, cost) for event, cost in _operations(tracker)[begin.operations : end.operations]],
        end.flops - begin.flops,
    )
