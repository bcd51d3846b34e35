"""The JSON that ``hf-memopt plan --json`` writes: its fields that a report shows, and the reading of a file of it.

A file may come from another version or from an editor, so every field is checked before anything is drawn. Fields that
no report shows are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast

from hf_memopt.components import Verdict
from hf_memopt.json_fields import Number, read_json
from hf_memopt.plain_data import Count, CountOrZero

FORMAT = 2
"""Raised when a field changes its meaning or goes."""


class PhaseData(TypedDict):
    """What a phase needs; see ``Estimate.phases``."""

    allocated_bytes: CountOrZero
    reserved_bytes: CountOrZero
    components: dict[str, CountOrZero]


class CandidateData(TypedDict):
    """A set-up; see ``Candidate``."""

    name: str
    stage: str
    seq_len: Count | None
    micro_batch_size: Count
    accumulation_steps: Count
    examples: Count
    reserved_bytes: CountOrZero
    context_bytes: CountOrZero
    margin_bytes: CountOrZero
    total_bytes: CountOrZero
    components: dict[str, CountOrZero]
    phase: str
    phases: NotRequired[dict[str, PhaseData]]
    seconds: Number | None
    low: Number | None
    high: Number | None
    seconds_per_example: Number | None
    tokens: Number | None
    consents: list[str]
    verdict: Verdict
    reason: str
    recipe: dict[str, Any]


class ShortfallData(TypedDict):
    """What is missing where nothing fits; see ``Shortfall``."""

    nearest: CandidateData
    longest: Count | None
    batch: Count | None
    parameters: CountOrZero
    gpu: str
    consents: list[str]


class TextsData(TypedDict):
    """The lengths that were planned for; see ``Texts``."""

    seq_len: Count | None
    width: Count | None
    rows: Count | None
    cut: CountOrZero


class CellData(TypedDict):
    """A batch at a length: its verdict, and its bytes where it was simulated, None where others prove the verdict."""

    verdict: Verdict
    total_bytes: CountOrZero | None


class FitMapData(TypedDict):
    """The verdicts by batch and length.

    ``lengths`` are tokens of the longest row, ascending, [None] for a model without text; ``rows`` of a micro-batch,
    ascending; ``cells`` one for each of ``rows`` and, within it, each of ``lengths``.
    """

    lengths: list[Count | None]
    rows: list[Count]
    cells: list[list[CellData]]


SpanData = TypedDict("SpanData", {"from": Number, "to": Number, "name": str})
StepData = TypedDict("StepData", {"from": Number, "number": Count})


class PeakData(TypedDict):
    """The moment that decides the total: when, what is allocated then, and where."""

    position: Number
    allocated_bytes: CountOrZero
    phase: str
    module: str


class TimelineData(TypedDict):
    """Bytes over the events of a run; positions from 0 to 1."""

    positions: list[Number]
    components: dict[str, list[CountOrZero]]
    reserved_bytes: list[CountOrZero]
    phases: list[SpanData]
    steps: list[StepData]
    peak: PeakData


class AlternativeData(TypedDict):
    """Another value for a choice, as text, and what it would cost.

    ``total_bytes`` are reserved bytes and context; ``time_ratio`` is the seconds of a step beside those of the set-up,
    None where they are not predicted.
    """

    value: str
    total_bytes: CountOrZero
    verdict: Verdict
    time_ratio: Number | None


class ChoiceData(TypedDict):
    """A field of the recipe, why it has its value, and what others would cost."""

    name: str
    value: str
    reason: str
    alternatives: list[AlternativeData]


class StrategyData(TypedDict):
    """A way to batch and pad; see ``PaddingStrategy``."""

    name: str
    padding_efficiency: Number
    largest_batch_tokens: CountOrZero
    epoch_tokens: NotRequired[CountOrZero]
    epoch_seconds: NotRequired[Number | None]


class HistogramData(TypedDict):
    """Examples by length; see ``Histogram``."""

    edges: list[CountOrZero]
    counts: list[CountOrZero]
    has_tail: bool


class PaddingData(TypedDict):
    """What padding costs; see ``PaddingReport``."""

    examples: Count
    mean: Number
    longest: Count
    percentiles: dict[str, CountOrZero]
    histogram: HistogramData
    strategies: list[StrategyData]
    batch_size: Count


class FiguresData(TypedDict):
    """What is shown beside the candidates; see ``report_figures``."""

    fit_map: FitMapData | None
    timeline: TimelineData | None
    choices: list[ChoiceData]
    padding: PaddingData | None


class PlanData(TypedDict):
    """A plan; see ``Plan``."""

    command: str
    model: str
    parameters: CountOrZero
    gpu: str
    gpu_source: NotRequired[str]
    usable_bytes: Count
    goal: str
    effective_batch_size: Count
    world_size: Count
    texts: TextsData
    chosen: CandidateData | None
    shortfall: ShortfallData | None
    candidates: list[CandidateData]
    shown: list[CountOrZero]
    figures: FiguresData
    notes: list[str]
    simulations: CountOrZero
    script: NotRequired[str | None]
    versions: dict[str, str]


def read_plan_text(text: str | bytes, name: str) -> PlanData:
    """Return the plan of a JSON text; ``name`` is what messages call it.

    Raises:
        ValueError: it is no plan, or one of another version.
    """
    remedy = "Write it anew: hf-memopt plan MODEL --json > plan.json"
    found = read_json(text, PlanData, (1, FORMAT), path=name, what="a plan", remedy=remedy, check=_check_places)
    return cast(PlanData, found)


def _check_places(told: Mapping[str, Any]) -> None:
    """Check what the types do not say: lists that belong together are as long as each other."""
    if (told["chosen"] is None) is (told["shortfall"] is None):
        raise ValueError("it has both a chosen set-up and a shortfall, or neither")
    if any(place >= len(told["candidates"]) for place in told["shown"]):
        raise ValueError("it has a place in shown that is none of its candidates")
    figures = told["figures"]
    if (chart := figures["fit_map"]) is not None:
        sizes = {len(row) for row in chart["cells"]}
        if len(chart["cells"]) != len(chart["rows"]) or sizes != {len(chart["lengths"])}:
            raise ValueError("it has a figures.fit_map without one cell for each of rows and lengths")
    if (line := figures["timeline"]) is not None:
        lists = [line["reserved_bytes"], *line["components"].values()]
        if not line["positions"] or any(len(one) != len(line["positions"]) for one in lists):
            raise ValueError("it has a figures.timeline with lists of different lengths")
    if (padding := figures["padding"]) is not None:
        histogram = padding["histogram"]
        if not histogram["counts"] or len(histogram["edges"]) != len(histogram["counts"]) + 1:
            raise ValueError("it has a figures.padding.histogram without one edge more than counts")


# ---- What the fields say together


def shown_one(told: PlanData) -> CandidateData:
    """Return the chosen set-up, else the one that comes nearest."""
    if told["chosen"] is not None:
        return told["chosen"]
    assert told["shortfall"] is not None  # checked when it was read
    return told["shortfall"]["nearest"]


def batch_of(one: CandidateData) -> str:
    """Return the rows of a micro-batch times the micro-batches."""
    return f"{one['micro_batch_size']} x {one['accumulation_steps']}"


def is_same(one: CandidateData, other: CandidateData | None) -> bool:
    """Return whether two are the same set-up."""
    names = ("name", "micro_batch_size", "seq_len")
    return other is not None and all(one.get(name) == other.get(name) for name in names)
