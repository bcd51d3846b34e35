"""Samplers over the plan: every example once, equal steps per rank, exact resume, strict state, Accelerate."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from hypothesis import given
from hypothesis import strategies as st
from tables import refuses, whole
from torch.utils.data import DataLoader

from hf_memopt import LengthBucketedBatchSampler, LengthBucketedSampler

LENGTHS = [(7 * i) % 23 + 1 for i in range(37)]
SAMPLERS = {
    "tokens": (LengthBucketedBatchSampler, {"max_tokens": 96}),
    "batches": (LengthBucketedBatchSampler, {"batch_size": 4}),
    "examples": (LengthBucketedSampler, {"batch_size": 4}),
}


def make(kind: str, lengths: Any = LENGTHS, **settings: Any) -> Any:
    sampler, limit = SAMPLERS[kind]
    return sampler(lengths, **limit, **settings)


def indices(items: Any) -> list[int]:
    return [i for item in items for i in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("kind", SAMPLERS)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80),
    world_size=st.sampled_from([1, 2, 3, 7]),
    seed=st.integers(0, 5),
)
def test_the_ranks_share_every_example_in_equal_steps(kind, lengths, world_size, seed):
    one = make(kind, lengths, world_size=world_size, seed=seed)
    ranks = [make(kind, lengths, world_size=world_size, seed=seed, rank=rank) for rank in range(world_size)]
    for epoch in (0, 3):
        for sampler in (one, *ranks):
            sampler.set_epoch(epoch)
        assert sorted(indices(one)) == list(range(len(lengths)))
        shares = [list(sampler) for sampler in ranks]
        assert {len(share) for share in shares} == {len(ranks[0])}
        assert len(list(one)) == len(one)
        assert set(indices(itertools.chain(*shares))) == set(range(len(lengths)))
        repeated = sum(map(len, map(indices, shares))) - len(lengths)
        plan = one.buckets.plan(epoch)
        largest = max(4, *(len(plan.batch(i)) for i in range(len(plan))))
        assert repeated <= world_size * largest  # only what fills the last step up is read twice


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("rank", [None, 1])
@given(data=st.data())
def test_a_restored_sampler_goes_on_where_the_other_stopped(kind, rank, data):
    settings = {} if rank is None else {"world_size": 2, "rank": rank}
    sampler = make(kind, **settings)
    epoch = data.draw(st.integers(0, 3))
    sampler.set_epoch(epoch)
    straight = list(sampler)
    stop = data.draw(st.integers(0, len(straight)))
    iterator = iter(sampler)
    assert list(itertools.islice(iterator, stop)) == straight[:stop]
    state = json.loads(json.dumps(sampler.state_dict()))
    restored = make(kind, **settings)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    for _ in range(2):
        restored.set_epoch(epoch)  # as the training loop does: already there, so nothing is lost
    assert restored.state_dict() == state
    assert list(restored) == straight[stop:]
    assert list(restored) == straight  # the next iteration begins at the beginning
    restored.set_epoch(epoch + 1)
    assert list(restored) != straight
    assert len(list(restored)) == len(straight)


OTHER = {
    "seed": {"seed": 1},
    "world_size": {"world_size": 2},
    "examples": {"lengths": LENGTHS[:-1]},
    "boundaries": {"n_buckets": 2},
    "fingerprint": {"lengths": [*LENGTHS[1:], LENGTHS[0]]},  # as many
}


@pytest.mark.parametrize("name", OTHER)
def test_a_state_of_another_order_is_refused(name):
    mine, theirs = make("tokens", **{"lengths": LENGTHS, **OTHER[name]}), make("tokens")
    first = next(key for key, value in mine.state_dict().items() if theirs.state_dict()[key] != value)
    value, own = theirs.state_dict()[first], mine.state_dict()[first]
    before = mine.state_dict()
    message = whole("state[{first!r}]={value!r}", first=first, value=value, own=own)
    refuses(ValueError, message, mine.load_state_dict, theirs.state_dict())
    assert mine.state_dict() == before


@pytest.mark.parametrize("position", [-1, 100, 1.0, True])
def test_a_position_outside_the_epoch_is_refused(position):
    sampler = make("tokens")
    below = f", below {len(sampler) + 1}" if position == 100 else ""
    message = f"position={position!r} is invalid; expected an integer of 0 or more{below}. Pass position=0"
    refuses(ValueError, message, sampler.state_dict, position=position)
    refuses(ValueError, message, sampler.load_state_dict, {**sampler.state_dict(), "position": position})


@pytest.mark.parametrize("rank", [-1, 2, 0.0, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_rank_out_of_range_is_refused(kind, rank):
    below = ", below 2" if rank == 2 else ""
    message = f"rank={rank!r} is invalid; expected an integer of 0 or more, or None{below}. Pass rank=0"
    refuses(ValueError, message, make, kind, world_size=2, rank=rank)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_pickle_and_copy(kind):
    sampler = make(kind)
    sampler.set_epoch(1)
    for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert list(twin) == list(sampler)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_plain_data_loader(workers):
    sampler = make("tokens")
    loader = DataLoader(torch.arange(len(LENGTHS)), batch_sampler=sampler, num_workers=workers)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        plan = sampler.buckets.plan(epoch)
        assert [batch.tolist() for batch in loader] == [plan.batch(i).tolist() for i in range(len(plan))]
    one_by_one = DataLoader(torch.arange(len(LENGTHS)), sampler=make("examples"), batch_size=4)
    assert [batch.tolist() for batch in one_by_one] == list(make("batches"))


def test_accelerate_sets_the_epoch_and_keeps_the_batches():
    sampler = make("batches")
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(len(LENGTHS)), batch_sampler=sampler))
    seen = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        plan = sampler.buckets.plan(epoch)
        seen.append([batch.tolist() for batch in loader])
        assert seen[-1] == [plan.batch(i).tolist() for i in range(len(plan))]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("kind", ["tokens", "batches"])
def test_accelerate_gives_each_rank_its_batch_of_a_group(kind):
    sampler = make(kind, np.tile(LENGTHS, 4), world_size=2)
    settings = {"num_processes": 2, "even_batches": kind == "batches"}
    shares = [list(BatchSamplerShard(sampler, process_index=rank, **settings)) for rank in (0, 1)]
    assert set(indices(itertools.chain(*shares))) == set(range(4 * len(LENGTHS)))
    assert len(shares[0]) == len(shares[1])
    assert [len(batch) for batch in shares[0]][:-1] == [len(batch) for batch in shares[1]][:-1]
    shard = BatchSamplerShard(sampler, process_index=0, **settings)
    DataLoaderShard(torch.arange(len(LENGTHS)), batch_sampler=shard).set_epoch(1)
    assert sampler.epoch == 1
