"""What a stream keeps in shared memory, and what it knows of datasets by private names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from test_stream_scale import arrow_stream

from hf_memopt.batching.views.stream_reading import LARGEST_BYTES, PLACES, SharedPlaces


def test_the_place_of_a_large_or_unusual_state_is_kept_without_it() -> None:
    places = SharedPlaces()
    place: Any = {"epoch": 0, "row": 0, "dataset": None, "group": 0, "turn": 0, "dropped": 0}
    assert places.latest(0) is None
    places.begin(place)
    for state in ("x" * LARGEST_BYTES, np.zeros(2)):
        places.add({**place, "dataset": state, "turn": 3})
        assert places.latest(2) == place
        assert places.latest(3) == {**place, "turn": 3}
    for turn in range(4, 4 + PLACES):
        places.add({**place, "dataset": {"shard": turn}, "turn": turn})
    assert places.latest(100)["dataset"] == {"shard": 3 + PLACES}
    assert places.latest(4) == place  # the others were overwritten: the beginning is further away, and as exact


def test_the_private_names_it_relies_on_are_there():
    assert torch.utils.data._utils.worker._worker_info is None
    assert arrow_stream()._distributed is None
