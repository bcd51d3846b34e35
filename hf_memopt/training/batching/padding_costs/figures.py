"""Report what padding costs on given lengths: percentiles, what each way of batching wastes, and what to set instead.

``padding_report`` replays the ways of batching on the lengths alone, without tokens, a model or torch. Percentiles,
histogram and fixed widths use all examples; strategies with an order are replayed on at most ``MOST_SIMULATED``
examples, so 1e7 lengths take seconds.

Limitations: the cost of attention, which grows with the square of the width, is not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_memopt.plain_data import check_value, checked_path
from hf_memopt.training.batching.padding_costs.output import print_report
from hf_memopt.training.batching.padding_costs.strategies import (
    PaddingStrategy,
    fitting_budget,
    fixed_strategies,
    mean_batch,
    ordered_strategies,
    pad_lengths,
)
from hf_memopt.training.batching.plan import LengthBuckets, check_batch_limits, check_settings
from hf_memopt.units import percent

MOST_SIMULATED = 200_000
PERCENTILES = (50, 75, 90, 95, 99)
FINEST_HISTOGRAM = 64  # cells up to the 99th percentile
WORTH_CUTTING = 0.9  # a max_length above this share of the longest example saves too little for the text that it loses


@dataclass(frozen=True, slots=True)
class Histogram:
    """Examples by length.

    Cell i holds the lengths from ``edges[i]`` to ``edges[i + 1] - 1``. All cells are equally wide except the last one,
    which holds the longest 1 % where those lie far out (``has_tail``).
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]
    has_tail: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """What truncating to ``max_length`` would lose, as shares of the examples and of all tokens."""

    max_length: int
    examples_fraction: float
    tokens_fraction: float


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A value to set, the reason, and the line of code that sets it (empty if the value is not in tokens)."""

    name: str
    value: int
    reason: str
    code: str


@dataclass(frozen=True)
class PaddingReport:
    """The result of ``padding_report``: ``table()`` as text, ``as_dict()`` for JSON, ``plot(path)`` as a picture.

    Attributes:
        percentiles: lengths by ``"p50"`` ... ``"p99"``.
        simulated: the number of examples on which the strategies with an order were replayed.
        max_tokens: the token budget that was replayed: the given one, else the suggested one.
    """

    examples: int
    total: int
    mean: float
    shortest: int
    longest: int
    percentiles: dict[str, int]
    histogram: Histogram
    strategies: tuple[PaddingStrategy, ...]
    cuts: tuple[Cut, ...]
    suggestions: tuple[Suggestion, ...]
    batch_size: int
    max_tokens: int
    max_length: int | None
    pad_to_multiple_of: int
    seed: int
    simulated: int
    unit: str

    def table(self) -> str:
        """Return the report as text of at most 80 columns."""
        from hf_memopt.terminal import printed_text  # rich draws a random number when it is imported

        return printed_text(partial(print_report, self))

    def _repr_html_(self) -> str:
        from hf_memopt.terminal import printed_html

        return printed_html(partial(print_report, self))

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        strategies = [{**asdict(found), "wasted_fraction": found.wasted_fraction} for found in self.strategies]
        return {**asdict(self), "strategies": strategies}

    def plot(self, path: str | Path) -> None:
        """Draw the lengths, and what each way of batching pads, to a PNG, SVG or PDF file.

        Raises:
            ValueError: ``path`` is not such a file that can be written.
            MissingExtraError: matplotlib is not installed.
        """
        from hf_memopt.training.batching.padding_costs.lengths_picture import draw_lengths

        draw_lengths(self.as_dict(), checked_path("path", path), self.unit)


def padding_report(
    lengths: ArrayLike,
    *,
    batch_size: int = 32,
    max_tokens: int | None = None,
    max_length: int | None = None,
    pad_to_multiple_of: int = 8,
    seed: int = 0,
    unit: str = "tokens",
) -> PaddingReport:
    """Compare how much padding each way of batching wastes on these lengths, and suggest settings.

    Args:
        lengths: tokens per example, shape (examples,); see ``token_lengths``.
        batch_size: examples per batch.
        max_tokens: budget in padded tokens; by default the one whose mean batch has ``batch_size`` examples.
        max_length: truncate longer examples to it before batching, as ``tokenizer(truncation=True)`` would;
            percentiles and histogram are those of the whole examples.
        pad_to_multiple_of: batches of every strategy are padded to a multiple of it.
        seed: of the random orders and of the sample.
        unit: what was counted; with another unit than ``"tokens"`` no code with a token budget is suggested.

    Raises:
        ValueError: no lengths, or lengths or sizes that ``LengthBuckets`` refuses; a ``max_length`` below 1; an example
            that does not fit into ``max_tokens``.

    Examples:
        >>> report = padding_report([12, 480, 30, 25, 60, 9, 14, 333] * 100, batch_size=16)
        >>> report.strategies[0].name, round(report.strategies[0].wasted_fraction, 2), report.percentiles["p75"]
        ('fixed to longest, 480', 0.75, 60)
    """
    check_value("unit", unit, str, "tokens")
    multiple = pad_to_multiple_of
    whole = LengthBuckets(lengths, batch_size=batch_size, seed=seed, pad_to_multiple_of=multiple).lengths
    if max_length is not None:
        check_settings(max_length=max_length)
        max_length = min(max_length, 2**31 - 1)
    cut = whole if max_length is None else np.minimum(whole, max_length)
    if max_tokens is not None:
        check_batch_limits(None, max_tokens)
        _check_budget(cut, max_tokens, multiple)
    total = int(whole.sum(dtype=np.int64))
    ranks = np.percentile(whole, PERCENTILES, method="inverted_cdf")
    percentiles = {f"p{rank}": int(length) for rank, length in zip(PERCENTILES, ranks, strict=True)}
    cuts = _cuts(whole, total, percentiles, max_length, multiple)
    sample = _sample(cut, seed)
    budget = max_tokens or fitting_budget(sample, batch_size, multiple, seed)
    strategies = (
        *fixed_strategies(whole, batch_size, max_length, multiple),
        *ordered_strategies(sample, batch_size, budget, multiple, seed, len(cut)),
    )
    suggestions: tuple[Suggestion, ...] = (
        _suggest_budget(sample, budget, max_tokens, batch_size, multiple, seed),
        _suggest_length(whole, cuts, percentiles, multiple),
    )
    if unit != "tokens":
        suggestions = tuple(replace(found, code="") for found in suggestions)
    return PaddingReport(
        examples=len(whole),
        total=total,
        mean=total / len(whole),
        shortest=int(whole.min()),
        longest=int(whole.max()),
        percentiles=percentiles,
        histogram=length_histogram(whole, percentiles["p99"]),
        strategies=strategies,
        cuts=cuts,
        suggestions=suggestions,
        batch_size=batch_size,
        max_tokens=budget,
        max_length=max_length,
        pad_to_multiple_of=multiple,
        seed=seed,
        simulated=len(sample),
        unit=unit,
    )


def _check_budget(lengths: NDArray[np.int32], max_tokens: int, multiple: int) -> None:
    row = int(lengths.argmax())
    padded = int(pad_lengths(lengths[row : row + 1], multiple)[0])
    if padded > max_tokens:
        raise ValueError(
            f"max_tokens={max_tokens!r} cannot hold the longest example, lengths[{row}]={int(lengths[row])}, padded to "
            f"{padded}; expected every example to fit into one batch. Pass max_tokens={padded}, or cut: max_length="
            f"{max(max_tokens // multiple * multiple, 1)}"
        )


def _sample(lengths: NDArray[np.int32], seed: int) -> NDArray[np.int32]:
    """Return at most ``MOST_SIMULATED`` lengths, the longest among them."""
    if len(lengths) <= MOST_SIMULATED:
        return lengths
    drawn = np.random.default_rng(seed).choice(len(lengths), MOST_SIMULATED, replace=False, shuffle=False)
    drawn[0] = lengths.argmax()
    return lengths[drawn]


def length_histogram(lengths: NDArray[np.int32], p99: int) -> Histogram:
    """Return the histogram in cells whose width is a power of two, 64 of them at most up to the 99th percentile.

    If the longest example exceeds it by more than a quarter, all longer examples share one last cell.
    """
    longest = int(lengths.max())
    top = p99 if longest > p99 * 1.25 else longest
    width = 1
    while top // width + 1 > FINEST_HISTOGRAM:
        width *= 2
    cells = top // width + 1
    has_tail = longest >= cells * width
    counts = np.bincount(np.minimum(lengths // width, cells), minlength=cells + 1)
    edges = [*range(0, (cells + 1) * width, width), *([longest + 1] if has_tail else [])]
    return Histogram(tuple(edges), tuple(counts[: len(edges) - 1].tolist()), has_tail)


def _cuts(
    lengths: NDArray[np.int32], total: int, percentiles: dict[str, int], asked: int | None, multiple: int
) -> tuple[Cut, ...]:
    """Return what cutting would lose at p95, p99, the powers of two from the median up, and the length asked for."""
    longest = int(lengths.max())
    powers = {2**k for k in range(31) if percentiles["p50"] <= 2**k < longest}
    others = set(pad_lengths(np.array([percentiles["p95"], percentiles["p99"]]), multiple).tolist())
    others |= set() if asked is None else {asked}
    found = []
    for max_length in sorted(powers | {length for length in others if length < longest}):
        over = lengths[lengths > max_length]
        lost = int(over.sum(dtype=np.int64)) - len(over) * max_length
        found.append(Cut(max_length, len(over) / len(lengths), lost / max(total, 1)))
    return tuple(found)


def _suggest_budget(
    sample: NDArray[np.int32], budget: int, asked: int | None, batch_size: int, multiple: int, seed: int
) -> Suggestion:
    value = budget if asked is None else fitting_budget(sample, batch_size, multiple, seed)
    mean, longest = mean_batch(sample, value, multiple, seed), int(pad_lengths(sample.max(keepdims=True), multiple)[0])
    if value == longest and mean > batch_size:
        reason = f"the least that holds the longest example; a batch then has {mean:.1f} examples in the mean"
    else:
        reason = f"a batch has {mean:.1f} examples in the mean, {batch_size} were asked for; it holds the longest one"
    return Suggestion("max_tokens", value, reason, f"bucketed(dataset, max_tokens={value})")


def _suggest_length(
    lengths: NDArray[np.int32], cuts: tuple[Cut, ...], percentiles: dict[str, int], multiple: int
) -> Suggestion:
    longest = int(pad_lengths(lengths.max(keepdims=True), multiple)[0])
    mild = [cut for cut in cuts if cut.examples_fraction <= 0.01 and cut.max_length <= WORTH_CUTTING * longest]
    if mild:
        value = mild[0].max_length
        reason = (
            f"cuts {percent(mild[0].examples_fraction, 1)} of the examples and loses "
            f"{percent(mild[0].tokens_fraction, 1)} of the "
            f"text; the longest row, which sets the memory peak, falls from {longest} to {value}"
        )
    else:
        value = longest
        reason = f"cuts nothing: p99 is {percentiles['p99']}, so cutting 1 % of the examples would save little"
    return Suggestion("max_length", value, reason, f"tokenizer(text, truncation=True, max_length={value})")
