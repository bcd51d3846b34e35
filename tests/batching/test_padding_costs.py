"""The padding report: every figure against a slow obvious way, stock's own order, its text and its picture."""

from __future__ import annotations

import math
import time
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import refuses, whole
from transformers.trainer_pt_utils import get_length_grouped_indices

from hf_memopt import padding_report
from hf_memopt.types import LengthBuckets

MOST_SIMULATED = 200_000


def review(count: int = 4000, seed: int = 0) -> np.ndarray:
    """Return lengths like those of product reviews: log-normal, median 60, 4 to 512."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(60), 0.85, count))
    return np.clip(drawn, 4, 512).astype(np.int32)


def slow_strategy(batches: list[list[int]], multiple: int) -> tuple[float, int, int, int]:
    """Return efficiency, batches, largest batch and shapes of batches given as lists of lengths."""
    shapes = [(len(batch), multiple * math.ceil(max(batch) / multiple)) for batch in batches]
    padded = [rows * width for rows, width in shapes]
    return sum(map(sum, batches)) / sum(padded), len(batches), max(padded), len(set(shapes))


def figures(strategy: Any) -> tuple[float, int, int, int]:
    return (
        pytest.approx(strategy.padding_efficiency, rel=1e-12),  # sums of integers, divided once
        strategy.batches,
        strategy.largest_batch_tokens,
        strategy.shapes,
    )


def chunks(lengths: Any, size: int) -> list[list[int]]:
    found = [int(length) for length in lengths]
    return [found[start : start + size] for start in range(0, len(found), size)]


def planned(buckets: LengthBuckets) -> list[list[int]]:
    plan = buckets.plan(0)
    return [buckets.lengths[plan.batch(i)].tolist() for i in range(buckets.n_batches)]


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=150) | st.just(review(2100).tolist()),
    batch_size=st.integers(1, 9),
    multiple=st.sampled_from([1, 8]),
    seed=st.integers(0, 5),
)
def test_strategies_equal_the_slow_way(lengths, batch_size, multiple, seed):
    report = padding_report(lengths, batch_size=batch_size, pad_to_multiple_of=multiple, seed=seed)
    fixed, random, grouped, by_size, by_tokens, in_rows = report.strategies
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    in_order = np.asarray(lengths)[shuffled]

    width = multiple * math.ceil(max(lengths) / multiple)
    efficiency, count, largest, shapes = figures(fixed)
    assert fixed.name == f"fixed to longest, {width}"
    assert efficiency == sum(lengths) / (len(lengths) * width)
    assert (count, largest) == (math.ceil(len(lengths) / batch_size), min(batch_size, len(lengths)) * width)
    assert shapes == len({len(chunk) for chunk in chunks(lengths, batch_size)})

    assert figures(random) == slow_strategy(chunks(in_order, batch_size), multiple)
    stock = np.asarray(lengths)[stock_order(lengths, batch_size, shuffled)]
    assert figures(grouped) == slow_strategy(chunks(stock, batch_size), multiple)
    settings = {"seed": seed, "pad_to_multiple_of": multiple}
    sized = planned(LengthBuckets(lengths, batch_size=batch_size, **settings))
    assert figures(by_size) == slow_strategy(sized, multiple)
    budgeted = planned(LengthBuckets(lengths, max_tokens=report.max_tokens, **settings))
    assert figures(by_tokens) == slow_strategy(budgeted, multiple)
    assert by_tokens.largest_batch_tokens <= report.max_tokens
    assert sum(lengths) == round(in_rows.padding_efficiency * in_rows.batches * report.max_tokens)
    assert all(sum(lengths) == pytest.approx(way.epoch_tokens * way.padding_efficiency) for way in report.strategies)
    assert all(found.wasted_fraction == 1 - found.padding_efficiency for found in report.strategies)


def stock_order(lengths: list[int], batch_size: int, shuffled: np.ndarray) -> list[int]:
    """Return transformers' own group_by_length order, from a random one that is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda *_, **__: torch.from_numpy(shuffled.copy()))
        return get_length_grouped_indices(lengths, batch_size)


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=200))
def test_percentiles_histogram_and_cuts_equal_the_slow_way(lengths):
    report = padding_report(lengths)
    ascending = sorted(lengths)
    for rank in (50, 75, 90, 95, 99):  # nearest rank
        assert report.percentiles[f"p{rank}"] == ascending[max(math.ceil(rank * len(lengths) / 100), 1) - 1]
    assert (report.examples, report.total) == (len(lengths), sum(lengths))
    assert (report.shortest, report.longest) == (ascending[0], ascending[-1])
    assert report.mean == sum(lengths) / len(lengths)
    has_tail = report.longest > 1.25 * report.percentiles["p99"]
    assert report.histogram.has_tail <= has_tail
    edges, counts = report.histogram.edges, report.histogram.counts
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        assert count == sum(low <= length < high for length in lengths)
    assert sum(counts) == len(lengths)
    for cut in report.cuts:
        assert 0 < cut.max_length < report.longest
        assert cut.examples_fraction == sum(n > cut.max_length for n in lengths) / len(lengths)
        assert cut.tokens_fraction == sum(max(n - cut.max_length, 0) for n in lengths) / sum(lengths)


def test_max_length_cuts_before_batching_and_leaves_the_figures_of_the_texts():
    lengths = review()
    plain, cut = padding_report(lengths, max_tokens=4096), padding_report(lengths, max_tokens=4096, max_length=100)
    assert (cut.percentiles, cut.histogram, cut.total) == (plain.percentiles, plain.histogram, plain.total)
    assert cut.strategies[0].name == "fixed to longest, 512, uncut"
    assert figures(cut.strategies[0]) == figures(plain.strategies[0])
    assert cut.strategies[1].name == "fixed to max_length=100"
    assert cut.strategies[1].padding_efficiency == pytest.approx(
        np.minimum(lengths, 100).sum() / (4000 * 100), rel=1e-12
    )
    assert cut.strategies[1].largest_batch_tokens == 3200
    assert cut.strategies[2:] == padding_report(np.minimum(lengths, 100), max_tokens=4096).strategies[1:]
    assert padding_report(lengths, max_length=600).strategies[0].name == "fixed to longest, 512"


@pytest.mark.parametrize("batch_size", [8, 32, 100])
def test_the_suggested_budget_gives_the_mean_batch_asked_for(batch_size):
    lengths = review(20_000)
    report = padding_report(lengths, batch_size=batch_size)
    suggestion = report.suggestions[0]
    mean = len(lengths) / LengthBuckets(lengths, max_tokens=suggestion.value).n_batches
    assert mean == pytest.approx(batch_size, rel=0.08)  # rounded by 6 % at most
    assert (suggestion.name, suggestion.value, suggestion.reason, suggestion.code) == (
        "max_tokens",
        report.max_tokens,
        f"a batch has {mean:.1f} examples in the mean, {batch_size} were asked for; it holds the longest one",
        f"bucketed(dataset, max_tokens={report.max_tokens})",
    )


def test_max_length_is_suggested_where_cutting_one_percent_saves_a_tenth():
    lengths = [20] * 990 + [100] * 10
    assert astuple(padding_report(lengths).suggestions[1]) == (
        "max_length",
        24,
        whole("cuts 1.0 % of the examples"),
        "tokenizer(text, truncation=True, max_length=24)",
    )
    assert astuple(padding_report([97] * 90 + [100] * 10).suggestions[1]) == (
        "max_length",
        104,
        "cuts nothing: p99 is 100, so cutting 1 % of the examples would save little",
        "tokenizer(text, truncation=True, max_length=104)",
    )


def test_many_examples_are_replayed_on_a_sample_with_the_longest_one():
    lengths = review(MOST_SIMULATED + 50_000)
    lengths[123] = 900
    started = time.perf_counter()
    report = padding_report(lengths)
    assert time.perf_counter() - started < 20  # about a second; a Python loop per example would take minutes at 1e7
    assert (report.simulated, report.longest) == (MOST_SIMULATED, 900)
    assert report.strategies[1].largest_batch_tokens == 32 * 904
    assert [found.batches for found in report.strategies[:4]] == [math.ceil(len(lengths) / 32)] * 4
    whole = LengthBuckets(lengths, max_tokens=report.max_tokens)
    assert report.strategies[4].batches == pytest.approx(whole.n_batches, rel=0.01)  # what a sample varies by
    assert report.strategies[4].padding_efficiency == pytest.approx(whole.padding_efficiency(), abs=0.01)
    assert "replayed on 200,000 examples" in " ".join(report.table().split())
    assert padding_report(lengths) == report


def test_what_is_refused_is_told_in_whole():
    for settings, message in (
        ({"lengths": [3, 512, 4], "max_tokens": 500}, whole("max_tokens=500 cannot")),
        ({"max_length": 0}, "max_length=0 is invalid; expected an integer of 1 or more. Pass max_length=32"),
        (
            {"lengths": []},  # in the words of LengthBuckets
            whole("lengths=<array of shape (0,)>"),
        ),
        ({"seed": -1}, "seed=-1 is invalid; expected an integer of 0 or more. Pass seed=0"),
    ):
        refuses(ValueError, message, padding_report, **{"lengths": [3], **settings})


@pytest.mark.parametrize("unit", ["tokens", "words"])
@pytest.mark.parametrize("longest", [5, 512, 1_000_000])
def test_the_text_fits_into_80_columns_and_says_everything(unit, longest):
    lengths = review()
    lengths[0] = longest
    report = padding_report(np.minimum(lengths, longest), max_length=100, unit=unit)
    text = report.table()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for found in report.strategies:
        assert found.name in text
        assert f"{100 * found.wasted_fraction:.1f} %" in text
        assert f"{found.largest_batch_tokens:,}" in text
    for found in report.suggestions:
        assert f"{found.name} = {found.value}: {found.reason}" in text.replace("\n", " ")
        assert found.code in text
    assert ("Counted in words, not in tokens: a text has more tokens than words." in text) == (unit == "words")
    assert [bool(found.code) for found in report.suggestions] == [unit == "tokens"] * 2  # a line that sets tokens
