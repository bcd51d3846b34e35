"""What ``CachingAllocator`` holds, by segment: the blocks that are linked with each other and have memory."""

from __future__ import annotations

from hf_memopt.memory.allocator.caching_allocator import CachingAllocator, _Block


def segments_of(allocator: CachingAllocator) -> list[list[_Block]]:
    """Return the blocks of each segment by address; of an expandable segment each stretch of pages is one."""
    blocks = {id(block): block for block in allocator._live.values() if block is not None}
    blocks |= {id(entry[2]): entry[2] for pool in (allocator._small, allocator._large) for entry in pool.free}
    found = []
    for first in sorted(blocks.values(), key=lambda block: block.address):
        if first.prev is None or not first.prev.mapped:
            found.append([first])
            while (behind := found[-1][-1].next) is not None and behind.mapped:
                found[-1].append(behind)
    return found
