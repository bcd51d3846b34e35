"""Put an estimate into the figures that a measurement has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memopt.devices.gpus import GPUS
from hf_memopt.memory.timeline import COMPONENTS, Timeline, phase_spans
from hf_memopt.recipes.measuring.measurement import Figures

if TYPE_CHECKING:
    from hf_memopt.memory.result import Estimate

__all__ = ["predicted_figures"]

_KEPT = [COMPONENTS.index(name) for name in ("activations", "logits and loss", "temporaries")]


def predicted_figures(found: Estimate, timed: Estimate | None) -> Figures:
    """Return what an estimate says of what is measured.

    Args:
        found: of the largest batch.
        timed: of the batches that were timed; None where no time is compared.
    """
    timeline = found.timeline
    on_gpu = found.gpu is not None
    workspace = COMPONENTS.index("workspace")
    held = {name: int(timeline.components[:, COMPONENTS.index(name)].max()) for name in COMPONENTS[:3]}
    # a CPU has no workspace of matrix products, nothing reserved and no context
    without = 0 if on_gpu else int(timeline.components[:, workspace].max())
    peaks = {name: size - (0 if name == "load" else without) for name, size in _phase_peaks(timeline).items()}
    time = None if timed is None else timed.step_time
    return Figures(
        allocated_bytes=found.peak_allocated_bytes - without,
        reserved_bytes=found.peak_reserved_bytes if on_gpu else None,
        context_bytes=None if found.gpu is None else GPUS.get(found.gpu.name, found.gpu).context_bytes,
        phases=peaks,
        components={**held, "activations and logits": _kept_by_forward(timeline)},
        seconds=None if time is None else time.seconds,
        low=None if time is None else time.low,
        high=None if time is None else time.high,
    )


def _kept_by_forward(timeline: Timeline) -> int:
    """Return the most that a forward pass leaves for its backward pass."""
    starts = [first for first, name in timeline.phases if name == "backward" and first]
    return max((int(timeline.components[first - 1, _KEPT].sum()) for first in starts), default=0)


def _phase_peaks(timeline: Timeline) -> dict[str, int]:
    """Return the most that is allocated in each phase, what it begins with included."""
    allocated = timeline.components.sum(axis=1)
    peaks: dict[str, int] = {}
    for first, end, name in phase_spans(timeline):
        peaks[name] = max(peaks.get(name, 0), int(allocated[max(first - 1, 0) : end].max()))
    return peaks
