"""The timeline of an ``Estimate`` as plain data, and its picture.

A long timeline is reduced to the extremes of some stretches, each of them a state that was reached: no peak is lost and
nothing is averaged.
"""

from __future__ import annotations

from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting
from hf_memopt.components import parts_of
from hf_memopt.plain_data import checked_path
from hf_memopt.prediction.memory.output.estimate_text import describe, verdict
from hf_memopt.prediction.memory.tracking import COMPONENTS, phase_spans
from hf_memopt.prediction.reports.pictures import TITLE_COLUMNS, Limit, TimelinePicture
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    import os

    import numpy as np

    from hf_memopt.prediction.memory import Estimate
    from hf_memopt.prediction.memory.tracking import Timeline

STRETCHES = 2000
DIGITS = 5  # of a position


def draw(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Draw the timeline to a PNG, SVG or PDF file: components stacked, phases shaded, the peak labelled."""
    path, gpu = checked_path("path", path), estimate.gpu
    purpose = "the picture of an estimate"
    plotting.check_picture(path, purpose, name="path")
    label = ""
    if gpu is not None:
        without = "" if estimate.context_bytes is not None else ", less a context of unknown size"
        label = f"usable on {gpu.name}{without}: {format_bytes(gpu.usable_bytes)}"
    fits = verdict(estimate).partition(";")[0]  # without the advice
    picture = TimelinePicture(
        timeline_data(estimate, STRETCHES),
        parts_of(estimate.components, estimate.peak_reserved_bytes, estimate.context_bytes),
        None if gpu is None else Limit(gpu.name, gpu.usable_bytes),
        label,
        title="\n".join(fill(text, TITLE_COLUMNS) for text in (describe(estimate), fits)),
        micro_batches=estimate.settings.gradient_accumulation_steps,
    )
    plotting.write_picture(path, picture.draw, purpose=purpose)


def timeline_data(estimate: Estimate, stretches: int) -> dict[str, Any]:
    """Return the drawn events of loading, of the steps, and of evaluation; positions from 0 to 1."""
    timeline, reserved = estimate.timeline, estimate.timeline.reserved
    shown, ends = drawn_events(timeline, stretches), event_positions(timeline)
    places = [round(place, DIGITS) for place in (ends / ends[-1]).tolist()]
    return {
        "positions": [places[event] for event in shown],
        "components": {
            name: timeline.components[shown, number].tolist()
            for number, name in enumerate(COMPONENTS)
            if timeline.components[:, number].any()
        },
        "reserved_bytes": reserved[shown].tolist(),
        "phases": [
            {"from": places[first], "to": places[end], "name": name} for first, end, name in phase_spans(timeline)
        ],
        "steps": [
            {"from": places[first], "number": number}
            for first, number in timeline.steps
            if first < len(timeline.reserved)
        ],
        "peak": {
            "position": places[timeline.deciding_event],
            "allocated_bytes": sum(estimate.components.values()),
            "phase": estimate.phase,
            "module": estimate.module,
        },
    }


def drawn_events(timeline: Timeline, stretches: int = STRETCHES) -> np.ndarray:
    """Return the events that the picture shows, ascending: all of a short timeline, the extremes of a long one.

    Each of ``stretches`` stretches of equal width keeps the events of most and fewest allocated bytes, of most reserved
    bytes, and its last; what every phase begins with and its first event are kept too. So the maximum of any stretch is
    exact, and so is what is held from one stretch to the next.
    """
    import numpy as np

    events = len(timeline.reserved)
    if events <= 4 * stretches:
        return np.arange(events)
    allocated, reserved = timeline.allocated, timeline.reserved
    positions = event_positions(timeline)
    edges = np.unique(np.searchsorted(positions, np.linspace(0, positions[-1], stretches + 1)))
    kept = {event for first, _, _ in phase_spans(timeline) for event in (max(first - 1, 0), first)}
    for first, end in pairwise(edges.tolist()):
        kept |= {first + int(allocated[first:end].argmax()), first + int(allocated[first:end].argmin())}
        kept |= {first + int(reserved[first:end].argmax()), end - 1}
    return np.array(sorted(kept))


def event_positions(timeline: Timeline) -> np.ndarray:
    """Return the horizontal position of each event and of the end; a phase of few events still gets 1.5 %."""
    import numpy as np

    events = len(timeline.reserved)
    spans = list(phase_spans(timeline))
    least = events * min(0.015, 0.5 / len(spans))
    ends = np.cumsum([0, *(max(end - first, least) for first, end, _ in spans)])
    return np.asarray(np.interp(np.arange(events + 1), [*(first for first, _, _ in spans), events], ends))
