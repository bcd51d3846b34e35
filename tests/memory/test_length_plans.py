"""Which of the differing lengths of batches are recorded, and which batches are replayed."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.prediction.memory.settings import plan_lengths


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=300), batches_of_step=st.integers(1, 9))
def test_every_batch_counts_as_the_next_longer_recorded_length(lengths: list[int], batches_of_step: int) -> None:
    plan = plan_lengths(np.array(lengths), batches_of_step)
    assert plan.batches == len(lengths)
    assert plan.lengths == len(set(lengths))
    assert 1 <= len(plan.recorded) <= 8
    assert list(plan.recorded) == sorted(set(plan.recorded), reverse=True)
    assert set(plan.recorded) <= set(lengths)
    assert plan.recorded[0] == max(lengths)
    if plan.lengths <= 8:
        assert set(plan.recorded) == set(lengths)
    longer = [min(length for length in plan.recorded if length >= each) for each in lengths]
    expected = [tuple(longer[first : first + batches_of_step]) for first in range(0, len(lengths), batches_of_step)]
    steps = [tuple(plan.recorded[index] for index in step) for step in plan.steps]
    first = max(64 // batches_of_step, 3)
    assert steps[:first] == (expected * 3)[: min(first, len(steps))]
    assert len(steps) >= 3
    assert set(steps) <= set(expected)
    assert max(chain.from_iterable(steps)) == max(lengths)
