"""Find the least memory with which a recorded run goes through: its events again, on smaller and smaller GPUs.

With room torch's allocator keeps what is freed, so its peak of reserved bytes is not what a run needs: at its limit it
gives back what lies unused and tries again. The allocator is simulated; a rehearsal with as much memory confirms it.
"""

from __future__ import annotations

from hf_memopt.prediction.memory.allocator import AllocationError, CachingAllocator
from hf_memopt.prediction.rehearsal.events import Event

RISING = (2, 14)  # a release of torch whose rule is that of rising addresses, which the stand-in has for all
FINENESS = 400  # the result is at most 1/400 above the least
WARM_UP, WARM_UP_LEAVES_BYTES = "caching_allocator_warmup", int(1.2 * 2**30)
"""A function of transformers 5.23 that allocates as much as the weights take, but leaves so much of the whole GPU."""


def least_memory(events: list[Event], context_bytes: int, expandable_segments: bool = False) -> tuple[int, str]:
    """Return the bytes that torch's allocator must get, and the phase that runs out of memory with 1 % less."""

    def fails_in(limit: int | None) -> str | None:
        return _fails_in(events, CachingAllocator(expandable_segments, limit, release=RISING), context_bytes)

    unlimited = CachingAllocator(expandable_segments, release=RISING)
    _fails_in(events, unlimited, context_bytes)
    enough, too_little = unlimited.peak_reserved, 0
    while enough - too_little > enough // FINENESS:
        limit = (enough + too_little) // 2
        if fails_in(limit) is None:
            enough = limit
        else:
            too_little = limit
    return enough, fails_in(enough * 99 // 100) or ""


def _fails_in(events: list[Event], allocator: CachingAllocator, context_bytes: int) -> str | None:
    """Return the phase in which memory runs out; None where all goes through."""
    is_emptied = False
    for event in events:
        if event.kind == "allocate":
            asked_bytes = event.requested_bytes
            if allocator.limit_bytes is not None and WARM_UP in event.place:
                left_bytes = allocator.limit_bytes + context_bytes - WARM_UP_LEAVES_BYTES
                asked_bytes = max(0, min(asked_bytes, left_bytes))
            try:
                allocator.malloc(event.number, asked_bytes, event.stream)
            except AllocationError:
                return event.phase
        elif event.kind == "free" and event.number >= 0:
            allocator.free(event.number)
        elif event.kind == "segment freed" and not is_emptied:
            allocator.empty_cache()
        is_emptied = event.kind == "segment freed"
    return None
