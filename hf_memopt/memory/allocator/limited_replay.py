"""Replay a run on a GPU of a given size, where the allocator returns unused blocks before it fails; what gaps add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hf_memopt.memory.allocator.caching_allocator import AllocationError, CachingAllocator
from hf_memopt.memory.allocator.replay import Replayed, replay
from hf_memopt.memory.allocator.replay_plan import ReplayPlan
from hf_memopt.memory.batch_lengths import Fragmentation, LengthPlan
from hf_memopt.memory.recording.passes import StepTrace
from hf_memopt.memory.settings import StepSettings

if TYPE_CHECKING:
    from hf_memopt.devices.gpus import Gpu

__all__ = ["fragmentation_of", "replay_on_gpu"]


def replay_on_gpu(
    trace: StepTrace, plan: ReplayPlan, settings: StepSettings, gpu: Gpu | None, others: Sequence[StepTrace]
) -> Replayed:
    """Return the replay on a GPU of this size: at its limit the allocator empties its cache.

    Where even that does not help, the run would end in an out-of-memory error. Then the limit grows until the replay
    ends, from what the tensors hold at their peak in steps of 5 %. Without a limit the allocator would keep every block
    that it ever had, and the estimate would be a multiple of what the run needs.
    """
    unlimited = _replayed_within(None, trace, plan, settings, others)
    assert unlimited is not None  # an allocator without a limit does not fail
    limit_bytes = None if gpu is None else max(gpu.usable_bytes - (gpu.context_bytes or 0), 0)
    if limit_bytes is None or unlimited.peak_reserved <= limit_bytes:
        return unlimited
    tried_bytes = limit_bytes
    if unlimited.peak_allocated > limit_bytes:
        tried_bytes = unlimited.peak_allocated + unlimited.peak_allocated // 20 + 1
    while tried_bytes < unlimited.peak_reserved:
        found = _replayed_within(tried_bytes, trace, plan, settings, others)
        if found is not None:
            return found
        tried_bytes += tried_bytes // 20 + 1
    return unlimited


def _replayed_within(
    limit_bytes: int | None, trace: StepTrace, plan: ReplayPlan, settings: StepSettings, others: Sequence[StepTrace]
) -> Replayed | None:
    allocator = CachingAllocator(expandable_segments=settings.expandable_segments, limit_bytes=limit_bytes)
    try:
        return replay(trace, plan, allocator, others)
    except AllocationError:
        return None


def fragmentation_of(
    trace: StepTrace,
    others: Sequence[StepTrace],
    plan: ReplayPlan,
    settings: StepSettings,
    lengths: LengthPlan,
    replayed: Replayed,
) -> Fragmentation:
    """Return what the batches reserve with each kind of segments, and what the longest alone does."""

    def reserved_bytes(expandable_segments: bool, plan: ReplayPlan = plan) -> int:
        return replay(trace, plan, CachingAllocator(expandable_segments), others).peak_reserved

    expandable = settings.expandable_segments
    own = reserved_bytes(expandable) if any(replayed.retries) else replayed.peak_reserved
    other = reserved_bytes(not expandable)
    return Fragmentation(
        batches=sum(map(len, lengths.steps)),
        lengths=lengths.lengths,
        recorded_lengths=len(lengths.recorded),
        reserved_bytes=other if expandable else own,
        reserved_expandable_bytes=own if expandable else other,
        reserved_longest_bytes=reserved_bytes(expandable, replace(plan, order=())),
    )
