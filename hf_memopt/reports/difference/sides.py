"""Read what a report is made of, whichever kind it is, and bring what two of them share into one form.

Known are the JSON of ``hf-memopt plan``, ``estimate`` and ``measure``, and what a run with ``MemoryReportCallback``
leaves in its output folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NotRequired, TypedDict, cast

from hf_memopt.components import Verdict, parts_of
from hf_memopt.json_fields import Number, read_json
from hf_memopt.plain_data import Count, CountOrZero, checked_path, parse_object
from hf_memopt.reports import Measurement, phase_name
from hf_memopt.reports.plan import PlanData, batch_of, read_plan_text, shown_one
from hf_memopt.reports.run import (
    RunData,
    curves_of,
    measured_parts,
    phase_pairs,
    read_run,
    run_file_of,
    total_bytes,
)
from hf_memopt.units import format_bytes, format_count, format_number

Kind = Literal["plan", "run", "estimate", "measurement"]
VERDICTS = {"fits": "fits", "tight": "fits, with little to spare", "over": "does not fit"}
ESTIMATE_FORMAT = 1
"""Raised when a field changes its meaning or goes."""


class GpuData(TypedDict):
    """The GPU of an estimate; see ``Gpu``."""

    name: str
    usable_bytes: Count


class HintData(TypedDict):
    """A change that was simulated; see ``Hint``."""

    changes: dict[str, Any]
    total_bytes: CountOrZero
    verdict: Verdict


class SecondsData(TypedDict):
    """The predicted seconds of an optimizer step; see ``StepTime``."""

    seconds: Number
    low: Number
    high: Number


class EstimateData(TypedDict):
    """An estimate; see ``Estimate``."""

    model: str
    batch_size: Count
    seq_len: Count | None
    settings: dict[str, Any]
    parameters: NotRequired[CountOrZero]
    trainable_parameters: NotRequired[CountOrZero]
    hints: NotRequired[list[HintData] | None]
    notes: NotRequired[list[str]]
    step_time: NotRequired[SecondsData | None]
    gpu: GpuData | None
    peak_reserved_bytes: CountOrZero
    context_bytes: CountOrZero | None
    total_bytes: CountOrZero
    components: dict[str, CountOrZero]
    phase_peaks: dict[str, dict[str, CountOrZero]]
    versions: dict[str, str]


@dataclass(frozen=True)
class Side:
    """One of two that are compared. Bytes everywhere.

    Attributes:
        name: of its file.
        kind: of it.
        title: model, batch and device.
        device: its name; "" where there is none.
        total_bytes: what it needs, or held.
        components: what the total is made of, in order.
        settings: as text, by name.
        versions: of packages.
        limit_bytes: what is usable of the device; None where that is unknown.
        phases: the allocated peak of each phase.
        failed: how the run ended early; "" where it did not.
        speed: seconds of a step and what else is known of it, as text; "" where nothing is.
        size: the parameters, as text.
        fixes: what was simulated to make it fit.
        notes: of it.
        curves: of a run, by name.
    """

    name: str
    kind: Kind
    title: str
    device: str
    total_bytes: int
    components: Mapping[str, int]
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    limit_bytes: int | None = None
    phases: Mapping[str, int] = field(default_factory=dict)
    failed: str = ""
    speed: str = ""
    size: str = ""
    fixes: Sequence[str] = ()
    notes: Sequence[str] = ()
    curves: Mapping[str, Any] = field(default_factory=dict)


def read_told(path: Path) -> tuple[Kind, Any, Path]:
    """Return what a file or a run's output folder holds: its kind, its data as their own reader returns them, the file.

    Raises:
        ValueError: there is no such file, or it holds something else or another version.
    """
    path = checked_path("path", path)
    found = run_file_of(path) if path.is_dir() else path
    if not found.is_file():
        raise ValueError(
            f"path={str(path)!r} does not exist; expected the output folder of a run, or the JSON of a plan or an "
            "estimate. Write it: hf-memopt plan MODEL --json > plan.json"
        )
    text, name = found.read_bytes(), str(found)
    kind = _kind_of(text, name)
    return kind, KINDS[kind][1](text, name), found


def _kind_of(text: bytes, name: str) -> Kind:
    try:
        told = parse_object(text)
        for kind, (mark, _, _) in KINDS.items():
            if mark in told:
                return kind
        raise ValueError(f"it has none of the fields {', '.join(mark for mark, _, _ in KINDS.values())}")
    except ValueError as error:
        raise ValueError(
            f"path={name!r} is nothing to report ({error}); expected what `hf-memopt plan --json`, `estimate --json` "
            "or a MemoryReportCallback wrote. Write it: hf-memopt plan MODEL --json > plan.json"
        ) from None


def _read_estimate(text: bytes, name: str) -> EstimateData:
    remedy = "Write it anew: hf-memopt estimate MODEL --json > estimate.json"
    formats = (ESTIMATE_FORMAT, None)  # once estimates had no format
    return cast(EstimateData, read_json(text, EstimateData, formats, path=name, what="an estimate", remedy=remedy))


def _read_measurement(text: bytes, name: str) -> Measurement:
    try:
        return Measurement.from_json(text)
    except ValueError as error:
        raise ValueError(
            f"path={name!r} cannot be read as a measurement ({error}); expected what this version of hf-memopt writes. "
            "Write it anew: hf-memopt measure train.py -o run.json"
        ) from None


def read_side(path: Path) -> Side:
    """Return what a file or a run's output folder says of memory; raises as ``read_told``."""
    kind, told, found = read_told(path)
    return KINDS[kind][2](told, str(found))


def _of_plan(told: PlanData, name: str) -> Side:
    one = shown_one(told)
    length = "" if one["seq_len"] is None else f" of {one['seq_len']} tokens"
    return Side(
        name=name,
        kind="plan",
        title=f"{told['model']}: {one['name']}, {batch_of(one)}{length}",
        device=told["gpu"],
        limit_bytes=told["usable_bytes"],
        total_bytes=one["total_bytes"],
        components=parts_of(one["components"], one["reserved_bytes"], one["context_bytes"]),
        settings={
            "model": told["model"],
            "set-up": one["name"],
            "batch": batch_of(one),
            **_texts(one["recipe"], without=("reasons", "name", "purpose")),
        },
        versions=told["versions"],
    )


def _of_run(told: RunData, name: str) -> Side:
    batches, lost = told["batches"], told["out_of_memory"]
    length = "" if batches["largest_length"] is None else f" of up to {batches['largest_length']} tokens"
    phases = {phase_name(phase): size or 0 for phase, (size, _) in phase_pairs(told["peaks"], {}).items()}
    micro = told["micro_batching"]
    limits = {} if micro is None else {f"micro-batching {key}": str(limit) for key, limit in micro["limits"].items()}
    return Side(
        name=name,
        kind="run",
        title=f"{told['model']}: {batches['largest_rows']} rows{length}",
        device=told["device_name"],
        limit_bytes=told["device_bytes"],
        total_bytes=total_bytes(told),
        components=measured_parts(told),
        phases=phases,
        curves=curves_of(told),
        failed="" if lost is None else f"ran out of memory in step {lost['step']}, {lost['phase']}",
        settings={
            "model": told["model"],
            "largest batch": f"{batches['largest_rows']}{length}",
            **told["arguments"],
            **limits,
        },
        versions={**told["versions"], "python": told["environment"].get("python", "")},
    )


def _of_estimate(told: EstimateData, name: str) -> Side:
    gpu, time = told["gpu"], told.get("step_time")
    size = f"batch {told['batch_size']}" + ("" if told["seq_len"] is None else f" x {told['seq_len']}")
    return Side(
        name=name,
        kind="estimate",
        title=f"{told['model']}: {size}",
        device="" if gpu is None else gpu["name"],
        limit_bytes=None if gpu is None else gpu["usable_bytes"],
        total_bytes=told["total_bytes"],
        components=parts_of(told["components"], told["peak_reserved_bytes"], told["context_bytes"]),
        phases={phase: peaks.get("allocated_bytes", 0) for phase, peaks in told["phase_peaks"].items()},
        speed=""
        if time is None
        else "{} s, {} to {}".format(*(format_number(time[one]) for one in ("seconds", "low", "high"))),
        size=_parameters(told),
        fixes=[_fix(hint) for hint in told.get("hints") or ()],
        notes=told.get("notes", ()),
        settings={"model": told["model"], "batch": size, **_texts(told["settings"])},
        versions=told["versions"],
    )


def _parameters(told: EstimateData) -> str:
    count, trained = told.get("parameters"), told.get("trainable_parameters")
    if count is None:
        return ""
    return format_count(count) + (f", {format_count(trained)} trained" if trained not in (None, count) else "")


def _fix(hint: HintData) -> str:
    changes = ", ".join(f"{name}={value!r}" for name, value in hint["changes"].items())
    return f"{changes}: {format_bytes(hint['total_bytes'])}, {VERDICTS[hint['verdict']]}"


def _of_measurement(found: Measurement, name: str) -> Side:
    size = f"{found.batch_size} rows" + ("" if found.seq_len is None else f" of {found.seq_len} tokens")
    settings = ("method", "precision", "optim", "checkpointing", "accumulation_steps")
    return Side(
        name=name,
        kind="measurement",
        title=f"{found.model}: {size}",
        device=found.gpu,
        total_bytes=found.total_bytes,
        components=found.measured.components,
        phases=found.measured.phases,
        speed=f"{format_number(median(found.step_seconds))} s" if found.step_seconds else "",
        failed="" if found.fits else f"ran out of memory in the {found.out_of_memory} phase",
        settings={"model": found.model, "largest batch": size, **{key: str(getattr(found, key)) for key in settings}},
        versions=found.versions,
    )


def _texts(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if name not in without}


KINDS: Mapping[Kind, tuple[str, Callable[[bytes, str], Any], Callable[[Any, str], Side]]] = {
    "plan": ("candidates", read_plan_text, _of_plan),
    "run": ("micro_batching", read_run, _of_run),
    "estimate": ("phase_peaks", _read_estimate, _of_estimate),
    "measurement": ("step_seconds", _read_measurement, _of_measurement),
}
"""Of each: a field that only this kind has, what reads it, and what brings it into the form of a side."""
