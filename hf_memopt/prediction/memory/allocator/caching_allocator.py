"""Simulate torch's CUDA caching allocator: from the sizes of tensors to allocated and reserved bytes, without a GPU.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``, in an older version, with ``CUDAAllocatorConfig``, and in
a newer one, with ``AcceleratorAllocatorConfig``: they agree in everything that is modelled here. The sizes are those in
the headers of torch 2.13. Newer versions let the environment set the 20 MiB (``large_segment_size_mb``); here it is the
default. ``max_split_size_mb``, ``roundup_power2_divisions`` and ``garbage_collection_threshold`` are at their defaults,
that is off.

- A size is rounded up to a multiple of 512 B; an empty tensor gets no block.
- Up to 1 MiB it comes from segments of 2 MiB, which are cut up to the last 512 B. Below 10 MiB it comes from segments
  of 20 MiB; from 10 MiB on the segment is the size, rounded up to 2 MiB. In both a rest of up to 1 MiB is not split off
  but belongs to the block, and counts as allocated.
- Of the free blocks the smallest that is large enough is taken; of equal ones that of the oldest segment, and there the
  lowest address. Before torch 2.12 it is the lowest address of all: that of the newest segment, since the driver places
  each right below the one before (published ``memory_snapshot()`` of an RTX 3090 with CUDA 11.8). Source: CUDA builds
  2.11 to 2.15, given falling and rising addresses by a stand-in; https://github.com/pytorch/pytorch/pull/183591.
- A freed block merges with free neighbours. A segment that is free as a whole stays reserved until the cache is
  emptied.
- Expandable segments: one range of addresses for small and one for large sizes, backed by pages of 2 MiB and 20 MiB
  as it fills. Emptying the cache gives back every page that is free as a whole.

Limitations: CUDA graphs and memory pools, and memory outside this allocator (the context, NCCL). Torch
2.12 alone prefers the block that was cut first, here the lowest address (https://github.com/pytorch/pytorch/pull/178362).
Assumed: addresses of segments that were returned to the driver are not used again (it matters for equal sizes only).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from hf_memopt.prediction.memory.cuda import TORCH_RELEASE

# The constants of c10: kMinBlockSize, kSmallSize, kMinLargeAlloc, kSmallBuffer, kRoundLarge; large_segment_size().
_ROUNDING_BYTES = 512
LARGEST_SMALL_BYTES = 2**20
_LARGE_ALONE_BYTES = 10 * 2**20
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
_LARGE_ROUNDING_BYTES = 2 * 2**20

_FIRST_ADDRESS = 2**46  # of segments, about where Linux has them

# Addresses of an expandable segment, in whole pages. Torch takes 9/8 of the GPU's memory; here no int64 fills them.
_ADDRESS_RANGE_BYTES = _LARGE_SEGMENT_BYTES * 2**64


class AllocationError(RuntimeError):
    """The simulated GPU is full; a real run would raise ``torch.OutOfMemoryError``."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, linked with its neighbours in the segment."""

    pool: _Pool
    address: int
    size: int
    mapped: bool = True
    prev: _Block | None = None
    next: _Block | None = None
    allocated: bool = False

    def cut(self, size: int) -> _Block:
        """Keep the first ``size`` bytes; return the rest, linked behind."""
        behind = self.next
        rest = _Block(self.pool, self.address + size, self.size - size, self.mapped, self, behind)
        if behind is not None:
            behind.prev = rest
        self.next, self.size = rest, size
        return rest


class _Pool:
    """The unused blocks of small or of large sizes.

    Attributes:
        page_bytes: of an expandable segment.
        least_rest_bytes: the smallest rest that is split off a block.
        free: (size, address, block) in order: a search finds the best fit.
        unmapped: (address, block) in order: addresses of an expandable segment without memory behind them.
    """

    __slots__ = ("free", "is_small", "least_rest_bytes", "page_bytes", "unmapped")

    def __init__(self, is_small: bool, expandable: bool) -> None:
        self.is_small = is_small
        self.page_bytes = _SMALL_SEGMENT_BYTES if is_small else _LARGE_SEGMENT_BYTES
        self.least_rest_bytes = _ROUNDING_BYTES if is_small or expandable else LARGEST_SMALL_BYTES + _ROUNDING_BYTES
        self.free: list[tuple[int, int, _Block]] = []
        self.unmapped: list[tuple[int, _Block]] = []
        if expandable:
            self.add(_Block(self, 0 if is_small else _ADDRESS_RANGE_BYTES, _ADDRESS_RANGE_BYTES, mapped=False))

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def add_merged(self, block: _Block) -> None:
        """Add a block, merged with its neighbours of the same kind: free, or without memory behind them."""
        before, behind, mapped = block.prev, block.next, block.mapped
        if before is not None and not before.allocated and before.mapped == mapped:
            self.remove(before)
            block.address = before.address
            block.size += before.size
            block.prev = first = before.prev
            if first is not None:
                first.next = block
        if behind is not None and not behind.allocated and behind.mapped == mapped:
            self.remove(behind)
            block.size += behind.size
            block.next = last = behind.next
            if last is not None:
                last.prev = block
        self.add(block)


class CachingAllocator:
    """Allocate and free by key, and count what torch counts. Bytes everywhere.

    Args:
        expandable_segments: as with ``expandable_segments:True`` in ``compat.allocator_variable()``.
        limit_bytes: what the allocator can get: the GPU's memory without the context and other programs; None for no
            limit. At the limit unused blocks are returned to the driver first, as torch does, which costs time but no
            memory: so a run may fit a GPU that is smaller than its peak of reserved bytes without a limit.
        release: of torch, such as (2, 14), whose choice among equal blocks is made; None for the installed one.

    Attributes:
        allocated: ``torch.cuda.memory_allocated()``: the blocks in use, rounding and rests included.
        reserved: ``torch.cuda.memory_reserved()``.
        peak_allocated: the largest so far.
        peak_reserved: the same of reserved bytes.
        retries: ``num_alloc_retries``: how often the limit made the allocator empty its cache.

    Examples:
        >>> allocator = CachingAllocator()
        >>> allocator.malloc("weight", 3_000_000)
        3000320
        >>> allocator.allocated, allocator.reserved
        (3000320, 20971520)
    """

    def __init__(self, expandable_segments: bool = False, limit_bytes: int | None = None, release: Any = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        self._expandable = expandable_segments
        self._pools: dict[tuple[bool, int], _Pool] = {}  # of small blocks or of large ones, by stream
        self._live: dict[Hashable, _Block | None] = {}
        self._takes_oldest = (release or TORCH_RELEASE) >= (2, 12)
        self._edge = _FIRST_ADDRESS  # of all segments so far

    def malloc(self, key: Hashable, size_bytes: int, stream: int = 0) -> int:
        """Allocate ``size_bytes`` under a key that has no block, and return the size of the block.

        A stream takes only blocks that it has freed itself.

        Raises:
            AllocationError: there is no room within the limit, even with the cache emptied.
        """
        if size_bytes == 0:
            self._live[key] = None
            return 0
        size = -(-size_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
        kind = size <= LARGEST_SMALL_BYTES, stream
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._pools[kind] = _Pool(kind[0], self._expandable)
        block = self._take_free(pool, size)
        if block is None:
            grow = self._expand if self._expandable else self._add_segment
            block = grow(pool, size)
            if block is None:  # at the limit: once more with the cache emptied
                self.empty_cache()
                self.retries += 1
                block = grow(pool, size)
        if block is None:
            raise AllocationError(f"{size_bytes} bytes do not fit: {self.reserved} of {self.limit_bytes} are reserved")
        rest_bytes = block.size - size
        if rest_bytes >= pool.least_rest_bytes:
            insort(pool.free, (rest_bytes, block.address + size, block.cut(size)))
        block.allocated = True
        self._live[key] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block.size

    def free(self, key: Hashable) -> int:
        """Give the key's block back to the cache and return its size."""
        block = self._live.pop(key)
        if block is None:
            return 0
        size = block.size
        self.allocated -= size
        block.allocated = False
        block.pool.add_merged(block)
        return size

    def rename(self, key: Hashable, new_key: Hashable) -> None:
        """Give the key's block another key; nothing is allocated or freed."""
        self._live[new_key] = self._live.pop(key)

    def empty_cache(self) -> None:
        """Return to the driver what is free as a whole: segments, or pages of expandable segments."""
        for pool in self._pools.values():
            if self._expandable:
                for _, _, block in list(pool.free):
                    self._unmap(block)
                continue
            for size, _, block in pool.free:
                if block.prev is None and block.next is None:
                    self.reserved -= size
            pool.free = [entry for entry in pool.free if entry[2].prev is not None or entry[2].next is not None]

    def _take_free(self, pool: _Pool, size: int) -> _Block | None:
        """Take the best fit of the free blocks (``get_free_block``)."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self._expandable:  # a block that can still grow counts as large as it can become
            while index + 1 < len(free) and _room_to_grow(free[index + 1][2]) < _room_to_grow(free[index][2]):
                index += 1
        return free.pop(index)[2]

    def _reserve(self, size: int) -> bool:
        """Count memory from the driver; False if the GPU has no more."""
        if self.limit_bytes is not None and self.reserved + size > self.limit_bytes:
            return False
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return True

    def _add_segment(self, pool: _Pool, size: int) -> _Block | None:
        """Take a segment of its own (``get_allocation_size``)."""
        if pool.is_small:
            segment_bytes = _SMALL_SEGMENT_BYTES
        elif size < _LARGE_ALONE_BYTES:
            segment_bytes = _LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-size // _LARGE_ROUNDING_BYTES) * _LARGE_ROUNDING_BYTES
        if not self._reserve(segment_bytes):
            return None
        address = self._edge if self._takes_oldest else self._edge - segment_bytes  # rising: by age, lowest first
        self._edge += segment_bytes if self._takes_oldest else -segment_bytes
        return _Block(pool, address, segment_bytes)

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the first addresses with room for ``size`` bytes (``try_allocate_expandable_block``)."""
        block = next(start for _, hole in pool.unmapped if (start := _start_of_room(hole, size)) is not None)
        while not block.mapped or block.size < size:
            hole = block if not block.mapped else block.next
            missing = size if hole is block else size - block.size
            if hole is None or not self._map(hole, min(missing, hole.size)):
                return None
            block = hole
        pool.remove(block)
        return block

    def _map(self, hole: _Block, size: int) -> bool:
        """Map pages to the first ``size`` bytes of a hole, and merge them with free neighbours (``map_block``).

        Nothing is mapped if not all the pages fit.
        """
        pool = hole.pool
        mapped_bytes = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped_bytes):
            return False
        pool.remove(hole)
        if mapped_bytes < hole.size:
            pool.add(hole.cut(mapped_bytes))
        hole.mapped = True
        pool.add_merged(hole)
        return True

    def _unmap(self, block: _Block) -> None:
        """Unmap the pages that lie entirely in a free block (``unmap_block``)."""
        pool = block.pool
        start = -(-block.address // pool.page_bytes) * pool.page_bytes
        end = (block.address + block.size) // pool.page_bytes * pool.page_bytes
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            inner = block.cut(start - block.address)
            pool.add(block)
            block = inner
        if end < block.address + block.size:
            pool.add(block.cut(end - start))
        block.mapped = False
        pool.add_merged(block)
        self.reserved -= end - start


def _room_to_grow(block: _Block) -> int:
    """Return the size of a block together with the unmapped addresses right behind it."""
    behind = block.next
    return block.size if behind is None or behind.mapped else block.size + behind.size


def _start_of_room(hole: _Block, size: int) -> _Block | None:
    """Return the block from which ``size`` bytes are free or unmapped, the hole or the one before; None if fewer."""
    start = hole.prev if hole.prev is not None and not hole.prev.allocated else hole
    room = 0
    block: _Block | None = start
    while room < size and block is not None and not block.allocated:
        room += block.size
        block = block.next
    return start if room >= size else None
