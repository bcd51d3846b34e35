"""Tells torch's own memory history of a run as a list of events, each with phase, operator and place.

Sizes are what was asked for; torch's allocator rounds them up. Operators have names where values are computed (see
``values.py``); allocations of the backward pass have no place, since no Python runs there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

MOST_ENTRIES = 4_000_000
KINDS = {"alloc": "allocate", "free_completed": "free", "segment_alloc": "segment", "segment_map": "segment"}
KINDS |= {"segment_free": "segment freed", "segment_unmap": "segment freed"}
UNINTERESTING = ("/torch/", "/hf_memopt/rehearsal/", "<frozen", "/contextlib.py", "/functools.py")
BLOCK_BYTES = 512  # what every block is a multiple of

_label = {"phase": "", "operator": ""}
_recordings = 0


@dataclass(frozen=True, slots=True)
class Event:
    """One step of torch's allocator.

    Attributes:
        kind: "allocate", "free", "segment" (reserved from the driver) or "segment freed".
        requested_bytes: What the operator asked for; of a segment, its size.
        number: Counts allocations; a free has that of its allocation. -1 of segments, and of blocks older than the record.
        phase: As of ``peaks_by_phase``; "" outside it.
        operator: The innermost operator of torch or bitsandbytes; "" outside them.
        place: The two innermost lines outside torch that allocated the block: "file:line function < file:line function".
    """

    kind: str
    requested_bytes: int
    number: int
    phase: str
    operator: str
    place: str


def set_label(kind: str, name: str) -> str:
    """Say the "phase" or "operator" of what is allocated from now on; return the one before."""
    before, _label[kind] = _label[kind], name
    if _recordings:
        torch._C._cuda_setMemoryMetadata(f"{_label['phase']} {_label['operator']}")
    return before


def are_recorded() -> bool:
    return _recordings > 0


@contextlib.contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """Record a run in this process; the list is filled when the block ends, after an error, too.

    Raises:
        RuntimeError: More happened than torch's history was told to keep.
    """
    global _recordings
    events: list[Event] = []
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, context="alloc", stacks="python")
    _recordings += 1
    try:
        yield events
    finally:
        _recordings -= 1
        entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        if len(entries) >= MOST_ENTRIES:
            raise RuntimeError(f"events={len(entries)} fill torch's history; expected fewer. Record a shorter run.")
        events.extend(_events(entries))


def _events(entries: list[dict[str, Any]]) -> Iterator[Event]:
    numbers: dict[int, int] = {}  # of the blocks alive, by address
    allocations = 0
    for entry in entries:
        kind = KINDS.get(entry["action"])
        if kind is None:
            continue
        number = -1
        if kind == "allocate":
            number = numbers[entry["addr"]] = allocations
            allocations += 1
        elif kind == "free":
            number = numbers.pop(entry["addr"], -1)
        phase, _, operator = (entry.get("user_metadata") or " ").partition(" ")
        yield Event(kind, entry["size"], number, phase, operator, _place(entry))


def _place(entry: dict[str, Any]) -> str:
    frames = [
        frame for frame in entry.get("frames", ()) if not any(part in frame["filename"] for part in UNINTERESTING)
    ]
    lines = (f"{f['filename'].rpartition('site-packages/')[2]}:{f['line']} {f['name']}" for f in frames[:2])
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
