"""A slow allocator with the steps of ``c10/cuda/CUDACachingAllocator.cpp``, written from it function by function.

One list of blocks per pool, searched from front to back; the names are those of the source (torch 2.4 to 2.15). Options
are at their defaults; one stream. Addresses fall; which of equal blocks is taken depends on the release. It shares no
code and no data structure with ``CachingAllocator``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

K_MIN_BLOCK_SIZE = 512
K_SMALL_SIZE = 1048576
K_SMALL_BUFFER = 2097152
K_LARGE_BUFFER = 20971520
K_MIN_LARGE_ALLOC = 10485760
K_ROUND_LARGE = 2097152
ADDRESS_SPACE = 1 << 62  # of an expandable segment; torch takes 9/8 of the GPU's memory
FIRST_ADDRESS = 1 << 46  # of segments, which lie below


class OutOfMemoryError(Exception):
    pass


@dataclass(eq=False)
class Block:
    is_small: bool
    size: int
    ptr: int
    registration_counter: int = 0  # of the segment, which all blocks cut from it inherit
    requested_size: int = 0
    allocated: bool = False
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None


class TorchAllocator:
    def __init__(
        self, expandable_segments: bool = False, total_bytes: float = float("inf"), release: tuple[int, ...] = (2, 13)
    ) -> None:
        self.expandable_segments, self.total = expandable_segments, total_bytes
        self.has_counter = release >= (2, 12)
        self.counter = 0
        self.blocks: dict[bool, list[Block]] = {True: [], False: []}  # free ones, by is_small
        self.unmapped: dict[bool, list[Block]] = {True: [], False: []}
        self.active: dict[Hashable, Block | None] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self.next_ptr = FIRST_ADDRESS

    # ---- malloc

    def rename(self, key: Hashable, new_key: Hashable) -> None:
        self.active[new_key] = self.active.pop(key)

    def malloc(self, key: Hashable, orig_size: int) -> int:
        if orig_size == 0:  # NativeCachingAllocator::allocate asks for other sizes only
            self.active[key] = None
            return 0
        size = self.round_size(orig_size)
        block = self.get_free_block(size)
        if block is None:
            block = self.alloc_block(size)
        if block is None:  # release_available_cached_blocks does nothing without max_split_size
            self.empty_cache()
            self.retries += 1
            block = self.alloc_block(size)
        if block is None:
            raise OutOfMemoryError
        block = self.alloc_found_block(block, size)
        block.requested_size = orig_size
        self.active[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.size

    @staticmethod
    def round_size(size: int) -> int:
        if size < K_MIN_BLOCK_SIZE:
            return K_MIN_BLOCK_SIZE
        return K_MIN_BLOCK_SIZE * ((size + K_MIN_BLOCK_SIZE - 1) // K_MIN_BLOCK_SIZE)

    @staticmethod
    def get_allocation_size(size: int) -> int:
        if size <= K_SMALL_SIZE:
            return K_SMALL_BUFFER
        if size < K_MIN_LARGE_ALLOC:
            return K_LARGE_BUFFER
        return K_ROUND_LARGE * ((size + K_ROUND_LARGE - 1) // K_ROUND_LARGE)

    def get_free_block(self, size: int) -> Block | None:
        pool = sorted(self.blocks[size <= K_SMALL_SIZE], key=self.block_comparator)
        fitting = [block for block in pool if block.size >= size]
        if not fitting:
            return None
        found = 0
        if self.expandable_segments:
            while found + 1 < len(fitting) and self.expandable_size(fitting[found + 1]) < self.expandable_size(
                fitting[found]
            ):
                found += 1
        self.blocks[fitting[found].is_small].remove(fitting[found])
        return fitting[found]

    def block_comparator(self, block: Block) -> tuple[int, int, int]:
        """BlockComparatorSizeCounterAddress; before 2.12 BlockComparatorSize."""
        return block.size, block.registration_counter if self.has_counter else 0, block.ptr

    @staticmethod
    def expandable_size(block: Block) -> int:
        behind = block.next
        return block.size + (behind.size if behind is not None and not behind.mapped else 0)

    def alloc_found_block(self, block: Block, size: int) -> Block:
        if self.should_split(block, size):
            remaining = block
            block = Block(remaining.is_small, size, remaining.ptr, remaining.registration_counter)
            block.prev, block.next = remaining.prev, remaining
            if block.prev is not None:
                block.prev.next = block
            remaining.prev = block
            remaining.ptr += size
            remaining.size -= size
            self.blocks[block.is_small].append(remaining)
        block.allocated = True
        return block

    def should_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if block.is_small or self.expandable_segments:
            return remaining >= K_MIN_BLOCK_SIZE
        return remaining > K_SMALL_SIZE

    def alloc_block(self, size: int) -> Block | None:
        if self.expandable_segments:
            return self.try_allocate_expandable_block(size)
        alloc_size = self.get_allocation_size(size)
        if not self.take(alloc_size):
            return None
        self.next_ptr -= alloc_size  # the driver
        self.counter += 1
        return Block(size <= K_SMALL_SIZE, alloc_size, self.next_ptr, self.counter)

    def take(self, size: int) -> bool:
        if self.reserved + size > self.total:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    # ---- expandable segments

    def try_allocate_expandable_block(self, size: int) -> Block | None:
        candidate = self.find_expandable_block(size <= K_SMALL_SIZE, size)
        if not candidate.mapped and not self.map_block(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            new_candidate = candidate.next
            assert new_candidate is not None
            if not self.map_block(new_candidate, min(size - candidate.size, new_candidate.size)):
                return None
            candidate = new_candidate
        self.blocks[candidate.is_small].remove(candidate)
        return candidate

    def find_expandable_block(self, is_small: bool, size: int) -> Block:
        def has_available_address_space(block: Block | None) -> bool:
            room = 0
            while block is not None and not block.allocated and room < size:
                room += block.size
                block = block.next
            return room >= size

        for candidate in sorted(self.unmapped[is_small], key=lambda each: each.ptr):
            before = candidate.prev
            if before is not None and not before.allocated and has_available_address_space(before):
                return before
            if has_available_address_space(candidate):
                return candidate
        created = Block(is_small, ADDRESS_SPACE, 0, mapped=False)
        self.unmapped[is_small].append(created)
        return created

    def map_block(self, to_map: Block, size: int) -> bool:
        page = K_SMALL_BUFFER if to_map.is_small else K_LARGE_BUFFER
        mapped_size = page * ((size + page - 1) // page)
        if not self.take(mapped_size):
            return False
        self.unmapped[to_map.is_small].remove(to_map)
        if mapped_size < to_map.size:
            remaining = Block(to_map.is_small, to_map.size - mapped_size, to_map.ptr + mapped_size, mapped=False)
            self.splice(remaining, to_map, to_map.next)
            self.unmapped[to_map.is_small].append(remaining)
            to_map.size = mapped_size
        to_map.mapped = True
        for neighbour in (to_map.prev, to_map.next):
            self.try_merge_blocks(to_map, neighbour)
        self.blocks[to_map.is_small].append(to_map)
        return True

    def unmap_block(self, block: Block) -> None:
        page = K_SMALL_BUFFER if block.is_small else K_LARGE_BUFFER
        begin = page * ((block.ptr + page - 1) // page)
        end = page * ((block.ptr + block.size) // page)
        if begin >= end:
            return
        self.blocks[block.is_small].remove(block)
        before_size, after_size = begin - block.ptr, block.ptr + block.size - end
        if before_size:
            before_free = Block(block.is_small, before_size, block.ptr)
            self.splice(before_free, block.prev, block)
            self.blocks[block.is_small].append(before_free)
        if after_size:
            after_free = Block(block.is_small, after_size, end)
            self.splice(after_free, block, block.next)
            self.blocks[block.is_small].append(after_free)
        block.ptr, block.size, block.mapped = begin, end - begin, False
        for neighbour in (block.prev, block.next):
            self.try_merge_blocks(block, neighbour)
        self.unmapped[block.is_small].append(block)
        self.reserved -= end - begin

    @staticmethod
    def splice(block: Block, before: Block | None, after: Block | None) -> None:
        block.prev, block.next = before, after
        if before is not None:
            before.next = block
        if after is not None:
            after.prev = block

    # ---- free

    def free(self, key: Hashable) -> int:
        block = self.active.pop(key)
        if block is None:
            return 0
        block.allocated = False
        size = block.size
        self.allocated -= size
        for neighbour in (block.prev, block.next):
            self.try_merge_blocks(block, neighbour)
        self.blocks[block.is_small].append(block)
        return size

    def try_merge_blocks(self, dst: Block, src: Block | None) -> None:
        if src is None or src.allocated or dst.mapped != src.mapped:
            return
        assert dst.is_split
        assert src.is_split
        if dst.prev is src:
            dst.ptr = src.ptr
            dst.prev = src.prev
            if dst.prev is not None:
                dst.prev.next = dst
        else:
            dst.next = src.next
            if dst.next is not None:
                dst.next.prev = dst
        dst.size += src.size
        (self.blocks if src.mapped else self.unmapped)[src.is_small].remove(src)

    def empty_cache(self) -> None:
        """``release_cached_blocks``: large blocks first, then small ones."""
        for is_small in (False, True):
            for block in sorted(self.blocks[is_small], key=lambda each: (each.size, each.ptr)):
                if self.expandable_segments:
                    self.unmap_block(block)
                elif not block.is_split:
                    self.blocks[is_small].remove(block)
                    self.reserved -= block.size
