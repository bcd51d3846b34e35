"""Runs over batches of differing lengths: what ``estimate(lengths=)`` says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import tiny
from hf_memopt import bucketed, estimate
from hf_memopt.gpus import find_gpu

SIZES: dict[str, Any] = {"batch_size": 2, "precision": "fp32"}


@pytest.mark.parametrize("changed", [{}, {"expandable_segments": True}, {"gradient_accumulation_steps": 2}])
def test_batches_of_one_length_are_the_estimate_of_that_length(changed: dict[str, Any]) -> None:
    plain = estimate(tiny.bert_config(), seq_len=48, **SIZES, **changed)
    found = estimate(tiny.bert_config(), lengths=[48] * 6, **SIZES, **changed)
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "components", "seq_len"):
        assert getattr(found, name) == getattr(plain, name)
    assert plain.fragmentation is None
    assert found.fragmentation is not None
    assert found.fragmentation.reserved_longest_bytes == plain.peak_reserved_bytes
    assert found.notes[1:] == plain.notes
    assert ", as much as batches of 48 tokens alone; " in found.notes[0]


RISING = [16, 24, 32, 40, 48, 56, 64]
LARGE: dict[str, Any] = {"batch_size": 128, "precision": "fp32"}


def large_config() -> transformers.BertConfig:
    return tiny.bert_config(hidden_size=256, intermediate_size=1024, vocab_size=3000, num_hidden_layers=4)


@pytest.mark.slow
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
    # at the limit of a GPU the figures are those without a limit
    usable_bytes = longest.peak_reserved_bytes + 2**26
    gpu = replace(find_gpu("A100 80GB"), usable_bytes=usable_bytes, context_bytes=0)
    found = estimate(large_config(), lengths=RISING, gpu=gpu, **LARGE)
    assert found.peak_reserved_bytes <= usable_bytes < rising.peak_reserved_bytes
    assert found.fits
    assert found.fragmentation is not None
    assert found.fragmentation.reserved_bytes == figures.reserved_bytes


def test_the_figures_are_in_a_note_and_in_json() -> None:
    found = estimate(tiny.bert_config(), lengths=[16, 8, 16], **SIZES)
    assert found.fragmentation is not None
    assert json.loads(found.to_json())["fragmentation"]["lengths"] == 2
    assert json.loads(estimate(tiny.bert_config(), seq_len=16, **SIZES).to_json())["fragmentation"] is None
    gib = 2**30
    many = replace(found.fragmentation, batches=64, lengths=12, recorded_lengths=8)
    more = replace(many, reserved_bytes=4 * gib, reserved_expandable_bytes=3 * gib, reserved_longest_bytes=2 * gib)
    for expandable, reserved, more_gib, other in ((False, 4, 2, "3.00 GiB with"), (True, 3, 1, "4.00 GiB without")):
        assert more.note(512, expandable=expandable) == (
            f"64 batches of 12 length(s) (of these 8 recorded: others may add more) reserve {reserved}.00 GiB, "
            f"{more_gib}.00 GiB more than batches of 512 tokens alone; {other} expandable segments"
        )
    assert re.fullmatch(
        r"3 batches of 2 length\(s\) reserve .* (as much as|more than) batches of 16 tokens alone; .* with expandable "
        "segments",
        found.notes[0],
    )


def test_the_widths_of_a_bucketed_view_are_lengths() -> None:
    rows = [{"input_ids": torch.zeros(length, dtype=torch.long)} for length in (3, 9, 17, 30, 31, 12, 5, 8)]
    view = bucketed(rows, batch_size=2, boundaries=[8, 16, 32], lengths=[len(row["input_ids"]) for row in rows])
    widths = [view.plan.width(batch) for batch in range(len(view.plan))]
    found = estimate(tiny.bert_config(), lengths=widths, **SIZES)
    assert found.seq_len == 32
    assert found.fragmentation is not None
    assert found.fragmentation.lengths == len(set(widths))
