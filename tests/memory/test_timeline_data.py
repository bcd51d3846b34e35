"""Which events of a timeline are drawn: all of a short one, of a long one the extremes of each stretch."""

from __future__ import annotations

import numpy as np
import pytest

from hand_made import MIB
from hf_memopt.components import COMPONENTS
from hf_memopt.prediction.memory.output.estimate_picture import drawn_events
from hf_memopt.prediction.memory.tracking import Timeline


def long_timeline(events: int, seed: int) -> Timeline:
    generator = np.random.default_rng(seed)
    components = generator.integers(0, 1000, size=(events, len(COMPONENTS))) * MIB
    phases = ((0, "load"), (7, "forward"), (events // 2, "backward"), (events - 3, "optimizer"))
    return Timeline(components, generator.integers(8000, 9000, events) * MIB, phases, ((7, 1),))


@pytest.mark.parametrize("seed", range(5))
def test_no_peak_is_lost_in_a_long_timeline(seed) -> None:
    timeline = long_timeline(20_000, seed)
    shown = drawn_events(timeline, stretches=300)
    assert (np.diff(shown) > 0).all()
    assert len(shown) <= 4 * 300 + 2 * len(timeline.phases)
    assert {first for first, _ in timeline.phases} | {19_999} <= set(shown.tolist())
    allocated = timeline.components.sum(axis=1)
    assert allocated[shown].max() == allocated.max()
    assert allocated[shown].min() == allocated.min()
    assert timeline.reserved[shown].max() == timeline.reserved.max()
    for name, found in timeline.phase_peaks().items():  # a short phase has stretches of its own
        if name in ("load", "optimizer"):
            first = dict(map(reversed, timeline.phases))[name]
            within = shown[(shown >= first - 1) & (shown < first + {"load": 7, "optimizer": 3}[name])]
            assert allocated[within].max() == found.allocated_bytes
