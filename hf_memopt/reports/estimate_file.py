"""The JSON of ``hf-memopt estimate --json``: the fields that a difference compares."""

from __future__ import annotations

from typing import Any, TypedDict

from hf_memopt.plain_data import Count, CountOrZero

__all__ = ["ESTIMATE_FORMAT", "EstimateData"]

ESTIMATE_FORMAT = 1
"""Raised when a field of an estimate's JSON changes its meaning or goes."""


class GpuData(TypedDict):
    """The GPU of an estimate; see ``Gpu``."""

    name: str
    usable_bytes: Count


class EstimateData(TypedDict):
    """An estimate; see ``Estimate``."""

    model: str
    batch_size: Count
    seq_len: Count | None
    settings: dict[str, Any]
    gpu: GpuData | None
    peak_allocated_bytes: CountOrZero
    peak_reserved_bytes: CountOrZero
    context_bytes: CountOrZero | None
    total_bytes: CountOrZero
    fits: bool | None
    components: dict[str, CountOrZero]
    phase_peaks: dict[str, dict[str, CountOrZero]]
    versions: dict[str, str]
