"""Tells torch's own memory history of a run as a list of events, each with phase, operator and place.

Sizes are what was asked for; torch's allocator rounds them up. Operators have names where values are computed (see
``values.py``). Allocations of the backward pass have no place, since no Python runs there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
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
UNINTERESTING = ("/torch/", "/hf_memopt/rehearsal/", "<frozen", "/contextlib.py", "/functools.py")

_label = {"phase": "", "operator": ""}
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


def set_label(kind: str, name: str) -> str:
    """Say the "phase" or "operator" of what is allocated from now on; return the one before."""
    before, _label[kind] = _label[kind], name
    if _is_recording:
        torch._C._cuda_setMemoryMetadata(f"{_label['phase']} {_label['operator']}")
    return before


def are_recorded() -> bool:
    return _is_recording


@contextlib.contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """Record a run in this process; the list is filled when the block ends, after an error, too.

    Raises:
        RuntimeError: More happened than torch's history was told to keep.
    """
    global _is_recording
    events: list[Event] = []
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, context="alloc", stacks="python")
    _is_recording = True
    try:
        yield events
    finally:
        _is_recording = False
        entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        if len(entries) >= MOST_ENTRIES:
            raise RuntimeError(f"events={len(entries)} fill torch's history; expected fewer. Record a shorter run.")
        events.extend(_events(entries))


def _events(entries: list[dict[str, Any]]) -> Iterator[Event]:
    numbers: dict[int, int] = {}  # of the blocks alive, by address
    allocations = 0
    for entry in entries:
        kind, address, number = KINDS.get(entry["action"]), entry["addr"], -1
        if kind is None:
            continue
        if kind == "allocate":
            number = numbers[address] = allocations
            allocations += 1
        elif kind == "free":
            number = numbers.pop(address, -1)
        phase, _, operator = (entry.get("user_metadata") or " ").partition(" ")
        yield Event(kind, entry["size"], number, phase, operator, _place(entry.get("frames", ())))


def _place(frames: Any) -> str:
    ours = [frame for frame in frames if not any(part in frame["filename"] for part in UNINTERESTING)]
    lines = (f"{f['filename'].rpartition('site-packages/')[2]}:{f['line']} {f['name']}" for f in ours[:2])
    return " < ".join(lines)


def blocks_at_peak(events: list[Event]) -> list[Event]:
    """Return the allocations alive when most was allocated, in their order.

    Their sizes, each rounded up to 512 bytes, add up to ``torch.cuda.max_memory_allocated`` but for remainders below
    1 MiB that torch does not split off, and for blocks older than the record.
    """
    alive: dict[int, Event] = {}
    at_peak: list[Event] = []
    now = peak = 0
    for event in events:
        size = -(-event.requested_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if event.kind == "allocate":
            alive[event.number] = event
            now += size
        elif event.kind == "free" and event.number in alive:
            if now > peak:  # the first free after a new peak
                peak, at_peak = now, list(alive.values())
            now -= size
            del alive[event.number]
    return list(alive.values()) if now > peak else at_peak
