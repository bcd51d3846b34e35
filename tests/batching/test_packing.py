"""Packed batches: every text once, never above the budget, dealt out as the slow rule says, well filled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.batching.plan import LengthBuckets, PackedBatches

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)
SETTINGS = st.fixed_dictionaries(
    {"max_tokens": st.integers(64, 300), "world_size": st.integers(1, 3), "seed": st.integers(0, 3)}
)


def packed(lengths, **settings) -> PackedBatches:
    return PackedBatches(LengthBuckets(lengths, pad_to_multiple_of=1, **settings))


def tokens(plan: PackedBatches, epoch: int = 0) -> list[int]:
    """Return the tokens of every batch in reading order, the slow way."""
    order = plan.plan(epoch)
    return [sum(int(plan.lengths[i]) for i in order.batch(number)) for number in range(len(order))]


@given(lengths=LENGTHS, settings=SETTINGS)
def test_every_text_is_in_exactly_one_batch_within_the_budget(lengths, settings):
    plan = packed(lengths, **settings)
    for epoch in range(2):
        order = plan.plan(epoch)
        assert sorted(order.flat().tolist()) == list(range(len(lengths)))
        assert len(order) == plan.n_batches
        assert min(order.sizes()) >= 1
        assert max(tokens(plan, epoch)) <= settings["max_tokens"]
        assert order.width(0) is None


@given(lengths=LENGTHS, settings=SETTINGS)
def test_the_order_depends_on_seed_and_epoch_alone(lengths, settings):
    one, other = packed(lengths, **settings), packed(lengths, **settings)
    one.plan(5)
    for epoch in range(2):
        assert np.array_equal(one.plan(epoch).flat(), other.plan(epoch).flat())
        assert np.array_equal(one.plan(epoch).sequence, other.plan(epoch).sequence)


@given(lengths=LENGTHS, settings=SETTINGS)
def test_ranks_take_equal_steps_and_the_largest_batch_comes_first(lengths, settings):
    plan, world = packed(lengths, **settings), settings["world_size"]
    found = tokens(plan)
    whole = plan.n_batches // world * world
    if plan.n_batches != len(lengths):  # else each text has a batch of its own
        assert plan.n_batches == whole
    if whole:
        assert max(found[:world]) == max(found[:whole])


@given(lengths=LENGTHS, settings=SETTINGS)
def test_texts_are_dealt_out_as_by_the_slow_rule(lengths, settings):
    """Each text of a class, the longest class first, goes to the least loaded batch."""
    plan = packed(lengths, **settings)
    sizes = plan.limits[np.searchsorted(plan.limits, plan.lengths)]
    loads = [0] * plan.n_batches
    for size in sorted(sizes.tolist(), reverse=True):
        loads[loads.index(min(loads))] += size
    order = plan.plan(0)
    if plan.n_batches != len(lengths):
        assert sorted(loads) == sorted(int(sizes[order.batch(i)].sum()) for i in range(len(order)))


def test_epochs_and_seeds_differ_and_texts_meet_different_ones():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    plan = packed(lengths, max_tokens=400)

    def mates(plan, epoch):
        order = plan.plan(epoch)
        return {frozenset(order.batch(i).tolist()) for i in range(len(order))}

    assert not mates(plan, 0) & mates(plan, 1)
    assert not mates(plan, 0) & mates(packed(lengths, max_tokens=400, seed=1), 0)


@pytest.mark.parametrize(("world_size", "least"), [(1, 0.99), (8, 0.98)])
def test_real_looking_lengths_fill_the_budget(world_size, least):
    draws = np.random.default_rng(0).normal(np.log(60), 0.8, 20_000)
    lengths = np.clip(np.exp(draws), 1, 512).astype(np.int32)
    sums = np.array(tokens(packed(lengths, max_tokens=8192, world_size=world_size)))
    assert sums.mean() >= least * 8192
    assert sums.max() <= 8192
    steps = sums[: len(sums) // world_size * world_size].reshape(-1, world_size)
    assert (steps.max(axis=1) / steps.mean(axis=1)).mean() < 1.01


def test_texts_that_are_dropped_stay_out():
    plan = packed([5, 90, 7, 8], max_tokens=20, too_long="drop")
    assert (plan.dropped, plan.n_examples) == (1, 3)
    assert sorted(plan.plan(0).flat().tolist()) == [0, 2, 3]


def test_texts_that_share_no_batch_have_their_own():
    plan = packed([60] * 5, max_tokens=64, world_size=2)
    assert plan.n_batches == 5
    assert sorted(plan.plan(0).flat().tolist()) == list(range(5))


def test_boundaries_are_refused():
    with pytest.raises(ValueError) as error:
        PackedBatches(LengthBuckets([3, 5], max_tokens=16, boundaries=[4, 8]))
    assert str(error.value) == (
        "boundaries=[4, 8] are what batches are padded to, and these batches have no padding; expected none. "
        "Leave boundaries out of bucketed(...)"
    )
