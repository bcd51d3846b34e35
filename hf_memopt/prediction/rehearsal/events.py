"""Tells torch's own memory history of a run as a list of events, each with phase, operator and place.

Sizes are what was asked for; torch's allocator rounds them up. Operators have names where values are computed (see
``values.py``). Allocations of the backward pass have no place, since no Python runs there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Any

import torch

MOST_ENTRIES = 4_000_000
BLOCK_BYTES = 512  # what every block is a multiple of
KINDS = {
    "alloc": "allocate",
    "free_completed": "free",
    "segment_alloc": "segment",
    "segment_map": "segment",
    "segment_free": "segment freed",
    "segment_unmap": "segment freed",
}
UNINTERESTING = (  # torch's own lines, and those that start a script and watch it
    *(
        "/torch/",
        "/hf_memopt/prediction/rehearsal/",
        "/hf_memopt/prediction/recipes/running/",
        "/hf_memopt/training/binding/undo/",
    ),
    *("<frozen", "/contextlib.py", "/functools.py"),
)

labels = {"phase": "", "operator": "", "moment": "0"}
_is_recording = False


@dataclass(frozen=True, slots=True)
class Event:
    """One step of torch's allocator."""

    kind: str  # one of the values of ``KINDS``
    requested_bytes: int  # of a segment, its size
    number: int  # of the allocation, which its free repeats; -1 of segments, and of blocks older than the record
    phase: str  # as of ``peaks_by_phase``; "" outside it
    operator: str  # the innermost one of torch or bitsandbytes; "" outside them
    place: str  # the two innermost lines outside torch: "file:line function < file:line function"
    address: int = 0  # which later blocks may have, too
    moment: int = 0  # how often blocks were given names before, see ``named_blocks``
    stream: int = 0  # of CUDA, whose number means nothing

    @property
    def allocated_bytes(self) -> int:
        """What it changes of the sum of the blocks in the record."""
        size = -(-self.requested_bytes // BLOCK_BYTES) * BLOCK_BYTES
        return 0 if self.number < 0 else size if self.kind == "allocate" else -size


def set_label(kind: str, name: str) -> str:
    """Say the "phase", "operator" or "moment" of what is allocated from now on; return the one before."""
    before, labels[kind] = labels[kind], name
    if _is_recording:
        torch._C._cuda_setMemoryMetadata(" ".join(labels.values()))
    return before


def start_recording() -> None:
    """Let torch keep a history from now on; CUDA must be there."""
    global _is_recording
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, context="alloc", stacks="python")
    _is_recording = True
    set_label("phase", labels["phase"])


def events_so_far() -> list[Event]:
    """Return what was recorded.

    Raises:
        RuntimeError: torch's history of allocations is full.
    """
    entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    if len(entries) >= MOST_ENTRIES:
        raise RuntimeError(f"events={len(entries)} fill torch's history; expected fewer. Record a shorter run.")
    events: list[Event] = []
    numbers: dict[int, int] = {}  # of the blocks alive, by address
    allocations = count()
    for entry in entries:
        kind, address, number = KINDS.get(entry["action"]), entry.get("addr", -1), -1
        if kind is None:
            continue
        if kind == "allocate":
            number = numbers[address] = next(allocations)
        elif kind == "free":
            number = numbers.pop(address, -1)
        phase, operator, moment = (entry.get("user_metadata") or "  0").split(" ")
        place = place_of(entry.get("frames", ()))
        events.append(Event(kind, entry["size"], number, phase, operator, place, address, int(moment), entry["stream"]))
    return events


@contextlib.contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """Record a run in this process; the list is filled when the block ends, after an error, too.

    Raises:
        RuntimeError: the history is full.
    """
    global _is_recording
    events: list[Event] = []
    start_recording()
    try:
        yield events
    finally:
        _is_recording = False
        try:
            events.extend(events_so_far())
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def place_of(frames: Any) -> str:
    """Return the two innermost lines of the user's or a model's code, frames given from the innermost on."""
    ours = islice((frame for frame in frames if _is_interesting(frame["filename"])), 2)
    return " < ".join(f"{f['filename'].rpartition('site-packages/')[2]}:{f['line']} {f['name']}" for f in ours)


@functools.cache
def _is_interesting(path: str) -> bool:
    return not any(part in path for part in UNINTERESTING)


def blocks_at_peak(events: list[Event]) -> list[Event]:
    """Return the allocations alive when most was allocated, in their order.

    Their sizes, each rounded up to 512 bytes, add up to ``torch.cuda.max_memory_allocated`` but for remainders below
    1 MiB that torch does not split off, and for blocks older than the record.
    """
    sums = list(accumulate(event.allocated_bytes for event in events))
    return blocks_alive(events[: sums.index(max(sums)) + 1]) if events else []


def blocks_alive(events: list[Event]) -> list[Event]:
    """Return the allocations that were not freed, in their order."""
    freed = {event.number for event in events if event.kind == "free"}
    return [event for event in events if event.kind == "allocate" and event.number not in freed]


def named_blocks(events: list[Event], names: list[dict[int, str]]) -> dict[int, str]:
    """Return names of allocations by their number: a block has the last one that its address was given in its life.

    Addresses are used again. ``names[moment]`` were given before the first event with a later moment.
    """
    ends = {event.number: event.moment for event in events if event.kind == "free"}
    made = [event for event in events if event.kind == "allocate"]
    lives = ((one, of_moment) for one in made for of_moment in names[one.moment : ends.get(one.number)])
    return {one.number: of_moment[one.address] for one, of_moment in lives if one.address in of_moment}
