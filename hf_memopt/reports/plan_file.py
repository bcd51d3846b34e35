"""The JSON that ``hf-memopt plan --json`` writes: its fields that a report shows, and the reading of a file of it.

A file may come from another version or from an editor, so every field is checked before anything is drawn. Fields that
no report shows are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NotRequired, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

from hf_memopt.plain_data import Count, CountOrZero, check_value, parse_object, shown

__all__ = ["FORMAT", "CandidateData", "PlanData", "read_plan_file", "read_plan_text"]

FORMAT = 1
"""Raised when a field changes its meaning or goes."""

Number = float | int
Verdict = Literal["fits", "tight", "over"]


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
    lacks_bytes: int
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
    tokens: Number | None
    cut: CountOrZero


class CellData(TypedDict):
    """A batch at a length; see ``Cell``."""

    verdict: Verdict
    total_bytes: CountOrZero | None


class FitMapData(TypedDict):
    """What fits at other lengths and batches; see ``FitMap``."""

    lengths: list[Count | None]
    rows: list[Count]
    cells: list[list[CellData]]


SpanData = TypedDict("SpanData", {"from": Number, "to": Number, "name": str})
StepData = TypedDict("StepData", {"from": Number, "number": Count})


class PeakData(TypedDict):
    """When the allocated peak is reached, and where."""

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
    """Another value for a choice; see ``Alternative``."""

    value: str
    total_bytes: CountOrZero | None
    verdict: Literal["fits", "tight", "over", ""]
    time_ratio: Number | None
    refused: str


class ChoiceData(TypedDict):
    """A field of the recipe; see ``Choice``."""

    name: str
    value: str
    reason: str
    alternatives: list[AlternativeData]


class StrategyData(TypedDict):
    """A way to batch and pad; see ``PaddingStrategy``."""

    name: str
    padding_efficiency: Number
    largest_batch_tokens: CountOrZero


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


class CertaintyData(TypedDict):
    """What a figure rests on."""

    figure: str
    kind: str
    detail: str


class FiguresData(TypedDict):
    """What is shown beside the candidates; see ``report_figures``."""

    fit_map: FitMapData | None
    timeline: TimelineData | None
    choices: list[ChoiceData]
    padding: PaddingData | None
    certainty: list[CertaintyData]
    left_out: list[str]


class PlanData(TypedDict):
    """A plan; see ``Plan``."""

    command: str
    model: str
    parameters: CountOrZero
    gpu: str
    usable_bytes: Count
    memory_bytes: Count
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


def read_plan_file(path: Path) -> PlanData:
    """Return the plan that a file holds.

    Raises:
        ValueError: there is no such file, it holds no plan, or one of another version.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(
            f"path={str(path)!r} {what}; expected the JSON of a plan. Write it: hf-memopt plan MODEL --json > plan.json"
        )
    return read_plan_text(path.read_bytes(), str(path))


def read_plan_text(text: str | bytes, name: str) -> PlanData:
    """Return the plan of a JSON text; ``name`` is what messages call it.

    Raises:
        ValueError: it is no plan, or one of another version.
    """
    try:
        told = parse_object(text)
        if "format" not in told or "candidates" not in told:
            raise ValueError("it has no format and candidates")
        if told["format"] != FORMAT:
            version = told.get("versions", {})
            made_by = version.get("hf-memopt", "another version") if isinstance(version, dict) else "another version"
            raise ValueError(f"it has format {shown(told['format'])}, written by hf-memopt {made_by}")
        _check(told, PlanData, "")
        _check_places(told)
    except ValueError as error:
        raise ValueError(
            f"path={name!r} is not a plan of format {FORMAT} ({error}); expected what `hf-memopt plan --json` writes. "
            "Write it anew with this version: hf-memopt plan MODEL --json > plan.json"
        ) from None
    return told  # type: ignore[return-value]  # checked


def _check(value: Any, kind: Any, name: str) -> None:
    """Raise ValueError if JSON data does not fit a type; the message starts with the field's place."""
    if is_typeddict(kind):
        _expect(isinstance(value, dict), name, value, "an object")
        for key, one in get_type_hints(kind, include_extras=True).items():
            if get_origin(one) is NotRequired:
                if key not in value:
                    continue
                (one,) = get_args(one)
            elif key not in value:
                raise ValueError(f"it has no {_place(name, key)}")
            _check(value[key], one, _place(name, key))
    elif get_origin(kind) is list:
        _expect(isinstance(value, list), name, value, "a list")
        for number, one in enumerate(value):
            _check(one, get_args(kind)[0], f"{name}[{number}]")
    elif get_origin(kind) is dict:
        _expect(isinstance(value, dict), name, value, "an object")
        if get_args(kind)[1] is not Any:
            for key, one in value.items():
                _check(one, get_args(kind)[1], _place(name, key))
    elif (options := _of_optional(kind)) is not None:
        if value is not None:
            _check(value, options, name)
    else:
        try:
            check_value(name, value, kind)
        except ValueError as error:
            raise ValueError(str(error).rpartition(". Pass another")[0] or str(error)) from None


def _of_optional(kind: Any) -> Any:
    """Return X of ``X | None``; None for another type."""
    options = get_args(kind)
    if NoneType not in options:
        return None
    return Union[tuple(one for one in options if one is not NoneType)]  # noqa: UP007  # of a tuple


def _place(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _expect(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name or 'it'}={shown(value)} is invalid; expected {rule}")


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
