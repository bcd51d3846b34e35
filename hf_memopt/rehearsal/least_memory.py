"""Find the least memory with which a recorded run goes through: its events again, on smaller and smaller GPUs.

With room torch's allocator keeps what is freed, so its peak of reserved bytes is not what a run needs: at its limit it
gives back what lies unused and tries again. The allocator is simulated; a rehearsal with as much memory confirms it.
"""

from __future__ import annotations

from hf_memopt.memory.allocator import AllocationError, CachingAllocator
from hf_memopt.rehearsal.events import Event

RISING = (2, 14)  # a release of torch whose rule is that of rising addresses, which the stand-in has for all
FINENESS = 400  # the result is at most 1/400 above the least


def least_memory(events: list[Event], expandable_segments: bool = False) -> tuple[int, str]:
    """Return the bytes that torch's allocator must get, and the phase that runs out of memory with 1 % less."""
    unlimited = CachingAllocator(expandable_segments, release=RISING)
    _fails_in(events, unlimited)
    enough, too_little = unlimited.peak_reserved, unlimited.peak_allocated - 1
    while enough - too_little > enough // FINENESS:
        limit = (enough + too_little) // 2
        if _fails_in(events, CachingAllocator(expandable_segments, limit, release=RISING)) is None:
            enough = limit
        else:
            too_little = limit
    less = CachingAllocator(expandable_segments, enough * 99 // 100, release=RISING)
    return enough, _fails_in(events, less) or ""


def _fails_in(events: list[Event], allocator: CachingAllocator) -> str | None:
    """Return the phase in which memory runs out; None where all goes through."""
    is_emptied = False
    for event in events:
        if event.kind == "allocate":
            try:
                allocator.malloc(event.number, event.requested_bytes)
            except AllocationError:
                return event.phase
        elif event.kind == "free" and event.number >= 0:
            allocator.free(event.number)
        elif event.kind == "segment freed" and not is_emptied:
            allocator.empty_cache()
        is_emptied = event.kind == "segment freed"
    return None
