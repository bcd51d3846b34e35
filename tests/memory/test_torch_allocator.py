"""``CachingAllocator`` against ``torch_allocator``, which follows torch's C++ function by function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from allocator_segments import segments_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_allocator import OutOfMemoryError, TorchAllocator

import tiny
from hf_memopt.memory import estimate
from hf_memopt.memory.allocator.caching_allocator import AllocationError, CachingAllocator

MIB = 2**20
SIZES = st.one_of(
    st.sampled_from([0, 1, 512, 513, MIB, MIB + 1, 2 * MIB, 8 * MIB, 10 * MIB - 1, 10 * MIB, 16 * MIB, 20 * MIB]),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 60 * MIB),
)
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("empty_cache"), st.just(0)),
    ),
    max_size=60,
)
FIGURES = ("allocated", "reserved", "peak_allocated", "peak_reserved", "retries")


def figures(allocator: Any) -> list[int]:
    return [getattr(allocator, name) for name in FIGURES]


def free_blocks(allocator: CachingAllocator) -> list[tuple[str, int]]:
    return sorted(
        ("small" if block.pool.is_small else "large", block.size)
        for segment in segments_of(allocator)
        for block in segment
        if not block.allocated
    )


@settings(max_examples=300, deadline=None)
@given(PROGRAMS, st.booleans(), st.one_of(st.none(), st.integers(0, 200).map(lambda count: count * MIB)))
def test_random_programs(program: list[tuple[str, int]], expandable: bool, limit: int | None) -> None:
    ours = CachingAllocator(expandable, limit)
    torchs = TorchAllocator(expandable, float("inf") if limit is None else limit)
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
            ours.free(freed)
            torchs.free(freed)
        assert figures(ours) == figures(torchs)
        assert free_blocks(ours) == sorted(
            ("small" if is_small else "large", block.size)
            for is_small in (True, False)
            for block in torchs.blocks[is_small]
        )


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        {"lengths": [24, 64, 40, 56, 16, 64, 32]},
        {"lengths": [48, 64, 16, 24, 64, 40], "gradient_accumulation_steps": 2, "optim": "adamw_torch"},
        {"seq_len": 64, "checkpointing": True, "eval_batch_size": 64, "eval_batches": 3},
        {"seq_len": 64, "torch_empty_cache_steps": 2},
    ],
)
def test_whole_runs_event_by_event(monkeypatch: pytest.MonkeyPatch, run: dict[str, Any], expandable: bool) -> None:
    config = tiny.bert_config(hidden_size=256, intermediate_size=1024, vocab_size=3000)
    settings = {"batch_size": 64, "precision": "fp32", "expandable_segments": expandable, **run}
    ours = estimate(config, **settings)
    monkeypatch.setattr(
        "hf_memopt.memory.allocator.replay.CachingAllocator",
        lambda expandable_segments=False, limit_bytes=None: TorchAllocator(expandable_segments),
    )
    torchs = estimate(config, **settings)
    assert torchs.fragmentation == ours.fragmentation
    assert (torchs.peak_allocated_bytes, torchs.peak_reserved_bytes) == (
        ours.peak_allocated_bytes,
        ours.peak_reserved_bytes,
    )
    assert np.array_equal(torchs.timeline.reserved, ours.timeline.reserved)
    assert np.array_equal(torchs.timeline.components, ours.timeline.components)
