"""Length buckets: the best boundaries, every example once, the same batches for the same seed, clear errors."""

from __future__ import annotations

import pickle
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import refuses, table

from hf_memopt.types import LengthBuckets


def round_up(length: int, multiple: int) -> int:
    return max(multiple, -(-length // multiple) * multiple)


def boundaries_of(lengths: Any, n_buckets: int, multiple: int) -> np.ndarray:
    return LengthBuckets(lengths, batch_size=1, n_buckets=n_buckets, pad_to_multiple_of=multiple).boundaries


def padded_tokens(lengths: list[int], boundaries: Any) -> int:
    return sum(min(limit for limit in boundaries if length <= limit) for length in lengths)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    n_buckets=st.integers(1, 4),
    multiple=st.sampled_from([1, 8]),
)
def test_boundaries_pad_as_little_as_the_best_of_all_sets(lengths, n_buckets, multiple):
    limits = sorted({round_up(length, multiple) for length in lengths})
    best = min(
        padded_tokens(lengths, [*chosen, limits[-1]])
        for size in range(min(n_buckets, len(limits)))
        for chosen in combinations(limits[:-1], size)
    )
    found = boundaries_of(lengths, n_buckets, multiple)
    assert len(found) <= n_buckets
    assert sorted(set(found.tolist())) == found.tolist()
    assert all(limit % multiple == 0 for limit in found)
    assert found[-1] == limits[-1]
    assert padded_tokens(lengths, found) == best


LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=120)
SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3) | st.just(2**63 - 1),
        "world_size": st.sampled_from([1, 2, 3, 8, 500]),
        "n_buckets": st.sampled_from(["auto", 1, 3, 50]),
        "pad_to_multiple_of": st.sampled_from([1, 8]),
    }
)
BY_EXAMPLES = st.integers(1, 40).map(lambda size: {"batch_size": size})
BY_TOKENS = st.integers(104, 2000).map(lambda size: {"max_tokens": size})


def batches_of(buckets: LengthBuckets, epoch: int) -> list[list[int]]:
    plan = buckets.plan(epoch)
    assert len(plan) == buckets.n_batches
    return [plan.batch(i).tolist() for i in range(buckets.n_batches)]


def padded_size(batch: list[int], lengths: list[int], multiple: int) -> int:
    return len(batch) * round_up(max(lengths[i] for i in batch), multiple)


@given(lengths=LENGTHS, limit=BY_EXAMPLES | BY_TOKENS, settings=SETTINGS)
def test_every_example_is_in_exactly_one_batch_of_an_epoch(lengths, limit, settings):
    buckets = LengthBuckets(lengths, **limit, **settings)
    for epoch in (0, 1, 7):
        batches = batches_of(buckets, epoch)
        assert all(batches)
        assert sorted(example for batch in batches for example in batch) == list(range(len(lengths)))


@given(lengths=LENGTHS, limit=BY_EXAMPLES | BY_TOKENS, settings=SETTINGS)
def test_the_order_depends_on_seed_and_epoch_alone(lengths, limit, settings):
    one, other = (LengthBuckets(lengths, **limit, **settings) for _ in range(2))
    kept = other.plan(3).flat()
    copied = kept.copy()
    assert batches_of(one, 1) == batches_of(other, 1)
    assert (kept == copied).all()
    assert batches_of(pickle.loads(pickle.dumps(one)), 1) == batches_of(one, 1)


@pytest.mark.parametrize("limit", [{"batch_size": 4}, {"max_tokens": 416}], ids=str)
@given(lengths=st.lists(st.integers(1, 100), min_size=40, max_size=60), seed=st.integers(0, 100))
def test_epochs_and_seeds_differ(limit, lengths, seed):
    orders = [LengthBuckets(lengths, seed=s, **limit).plan(epoch).flat() for s in (seed, seed + 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4


@given(lengths=LENGTHS, limit=BY_EXAMPLES, settings=SETTINGS)
def test_all_batches_but_the_very_last_are_full(lengths, limit, settings):
    size = limit["batch_size"]
    for epoch in (0, 1):
        sizes = [len(batch) for batch in batches_of(LengthBuckets(lengths, **limit, **settings), epoch)]
        assert set(sizes[:-1]) <= {size}
        assert sizes[-1] == (len(lengths) - 1) % size + 1


@given(lengths=LENGTHS, limit=BY_TOKENS, settings=SETTINGS)
def test_no_batch_exceeds_the_token_budget(lengths, limit, settings):
    for epoch in (0, 1):
        for batch in batches_of(LengthBuckets(lengths, **limit, **settings), epoch):
            assert padded_size(batch, lengths, settings["pad_to_multiple_of"]) <= limit["max_tokens"]


@given(lengths=LENGTHS, limit=BY_EXAMPLES | BY_TOKENS, settings=SETTINGS)
def test_ranks_get_equal_row_counts_and_the_largest_batch_comes_first(lengths, limit, settings):
    world, multiple = settings["world_size"], settings["pad_to_multiple_of"]
    for epoch in (0, 1):
        batches = batches_of(LengthBuckets(lengths, **limit, **settings), epoch)
        groups = [batches[i : i + world] for i in range(0, len(batches) - world + 1, world)]
        spreads = [max(map(len, group)) - min(map(len, group)) for group in groups]
        if "batch_size" in limit:
            if len(lengths) % limit["batch_size"] and len(batches) % world == 0:
                groups, spreads = groups[:-1], spreads[:-1]  # the group with the partial batch
            assert not any(spreads)
        else:
            assert sum(spreads) <= 1  # the group that shares the rest
        if groups:
            largest = [max(padded_size(batch, lengths, multiple) for batch in group) for group in groups]
            assert largest[0] == max(largest)


def test_auto_gives_every_bucket_four_batches_and_one_for_every_process():
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    for world_size, most in [(1, 15), (4, 15), (6, 10), (100, 8)]:
        assert len(LengthBuckets(lengths, batch_size=16, world_size=world_size).boundaries) == most
    assert len(LengthBuckets(np.tile(lengths, 50), batch_size=16).boundaries) <= 63
    outlier = LengthBuckets([10] * 999 + [5001], max_tokens=5008)  # one long example must not spread over the others
    assert outlier.n_batches == 5


@given(lengths=LENGTHS, settings=SETTINGS, max_tokens=st.integers(8, 103))
def test_long_examples_are_dropped_with_a_count(lengths, settings, max_tokens):
    multiple = settings["pad_to_multiple_of"]
    kept = [i for i, length in enumerate(lengths) if round_up(length, multiple) <= max_tokens]
    if not kept:
        return
    buckets = LengthBuckets(lengths, max_tokens=max_tokens, too_long="drop", **settings)
    assert (buckets.n_examples, buckets.dropped) == (len(kept), len(lengths) - len(kept))
    for epoch in (0, 1):
        batches = batches_of(buckets, epoch)
        assert sorted(i for batch in batches for i in batch) == kept
        assert all(padded_size(batch, lengths, multiple) <= max_tokens for batch in batches)


@given(lengths=LENGTHS, limit=BY_EXAMPLES | BY_TOKENS, settings=SETTINGS, given_limits=st.booleans())
def test_boundaries_bound_the_shapes(lengths, limit, settings, given_limits):
    if given_limits:
        settings = {**settings, "n_buckets": "auto", "boundaries": [13, 40, 104]}
    else:
        settings = {**settings, "boundaries": "auto"}
    buckets = LengthBuckets(lengths, **limit, **settings)
    for epoch in (0, 1):
        plan = buckets.plan(epoch)
        shapes = set()
        for i in range(len(plan)):
            batch, width = plan.batch(i), plan.width(i)
            assert width in buckets.boundaries
            assert width >= max(lengths[j] for j in batch)
            assert len(batch) * width <= limit.get("max_tokens", len(batch) * width)
            shapes.add((len(batch), width))
        world = settings["world_size"]
        for i in range(0, len(plan) - world + 1, world):
            in_group = {plan.width(i + rank) for rank in range(world)}
            assert len(in_group) == 1 or "batch_size" in limit  # a group of rests
        assert len(shapes) <= len(buckets.boundaries) + 4
        assert buckets.diagnostics(epoch).shapes == len(shapes)


@given(lengths=LENGTHS, limit=BY_EXAMPLES | BY_TOKENS, settings=SETTINGS, epoch=st.integers(0, 3))
def test_the_diagnostics_equal_the_slow_count(lengths, limit, settings, epoch):
    buckets = LengthBuckets(lengths, **limit, **settings)
    found = buckets.diagnostics(epoch)
    batches = batches_of(buckets, epoch)
    multiple, world = settings["pad_to_multiple_of"], settings["world_size"]
    padded = [padded_size(batch, lengths, multiple) for batch in batches]
    assert (found.kept, found.dropped, found.batches) == (len(lengths), 0, len(batches))
    assert found.shapes == len({(len(batch), size) for batch, size in zip(batches, padded, strict=True)})
    assert found.padding_efficiency == pytest.approx(sum(lengths) / sum(padded))
    if "max_tokens" in limit:
        assert found.fill == pytest.approx(np.mean(padded) / limit["max_tokens"])
        assert found.budget_use == pytest.approx(sum(lengths) / len(batches) / limit["max_tokens"])
        assert found.over_budget == 0
        whole = len(batches) // world
        ratios = [max(step) / np.mean(step) for step in np.array(padded[: whole * world]).reshape(whole, world)]
        assert found.straggler_ratio == pytest.approx(np.mean(ratios) if ratios else 1.0)
    else:
        assert found.fill is found.budget_use is None


@pytest.mark.slow
def test_every_order_inside_a_bucket_is_as_likely():
    buckets = LengthBuckets([5] * 3, batch_size=3)
    counts = np.unique([buckets.plan(epoch).flat().tolist() for epoch in range(6000)], axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert np.abs(counts - 1000).max() < 150  # five standard deviations


# What is refused

REFUSED = table("batching/tables/refused_buckets")


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_what_is_refused_is_told_in_whole(settings, message):
    refuses(ValueError, message, LengthBuckets, **{"lengths": [3, 4, 100, 99], "batch_size": 2, **settings})


@pytest.mark.parametrize("epoch", [-1, 1.5, None])
def test_an_epoch_out_of_range_is_refused(epoch):
    message = f"epoch={epoch!r} is invalid; expected an integer of 0 or more. Pass epoch=0"
    refuses(ValueError, message, LengthBuckets([3, 4], batch_size=2).plan, epoch)
