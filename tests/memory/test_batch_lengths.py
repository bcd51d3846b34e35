"""Runs over batches of differing lengths: what is recorded and replayed, and what ``estimate(lengths=)`` says."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from hf_memopt import bucketed
from hf_memopt.devices import find_gpu
from hf_memopt.memory import Estimate, estimate
from hf_memopt.memory.settings import Fragmentation, checked_lengths, plan_lengths
from hf_memopt.memory.settings import batch_lengths as module

SIZES = {"batch_size": 2, "precision": "fp32"}


# ---- The plan


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


def test_the_step_with_the_longest_batch_is_replayed_wherever_it_is() -> None:
    lengths = np.full(500, 10)
    lengths[301] = 20
    plan = plan_lengths(lengths, 2)
    assert plan.recorded == (20, 10)
    assert plan.steps == ((1, 1),) * 32 + ((1, 0),)


@pytest.mark.parametrize(
    ("lengths", "seq_len", "message"),
    [
        (
            [8, 16],
            16,
            "seq_len=16 and lengths both give the tokens of a row; expected only one of them. Leave seq_len out",
        ),
        (
            [],
            None,
            "lengths=<shape (0,)> has no batch or more than one dimension; expected the padded tokens of a row, one "
            "number for each batch in the order of the run. Pass lengths=[512, 384, 512]",
        ),
        (
            512,
            None,
            "lengths=<shape ()> has no batch or more than one dimension; expected the padded tokens of a row, one "
            "number for each batch in the order of the run. Pass lengths=[512, 384, 512]",
        ),
        (
            [8.5, 16],
            None,
            "lengths=<float64, from 8.5> are no lengths of rows; expected whole numbers from 1 on. "
            "Pass lengths=[512, 384, 512]",
        ),
        (
            [8, 0],
            None,
            "lengths=<int64, from 0> are no lengths of rows; expected whole numbers from 1 on. "
            "Pass lengths=[512, 384, 512]",
        ),
        (
            ["8"],
            None,
            "lengths=<<U1, from 8> are no lengths of rows; expected whole numbers from 1 on. "
            "Pass lengths=[512, 384, 512]",
        ),
    ],
)
def test_bad_lengths(lengths: object, seq_len: int | None, message: str) -> None:
    with pytest.raises(ValueError) as error:
        checked_lengths(lengths, seq_len)
    assert str(error.value) == message
    with pytest.raises(ValueError) as error:
        estimate(tiny.bert_config(), lengths=lengths, seq_len=seq_len, **SIZES)
    assert str(error.value) == message


def test_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


# ---- The estimate


def peaks(found: Estimate) -> tuple[int, int, dict[str, int]]:
    return found.peak_allocated_bytes, found.peak_reserved_bytes, found.components


@pytest.mark.parametrize("changed", [{}, {"expandable_segments": True}, {"gradient_accumulation_steps": 2}])
def test_batches_of_one_length_are_the_estimate_of_that_length(changed: dict[str, object]) -> None:
    plain = estimate(tiny.bert_config(), seq_len=48, **SIZES, **changed)
    found = estimate(tiny.bert_config(), lengths=[48] * 6, **SIZES, **changed)
    assert peaks(found) == peaks(plain)
    assert found.seq_len == plain.seq_len == 48
    assert plain.fragmentation is None
    assert found.fragmentation is not None
    assert found.fragmentation.reserved_longest_bytes == plain.peak_reserved_bytes
    assert found.notes[1:] == plain.notes


RISING = [16, 24, 32, 40, 48, 56, 64]
LARGE = {"batch_size": 128, "precision": "fp32"}


def large_config() -> transformers.BertConfig:
    return tiny.bert_config(hidden_size=256, intermediate_size=1024, vocab_size=3000, num_hidden_layers=4)


def test_rising_lengths_add_gaps_and_the_longest_batch_first_adds_none() -> None:
    longest = estimate(large_config(), seq_len=64, **LARGE)
    rising = estimate(large_config(), lengths=RISING, **LARGE)
    falling = estimate(large_config(), lengths=RISING[::-1], **LARGE)
    expandable = estimate(large_config(), lengths=RISING, expandable_segments=True, **LARGE)
    figures = rising.fragmentation
    assert figures is not None
    assert (figures.batches, figures.lengths, figures.recorded_lengths) == (7, 7, 7)
    assert figures.reserved_bytes == rising.peak_reserved_bytes > 1.4 * longest.peak_reserved_bytes
    assert figures.reserved_longest_bytes == longest.peak_reserved_bytes == falling.peak_reserved_bytes
    assert figures.reserved_expandable_bytes == expandable.peak_reserved_bytes < longest.peak_reserved_bytes
    assert expandable.fragmentation is not None
    assert expandable.fragmentation.reserved_bytes == rising.peak_reserved_bytes
    assert (rising.seq_len, rising.flops) == (64, longest.flops)
    # rests of up to 1 MiB stay in the blocks that tensors of other lengths are placed in
    assert 1 <= rising.peak_allocated_bytes / longest.peak_allocated_bytes < 1.06


def test_the_figures_are_in_a_note_and_in_json() -> None:
    found = estimate(tiny.bert_config(), lengths=[16, 8, 16], **SIZES)
    assert found.fragmentation is not None
    assert found.notes[0] == found.fragmentation.note(16, expandable=False)
    assert json.loads(found.to_json())["fragmentation"]["lengths"] == 2
    assert json.loads(estimate(tiny.bert_config(), seq_len=16, **SIZES).to_json())["fragmentation"] is None
    gib = 2**30
    fragmentation = Fragmentation(64, 12, 8, 4 * gib, 3 * gib, 2 * gib)
    assert fragmentation.note(512, expandable=False) == (
        "64 batches of 12 length(s) (of these 8 recorded: others may add more) "
        "reserve 4.00 GiB, 2.00 GiB more than batches of 512 tokens alone; 3.00 GiB with expandable segments"
    )
    assert fragmentation.note(512, expandable=True) == (
        "64 batches of 12 length(s) (of these 8 recorded: others may add more) "
        "reserve 3.00 GiB, 1.00 GiB more than batches of 512 tokens alone; 4.00 GiB without expandable segments"
    )
    same = Fragmentation(6, 2, 2, gib, gib, gib)
    assert same.note(64, expandable=False) == (
        "6 batches of 2 length(s) reserve 1.00 GiB, as much as batches of 64 tokens alone; "
        "1.00 GiB with expandable segments"
    )


def test_at_the_limit_of_a_gpu_the_figures_are_those_without_a_limit() -> None:
    unlimited = estimate(large_config(), lengths=RISING, **LARGE)
    usable_bytes = estimate(large_config(), seq_len=64, **LARGE).peak_reserved_bytes + 2**26
    gpu = replace(find_gpu("A100 80GB"), usable_bytes=usable_bytes, context_bytes=0)
    found = estimate(large_config(), lengths=RISING, gpu=gpu, **LARGE)
    assert found.peak_reserved_bytes <= usable_bytes < unlimited.peak_reserved_bytes
    assert found.fits
    fragmentation = unlimited.fragmentation
    assert fragmentation is not None
    assert found.fragmentation is not None
    assert found.fragmentation.reserved_bytes == fragmentation.reserved_bytes


@pytest.mark.parametrize("setting", [{"gradient_release": True, "max_grad_norm": 0.0}, {"micro_batch_size": 1}])
def test_techniques_with_differing_lengths(setting: dict[str, object]) -> None:
    found = estimate(tiny.bert_config(), lengths=[16, 32, 24], **SIZES, **setting)
    plain = estimate(tiny.bert_config(), seq_len=32, **SIZES, **setting)
    assert found.peak_allocated_bytes >= plain.peak_allocated_bytes


def test_accumulation_steps_of_differing_lengths_share_gradients() -> None:
    accumulated = {**SIZES, "gradient_accumulation_steps": 2}
    found = estimate(tiny.bert_config(), lengths=[32, 16, 16, 32, 32, 16], **accumulated)
    steps = [first for first, _ in found.timeline.steps]
    gradients = found.timeline.components[:, 1]
    assert gradients[steps].tolist() == [0, 0, 0]
    plain = estimate(tiny.bert_config(), seq_len=32, **accumulated)
    assert gradients.max() == plain.timeline.components[:, 1].max()


def test_the_widths_of_a_bucketed_view_are_lengths() -> None:
    rows = [{"input_ids": torch.zeros(length, dtype=torch.long)} for length in (3, 9, 17, 30, 31, 12, 5, 8)]
    view = bucketed(rows, batch_size=2, boundaries=[8, 16, 32], lengths=[len(row["input_ids"]) for row in rows])
    plan = view.plan
    found = estimate(tiny.bert_config(), lengths=[plan.width(batch) for batch in range(len(plan))], **SIZES)
    assert found.seq_len == 32
    assert found.fragmentation is not None
    assert found.fragmentation.lengths == len({plan.width(batch) for batch in range(len(plan))})


def test_a_module_is_recorded_once_for_each_length_and_stays_as_it_is() -> None:
    model = tiny.bert()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = estimate(model, lengths=[8, 16], **SIZES)
    assert found.peak_allocated_bytes >= estimate(model, seq_len=16, **SIZES).peak_allocated_bytes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_lengths_and_kept_gradients_are_refused() -> None:
    with pytest.raises(ValueError) as error:
        estimate("bert-base-uncased", batch_size=2, lengths=[8, 16], zero_grad_to_none=False)
    assert str(error.value) == (
        "lengths=..., zero_grad_to_none=False are incompatible: each length has gradients of its own; expected only "
        "one of them. Pass seq_len= with the longest length instead"
    )


def test_gradients_of_shards_are_handed_from_length_to_length() -> None:
    """Under FSDP2 the last batch of a step reduces what the others have added up, whatever their lengths."""
    shared = {**SIZES, "world_size": 2, "strategy": "fsdp2", "gradient_accumulation_steps": 2}
    config = tiny.llama_config()
    mixed = estimate(config, lengths=[16, 8, 8, 16, 16, 16], **shared)
    longest = estimate(config, seq_len=16, **shared)
    assert mixed.peak_allocated_bytes == longest.peak_allocated_bytes
    assert mixed.components == longest.components
