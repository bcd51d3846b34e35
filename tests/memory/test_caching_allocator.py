"""``CachingAllocator`` against ``torch_allocator``, which follows torch's C++."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_allocator import FIRST_ADDRESS, Block, OutOfMemoryError, TorchAllocator

from hf_memopt.prediction.memory.allocator import caching_allocator as module
from hf_memopt.prediction.memory.allocator.caching_allocator import AllocationError, CachingAllocator

MIB = 2**20
SIZES = st.one_of(
    st.sampled_from([0, 1, 512, 513, MIB - 512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 20 * MIB]),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 60 * MIB),
    st.integers(1, 24).map(lambda count: count * MIB),  # equal sizes, so that frees leave ties
)
# An integer frees the key at that place of those alive.
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("empty_cache"), st.just(0)),
    ),
    max_size=60,
)
RELEASES = [(2, 11), (2, 13)]
LIMITS = st.one_of(st.none(), st.integers(0, 200).map(lambda count: count * MIB))
FIGURES = ("allocated", "reserved", "peak_allocated", "peak_reserved", "retries")


def figures(allocator: Any) -> list[int]:
    return [getattr(allocator, name) for name in FIGURES]


def place_of(block: Any) -> int:
    """Return how far below the top a block starts if segments lie below each other, as they do if addresses fall."""
    first = block
    while first.prev is not None:
        first = first.prev
    offset, size, last = _address(block) - _address(first), 0, first
    while last is not None:
        size, last = size + last.size, last.next
    start = _address(first) - (FIRST_ADDRESS if isinstance(block, Block) else module._FIRST_ADDRESS)
    return (-start if start < 0 else start + size) - offset


def _address(block: Any) -> int:
    return int(block.ptr if isinstance(block, Block) else block.address)


def blocks_of(allocator: Any) -> tuple[dict[Any, Any], list[Any]]:
    """Return place and size of each block in use by its key, and (is small, place, size) of each free one.

    Places count from the start of an expandable segment, else downwards from the top of the first segment.
    """
    if isinstance(allocator, CachingAllocator):
        free = [(block.pool.is_small, block) for pool in allocator._pools.values() for *_, block in pool.free]
        live, is_expandable = allocator._live, allocator._expandable
    else:
        free = [(is_small, block) for is_small in (True, False) for block in allocator.blocks[is_small]]
        live, is_expandable = allocator.active, allocator.expandable_segments

    def place(block: Any) -> int:
        return _address(block) % module._ADDRESS_RANGE_BYTES if is_expandable else place_of(block)

    used = {key: block and (place(block), block.size) for key, block in live.items()}
    return used, sorted((is_small, place(block), block.size) for is_small, block in free)


def run_both(
    program: list[tuple[str, int]], expandable: bool, limit: int | None, release: tuple[int, ...]
) -> CachingAllocator:
    """Run a program in both versions and compare all that they hold after every step."""
    ours = CachingAllocator(expandable, limit, release)
    torchs = TorchAllocator(expandable, float("inf") if limit is None else limit, release)
    live: list[int] = []
    for key, (action, value) in enumerate(program):
        if action == "malloc":
            try:
                torchs.malloc(key, value)
            except OutOfMemoryError:
                with pytest.raises(AllocationError):
                    ours.malloc(key, value)
            else:
                ours.malloc(key, value)
                live.append(key)
        elif action == "empty_cache":
            ours.empty_cache()
            torchs.empty_cache()
        elif live:
            freed = live.pop(value % len(live))
            assert ours.free(freed) == torchs.free(freed)
        assert figures(ours) == figures(torchs)
        assert blocks_of(ours) == blocks_of(torchs)
    for key in live:
        ours.free(key)
    return ours


@settings(max_examples=300)
@given(PROGRAMS, st.booleans(), LIMITS, st.sampled_from(RELEASES))
def test_random_programs_run_as_in_torchs_allocator(
    program: list[tuple[str, int]], expandable: bool, limit: int | None, release: tuple[int, ...]
) -> None:
    ours = run_both(program, expandable, limit, release)
    assert ours.peak_reserved <= (limit if limit is not None else ours.peak_reserved)
    ours.empty_cache()
    assert (ours.allocated, ours.reserved, blocks_of(ours)) == (0, 0, ({}, []))


@pytest.mark.parametrize(
    ("sizes", "freed", "limit", "asked"),
    [
        ((30, 55, 5), (1,), None, (45,)),  # find_expandable_block: from the free 10 MiB before the hole, two pages more
        ((30, 55, 5), (1,), None, (50, 20)),  # exactly the hole
        ((18, 2, 12), (0,), None, (6,)),  # get_free_block: 8 MiB at the end fit best, but can become more than 18 MiB
        ((28, 44, 2), (1,), None, (5,)),  # passes over every block that can grow
        ((4, 4, 4, 4), (0, 1), None, (4,)),  # of equal blocks the lowest address
        ((30, 5, 45), (0, 1, 0), 80, (90, 80)),  # map_block: a page in the first hole, then three are missing
    ],
)
@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("release", RELEASES)
def test_holes_are_filled_as_by_torchs_allocator(
    sizes: tuple[int, ...],
    freed: tuple[int, ...],
    limit: int | None,
    asked: tuple[int, ...],
    expandable: bool,
    release: tuple[int, ...],
) -> None:
    program = [("malloc", size * MIB) for size in sizes] + [("free", place) for place in freed]
    program += [("empty_cache", 0), *(("malloc", size * MIB) for size in asked)]
    run_both(program, expandable, None if limit is None else limit * MIB, release)


def test_the_rule_is_that_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CachingAllocator()._takes_oldest == (module.TORCH_RELEASE >= (2, 12))
    monkeypatch.setattr(module, "TORCH_RELEASE", (2, 11))
    assert not CachingAllocator()._takes_oldest


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0
