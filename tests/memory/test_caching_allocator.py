"""``memory.allocator``: against a slow version without blocks or links, figures of torch's own tests, and by hand."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from allocator_segments import segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.memory.allocator import caching_allocator as module
from hf_memopt.memory.allocator.caching_allocator import AllocationError, CachingAllocator

KIB = 2**10
MIB = 2**20


# A slow version that keeps no free blocks at all: only which bytes of which segment are in use. What is free is worked
# out anew at every step as the gaps between; they are as long as can be, because torch merges free neighbours at once.


@dataclass
class PlainSegment:
    """One range of addresses.

    ``used`` is first byte -> (key, bytes); ``pages`` are the numbers of those that memory stands behind, None where it
    stands behind all ``size`` bytes.
    """

    order: int
    small: bool
    size: float
    address: int = 0
    pages: set[int] | None = None
    used: dict[int, tuple[Any, int]] = field(default_factory=dict)

    @property
    def page_bytes(self) -> int:
        return 2 * MIB if self.small else 20 * MIB

    def not_used(self) -> list[tuple[int, float]]:
        """(first byte, end) of each gap between used bytes."""
        starts = [0, *(start + size for start, (_, size) in sorted(self.used.items()))]
        ends = [*sorted(self.used), self.size]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def free(self) -> list[tuple[int, float]]:
        """The parts of the gaps with memory behind them."""
        if self.pages is None:
            return self.not_used()
        found: list[tuple[int, float]] = []
        for start, end in self.not_used():
            for page in sorted(self.pages):
                left, right = max(start, page * self.page_bytes), min(end, (page + 1) * self.page_bytes)
                if left >= right:
                    continue
                if found and found[-1][1] == left:
                    found[-1] = (found[-1][0], right)
                else:
                    found.append((left, right))
        return found

    def holes(self) -> list[tuple[int, float]]:
        """(first byte, end) of the stretches without memory; the last one never ends."""
        assert self.pages is not None
        last = max(self.pages, default=-1) + 1
        missing = [page for page in range(last) if page not in self.pages]
        runs: list[list[int]] = []
        for page in missing:
            if runs and runs[-1][1] == page:
                runs[-1][1] = page + 1
            else:
                runs.append([page, page + 1])
        found: list[tuple[int, float]] = [(a * self.page_bytes, b * self.page_bytes) for a, b in runs]
        return [*found, (last * self.page_bytes, self.size)]


class PlainAllocator:
    def __init__(self, expandable_segments: bool = False, limit_bytes: int | None = None) -> None:
        self.expandable, self.limit = expandable_segments, float("inf") if limit_bytes is None else limit_bytes
        self.segments = [PlainSegment(i, small, float("inf"), pages=set()) for i, small in enumerate((True, False))]
        if not expandable_segments:
            self.segments = []
        self.empty: set[Any] = set()
        self.next_address = module._TOP_ADDRESS
        self.retries = self.peak_allocated = self.peak_reserved = 0

    @property
    def allocated(self) -> int:
        return sum(size for segment in self.segments for _, size in segment.used.values())

    @property
    def reserved(self) -> int:
        if self.expandable:
            return sum(len(segment.pages) * segment.page_bytes for segment in self.segments)
        return sum(segment.size for segment in self.segments)

    def malloc(self, key: Any, size_bytes: int) -> None:
        if size_bytes == 0:
            self.empty.add(key)
            return
        size = 512
        while size < size_bytes:
            size += 512
        small = size <= MIB
        place = self.best_gap(small, size)
        if place is None:
            place = self.new_place(small, size)
        if place is None:
            self.retries += 1
            self.empty_cache()
            place = self.new_place(small, size)
        if place is None:
            raise AllocationError
        segment, start, end = place
        rest = end - start - size
        cut = rest >= 512 if small or self.expandable else rest > MIB
        segment.used[start] = (key, size if cut else end - start)
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def best_gap(self, small: bool, size: int) -> Any:
        gaps = [
            (end - start, segment.order, start, segment)
            for segment in self.segments
            if segment.small == small
            for start, end in segment.free()
        ]
        gaps = sorted(gap for gap in gaps if gap[0] >= size)
        if not gaps:
            return None
        chosen = gaps[0]
        if self.expandable:
            for one in gaps[1:]:
                if self.can_become(one) >= self.can_become(chosen):
                    break
                chosen = one
        length, _, start, segment = chosen
        return segment, start, start + length

    def can_become(self, gap: Any) -> float:
        """The size of a gap, and of the hole behind it if there is one."""
        length, _, start, segment = gap
        return next((end - start for hole, end in segment.holes() if hole == start + length), length)

    def new_place(self, small: bool, size: int) -> Any:
        if self.expandable:
            return self.extended(self.segments[0 if small else 1], size)
        if small:
            segment_bytes = 2 * MIB
        elif size < 10 * MIB:
            segment_bytes = 20 * MIB
        else:
            segment_bytes = 2 * MIB
            while segment_bytes < size:
                segment_bytes += 2 * MIB
        if self.reserved + segment_bytes > self.limit:
            return None
        self.next_address -= segment_bytes  # the driver places each segment below the one before
        self.segments.append(PlainSegment(self.next_address, small, segment_bytes, self.next_address))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self.segments[-1], 0, segment_bytes

    def extended(self, segment: PlainSegment, size: int) -> Any:
        for hole, _ in segment.holes():
            start = next((a for a, b in segment.free() if b == hole), hole)
            end = next(b for a, b in segment.not_used() if a <= start < b)
            if end - start >= size:
                break
        for first, last in [(a, b) for a, b in segment.holes() if start <= a < start + size]:
            pages = range(first // segment.page_bytes, -(-min(last, start + size) // segment.page_bytes))
            if self.reserved + len(pages) * segment.page_bytes > self.limit:
                return None
            segment.pages.update(pages)
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        return segment, start, next(b for a, b in segment.free() if a <= start < b)

    def free(self, key: Any) -> None:
        if key in self.empty:
            self.empty.remove(key)
            return
        for segment in self.segments:
            segment.used = {start: block for start, block in segment.used.items() if block[0] != key}

    def empty_cache(self) -> None:
        if not self.expandable:
            self.segments = [segment for segment in self.segments if segment.used]
        for segment in self.segments if self.expandable else ():
            gaps, page = segment.not_used(), segment.page_bytes
            segment.pages -= {p for p in segment.pages for a, b in gaps if a <= p * page and (p + 1) * page <= b}


def layout(allocator: CachingAllocator) -> list[tuple[str, list[tuple[int, int, bool]]]]:
    """(pool, [(address, bytes, in use)]) of each segment, in the order in which they were made.

    Addresses count from the start of the segment, those of expandable segments from the start of the range.
    """
    found = []
    fixed = 1 if allocator._expandable else -1
    for segment in sorted(segments_of(allocator), key=lambda blocks: blocks[0].address * fixed):
        start = segment[0].address
        if allocator._expandable:
            start = start // module._ADDRESS_RANGE_BYTES * module._ADDRESS_RANGE_BYTES
        blocks = [(block.address - start, block.size, block.allocated) for block in segment]
        found.append(("small" if segment[0].pool.is_small else "large", blocks))
    return found


def plain_layout(plain: PlainAllocator) -> list[tuple[str, list[tuple[int, int, bool]]]]:
    found = []
    for segment in plain.segments:
        blocks = [(start, size, True) for start, (_, size) in segment.used.items()]
        blocks += [(start, end - start, False) for start, end in segment.free()]
        joined: list[list[Any]] = []
        for block in sorted(blocks):
            start = block[0]
            if not joined or joined[-1][-1][0] + joined[-1][-1][1] != start:
                joined.append([])
            joined[-1].append(block)
        found += [("small" if segment.small else "large", [tuple(block) for block in run]) for run in joined]
    return found


def check_invariants(allocator: CachingAllocator) -> None:
    segments = segments_of(allocator)
    end = 0
    for segment in segments:
        assert segment[0].address >= end
        end = segment[0].address
        for block in segment:
            assert block.address == end
            assert block.size > 0
            assert block.size % 512 == 0
            end += block.size
        assert (False, False) not in pairwise(block.allocated for block in segment)
    blocks = [block for segment in segments for block in segment]
    assert sum(block.size for block in blocks) == allocator.reserved
    assert sum(block.size for block in blocks if block.allocated) == allocator.allocated
    assert allocator.allocated <= allocator.reserved
    assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved
    assert allocator.reserved <= allocator.peak_reserved


SIZES = st.one_of(
    st.sampled_from(
        [0, 1, 512, 513, MIB - 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 19 * MIB, 20 * MIB]
    ),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 50 * MIB),
    st.integers(1, 24).map(lambda count: count * MIB),  # equal sizes, so that frees leave ties
)
# An integer frees the key at that place of those alive.
PROGRAMS = st.lists(
    st.one_of(
        SIZES.map(lambda size: ("malloc", size)),
        SIZES.map(lambda size: ("malloc", size)),
        st.integers(0, 1000).map(lambda place: ("free", place)),
        st.integers(0, 1000).map(lambda place: ("free", place)),
        st.just(("empty_cache", 0)),
    ),
    max_size=60,
)


def run_both(program: list[tuple[str, int]], expandable_segments: bool, limit_bytes: int | None) -> CachingAllocator:
    """Run a program in both versions, compare after every step, free what is left; return the fast one."""
    fast = CachingAllocator(expandable_segments, limit_bytes)
    plain = PlainAllocator(expandable_segments, limit_bytes)
    live: list[int] = []
    for key, (action, value) in enumerate(program):
        if action == "malloc":
            fits = []
            for allocator in (fast, plain):
                try:
                    allocator.malloc(key, value)
                    fits.append(True)
                except AllocationError:
                    fits.append(False)
            assert fits[0] == fits[1]
            live += [key] if fits[0] else []
        elif action == "free" and live:
            freed = live.pop(value % len(live))
            fast.free(freed)
            plain.free(freed)
        elif action == "empty_cache":
            fast.empty_cache()
            plain.empty_cache()
        for name in ("allocated", "reserved", "peak_allocated", "peak_reserved", "retries"):
            assert getattr(fast, name) == getattr(plain, name), name
        assert layout(fast) == plain_layout(plain)
        check_invariants(fast)
    for key in live:
        fast.free(key)
    return fast


@settings(max_examples=200)
@given(PROGRAMS, st.booleans())
def test_equals_the_slow_version_after_every_step(program, expandable_segments):
    fast = run_both(program, expandable_segments, limit_bytes=None)
    assert fast.retries == 0
    assert fast.allocated == 0
    fast.empty_cache()
    assert (fast.reserved, segments_of(fast)) == (0, [])


@settings(max_examples=200)
@given(PROGRAMS, st.booleans(), st.integers(0, 160).map(lambda count: count * MIB))
def test_equals_the_slow_version_on_a_gpu_that_fills_up(program, expandable_segments, limit_bytes):
    fast = run_both(program, expandable_segments, limit_bytes)
    assert fast.peak_reserved <= limit_bytes
    fast.empty_cache()
    assert (fast.allocated, fast.reserved, segments_of(fast)) == (0, 0, [])


@given(PROGRAMS, st.booleans())
def test_a_limit_that_is_never_reached_changes_nothing(program, expandable_segments):
    free = run_both(program, expandable_segments, limit_bytes=None)
    limited = run_both(program, expandable_segments, limit_bytes=free.peak_reserved)
    assert limited.retries == 0
    assert layout(limited) == layout(free)


# Figures that torch expects of a GPU in test_graph_memory_stats_and_use_result_after_destroy_graph of
# test/test_cuda.py, which test_cuda_expandable_segments.py runs once more. Bytes of a tensor; segments and reserved
# bytes while `b = a.clone()` and five times `b = b.clone() + 1` run in an empty pool; reserved bytes when only b is
# left; the two reserved figures once more with expandable segments, where it matters which block b ends in.
TORCH_TESTS = [
    (512, 1, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB),
    (MIB, 2, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB),
    (MIB + 512, 1, 20 * MIB, 20 * MIB, 20 * MIB, 20 * MIB),
    (10 * MIB - 512, 2, 40 * MIB, 20 * MIB, 40 * MIB, 40 * MIB),
    (10 * MIB + 512, 3, 36 * MIB, 12 * MIB, 40 * MIB, 20 * MIB),
]


@pytest.mark.parametrize(
    ("size", "segments", "reserved", "reserved_by_b", "expandable", "expandable_by_b"), TORCH_TESTS
)
def test_the_figures_of_torchs_own_test_on_a_gpu(size, segments, reserved, reserved_by_b, expandable, expandable_by_b):
    for by_pages, expected, expected_by_b in ((False, reserved, reserved_by_b), (True, expandable, expandable_by_b)):
        allocator = CachingAllocator(expandable_segments=by_pages)
        allocator.malloc("b0", size)
        for step in range(5):
            allocator.malloc("clone", size)
            allocator.malloc(f"b{step + 1}", size)
            allocator.free("clone")
            allocator.free(f"b{step}")
        assert allocator.reserved == expected
        assert len(segments_of(allocator)) == (1 if by_pages else segments)
        allocator.empty_cache()
        assert allocator.reserved == expected_by_b
        assert allocator.allocated == size


def filled(*sizes: int, **arguments: Any) -> CachingAllocator:
    """An allocator with a block of each size, under the keys 0, 1, 2 ..."""
    allocator = CachingAllocator(**arguments)
    for key, size in enumerate(sizes):
        allocator.malloc(key, size)
    return allocator


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),  # allocate() asks malloc() for sizes other than 0 only
        (1, 512, 2 * MIB),  # round_size: at least kMinBlockSize
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),  # round_size: up to a multiple of kMinBlockSize
        (MIB, MIB, 2 * MIB),  # get_allocation_size: size <= kSmallSize -> kSmallBuffer
        (MIB + 1, MIB + 512, 20 * MIB),  # size < kMinLargeAlloc -> the large segment
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded first, compared then: a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # up to a multiple of kRoundLarge; the rest is cut off
        (11 * MIB, 12 * MIB, 12 * MIB),  # should_split: no, the rest is not larger than kSmallSize
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # should_split: yes, by 512 bytes
    ],
)
def test_the_first_block(size, allocated, reserved):
    allocator = filled(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (allocated, reserved)


def test_a_rest_of_up_to_one_mib_counts_as_allocated_until_its_block_is_freed():
    allocator = filled(11 * MIB)
    assert layout(allocator) == [("large", [(0, 12 * MIB, True)])]
    allocator.free(0)
    assert (allocator.allocated, allocator.reserved) == (0, 12 * MIB)


def test_small_segments_are_cut_to_the_last_512_bytes():
    allocator = filled(MIB, MIB - 512, 512)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.malloc("more", 1)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB + 512, 4 * MIB)


def test_small_and_large_sizes_do_not_share_free_blocks():
    allocator = filled(2 * MIB, 10 * KIB)  # get_pool: 18 MiB are free, but of the large pool
    assert allocator.reserved == 22 * MIB
    allocator.free(1)
    allocator.malloc("large", 19 * MIB)
    assert allocator.reserved == 42 * MIB


def test_the_smallest_block_that_fits_is_taken_and_cut():
    allocator = filled(40 * MIB, 30 * MIB, 20 * MIB)
    for key in (0, 1, 2):
        allocator.free(key)
    allocator.malloc("a", 21 * MIB)
    sizes = [[(size, used) for _, size, used in blocks] for _, blocks in layout(allocator)]
    assert sizes == [[(40 * MIB, False)], [(21 * MIB, True), (9 * MIB, False)], [(20 * MIB, False)]]
    assert allocator.reserved == 90 * MIB


def test_of_equal_blocks_the_lowest_address_is_taken_which_is_that_of_the_newest_segment():
    allocator = filled(16 * MIB, 16 * MIB)
    allocator.free(1)
    allocator.free(0)
    allocator.malloc("a", 16 * MIB)
    assert [blocks[0][2] for _, blocks in layout(allocator)] == [False, True]


# Published segments of torch.cuda.memory_snapshot() on an RTX 3090 (CUDA 11.8), by address: one of 20 MiB came first,
# those of 512 and of 1024 MiB later. (Without a small segment of 2 MiB, 24 MiB above the start of the first.)
SNAPSHOT = [(140197194891264, 1024 * MIB), (140198268633088, 512 * MIB), (140198805504000, 20 * MIB)]


def test_segments_lie_below_each_other_as_on_a_gpu():
    allocator = filled(5 * MIB, 512 * MIB, 1024 * MIB)
    ours = [(blocks[0].address, sum(block.size for block in blocks)) for blocks in segments_of(allocator)]
    assert [(start - ours[0][0], size) for start, size in ours] == [
        (start - SNAPSHOT[0][0], size) for start, size in SNAPSHOT
    ]


def test_freed_neighbours_merge_on_both_sides_but_not_across_segments():
    allocator = filled(4 * MIB, 4 * MIB, 4 * MIB, 8 * MIB, 20 * MIB)
    for key in (0, 2, 4):
        allocator.free(key)
    allocator.malloc("a", 12 * MIB)  # from the 20 MiB of key 4: the three holes of 4 MiB do not touch
    assert allocator.reserved == 40 * MIB
    allocator.free("a")
    allocator.free(1)
    assert [size for _, size, _ in layout(allocator)[0][1]] == [12 * MIB, 8 * MIB]
    allocator.free(3)
    allocator.malloc("b", 20 * MIB)
    allocator.malloc("c", 20 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.malloc("d", 20 * MIB)
    assert allocator.reserved == 60 * MIB


def test_emptying_the_cache_gives_back_only_segments_that_are_free_as_a_whole():
    allocator = filled(15 * MIB, 15 * MIB, 4 * MIB, 4 * MIB, 100)
    for key in (0, 2, 4):
        allocator.free(key)
    assert allocator.reserved == 16 * MIB + 16 * MIB + 20 * MIB + 2 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 16 * MIB + 20 * MIB
    assert allocator.peak_reserved == 54 * MIB


def test_expandable_segments_grow_by_pages_and_cut_off_every_rest():
    allocator = filled(11 * MIB, 100, expandable_segments=True)
    assert (allocator.allocated, allocator.reserved) == (11 * MIB + 512, 22 * MIB)  # 20 MiB and 2 MiB
    allocator.malloc("a", 15 * MIB)  # 9 MiB are there, one page more
    assert (allocator.allocated, allocator.reserved) == (26 * MIB + 512, 42 * MIB)
    allocator.malloc("b", 14 * MIB)
    assert allocator.reserved == 42 * MIB


def test_expandable_segments_give_back_the_pages_inside_a_free_block():
    allocator = filled(30 * MIB, 55 * MIB, 5 * MIB, expandable_segments=True)
    assert allocator.reserved == 100 * MIB  # 90 MiB in pages of 20
    allocator.free(1)
    allocator.empty_cache()  # of 30 to 85 MiB the pages from 40 to 80 MiB
    assert allocator.reserved == 60 * MIB
    assert layout(allocator) == [
        ("large", [(0, 30 * MIB, True), (30 * MIB, 10 * MIB, False)]),
        ("large", [(80 * MIB, 5 * MIB, False), (85 * MIB, 5 * MIB, True), (90 * MIB, 10 * MIB, False)]),
    ]
    allocator.malloc("a", 45 * MIB)  # find_expandable_block: from the free 10 MiB before the hole, two pages more
    assert allocator.reserved == 100 * MIB
    assert layout(allocator)[0][1][1] == (30 * MIB, 45 * MIB, True)


def test_expandable_segments_prefer_a_larger_free_block_to_the_growing_end():
    allocator = filled(18 * MIB, 2 * MIB, 12 * MIB, expandable_segments=True)  # 8 MiB are left at the end
    allocator.free(0)  # 18 MiB at the start
    allocator.malloc("a", 6 * MIB)  # get_free_block: 8 MiB fit best, but they can become more than the 18 MiB
    assert layout(allocator)[0][1][0] == (0, 6 * MIB, True)


def test_expandable_segments_pass_over_every_block_that_can_grow():
    allocator = filled(28 * MIB, 44 * MIB, 2 * MIB, expandable_segments=True)
    allocator.free(1)
    allocator.empty_cache()  # 12 MiB before a hole and 12 MiB behind it, 6 MiB at the end
    allocator.malloc("a", 5 * MIB)
    assert layout(allocator)[1][1][0] == (60 * MIB, 5 * MIB, True)


def test_of_equal_blocks_of_an_expandable_segment_the_lowest_address_is_taken():
    allocator = filled(4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, expandable_segments=True)
    allocator.free(0)
    allocator.free(2)
    allocator.malloc("a", 4 * MIB)
    assert [block[2] for block in layout(allocator)[0][1]] == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("expandable_segments", "peak", "needed"),
    # One after the other 30, 40 and 50 MiB. Unlimited, each is a new segment: 120 MiB; or the end grows: 60 MiB.
    [(False, 120 * MIB, 50 * MIB), (True, 60 * MIB, 60 * MIB)],
)
def test_a_run_may_fit_a_gpu_smaller_than_its_reserved_peak(expandable_segments, peak, needed):
    def run(limit_bytes: int | None) -> CachingAllocator:
        allocator = CachingAllocator(expandable_segments, limit_bytes)
        for size in (30 * MIB, 40 * MIB, 50 * MIB):
            allocator.malloc("a", size)
            allocator.free("a")
        return allocator

    assert run(None).peak_reserved == peak
    assert run(needed).peak_reserved <= needed
    assert run(needed).retries == (0 if expandable_segments else 2)
    with pytest.raises(AllocationError):
        run(needed - 1)


def test_at_the_limit_all_unused_segments_go_not_just_enough():
    allocator = filled(10 * MIB, 10 * MIB, 100, 4 * MIB, limit_bytes=42 * MIB)
    for key in (0, 1, 2):
        allocator.free(key)
    assert allocator.reserved == 42 * MIB
    allocator.malloc("a", 18 * MIB)  # release_cached_blocks; release_available_cached_blocks does nothing by default
    assert (allocator.reserved, allocator.retries) == (20 * MIB + 18 * MIB, 1)


def test_expandable_pages_that_were_mapped_before_the_gpu_was_full_count_in_the_peak():
    allocator = filled(30 * MIB, 5 * MIB, 45 * MIB, expandable_segments=True, limit_bytes=80 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.empty_cache()
    allocator.free(1)
    assert layout(allocator) == [("large", [(20 * MIB, 20 * MIB, False)])]  # a hole before it and one behind
    allocator.peak_reserved = 0
    with pytest.raises(AllocationError):
        allocator.malloc("a", 90 * MIB)  # map_block: a page in the first hole, then three are missing in the second
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (0, 40 * MIB, 1)
    allocator.malloc("a", 80 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (80 * MIB, 80 * MIB, 1)


def test_a_full_gpu_says_so_and_goes_on():
    allocator = filled(10 * MIB, 5 * MIB, limit_bytes=30 * MIB)
    allocator.free(1)
    with pytest.raises(AllocationError, match="20971521 bytes do not fit: 10485760 of 31457280 are reserved"):
        allocator.malloc("a", 20 * MIB + 1)
    allocator.malloc("a", 20 * MIB)
    assert (allocator.allocated, allocator.reserved, allocator.retries) == (30 * MIB, 30 * MIB, 1)


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_nothing_fits_no_gpu(expandable_segments):
    allocator = CachingAllocator(expandable_segments, limit_bytes=0)
    allocator.malloc("nothing", 0)
    with pytest.raises(AllocationError):
        allocator.malloc("a", 1)
    allocator.free("nothing")
    assert allocator.reserved == 0


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(module).failed == 0
