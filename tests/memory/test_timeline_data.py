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


def test_a_long_timeline_keeps_the_extremes_of_each_stretch() -> None:
    allocated = [5, 3, 9, 4, 4, 1, 6, 2, 7, 8, 8, 3]
    reserved = [9, 9, 9, 9, 9, 9, 9, 12, 12, 12, 12, 12]
    components = np.zeros((12, len(COMPONENTS)), dtype=np.int64)
    components[:, 3] = allocated
    timeline = Timeline(components, np.array(reserved), ((0, "forward"), (8, "backward")), ((0, 1),))
    # stretches 0-5 and 6-11: most at 2 and 9, fewest at 5 and 7, most reserved at 0 and 7, last 5 and 11; phases 0, 8
    assert drawn_events(timeline, stretches=2).tolist() == [0, 2, 5, 7, 8, 9, 11]


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
