"""``Measurement``: a few real steps beside their prediction, as a table and as JSON that is checked when read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from textwrap import fill
from typing import Literal

from hf_memopt.json_fields import check_format
from hf_memopt.plain_data import Count, CountOrZero, check_fields, checked_path, from_object, parse_object, shown
from hf_memopt.units import format_bytes, format_count, format_number, percent
from hf_memopt.whole_files import check_target, write_whole, writing

FORMAT = 1
"""Of the JSON file; a larger number is of a later version."""

DEFAULT_STEPS = 10
"""To time."""

PACKAGES = ("hf-memopt", "torch", "transformers")
"""Whose versions are noted."""

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Method = Literal["full", "lora", "qlora"]
FIX = "Measure again: hf-memopt measure train.py --output run.json"


@dataclass(frozen=True)
class Figures:
    """Bytes and seconds of a set-up, measured or predicted.

    Attributes:
        allocated_bytes: the peak of what tensors hold.
        reserved_bytes: the peak of what torch's allocator holds; None on a CPU.
        context_bytes: what a process holds on the GPU besides; None where it is unknown.
        phases: the peak of allocated bytes in each phase: load, forward, backward, optimizer.
        components: the most that weights, gradients, optimizer state, and what a forward pass keeps for the backward
            pass (activations, logits) take.
        seconds: of an optimizer step: measured the median, predicted the most likely; None where it is unknown.
        low: the shortest step, or the least that is predicted.
        high: the longest step, or the most that is predicted.
    """

    allocated_bytes: CountOrZero
    reserved_bytes: CountOrZero | None
    context_bytes: CountOrZero | None
    phases: Mapping[str, CountOrZero]
    components: Mapping[str, CountOrZero]
    seconds: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def total_bytes(self) -> int:
        """Reserved bytes and context; of a CPU what is allocated."""
        return (self.reserved_bytes or self.allocated_bytes) + (self.context_bytes or 0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reserved_bytes is not None and self.reserved_bytes < self.allocated_bytes:
            raise ValueError(
                f"reserved_bytes={self.reserved_bytes}, allocated_bytes={self.allocated_bytes} cannot be: what is "
                f"allocated is a part of what is reserved; expected as much or more. {FIX}"
            )
        if self.seconds is not None and not 0 < (self.low or 0) <= self.seconds <= (self.high or 0):
            raise ValueError(
                f"seconds={self.seconds!r}, low={self.low!r}, high={self.high!r} are not in order; expected low, then "
                f"seconds, then high, all above 0. {FIX}"
            )


@dataclass(frozen=True)
class Measurement:
    """What ``measure`` found: the peaks of steps with the largest batch, seconds of steps with the run's own.

    Attributes:
        model: its class.
        parameters: elements of all parameters but those of adapters.
        trainable_parameters: elements of those that are trained.
        device: of the run, as torch spells it.
        gpu: its name, as ``find_gpu`` knows it; "" on a CPU.
        versions: of hf-memopt, torch and transformers.
        method: "full" (or with frozen parameters), "lora" or "qlora".
        precision: "fp32", "tf32", "fp16" or "bf16".
        optim: the optimizer, as ``TrainingArguments`` names it.
        checkpointing: whether activations are recomputed.
        accumulation_steps: batches of an optimizer step.
        batch_size: examples of the largest batch.
        seq_len: tokens of a row of it, padding included; None without text.
        steps: optimizer steps that were finished.
        out_of_memory: the phase in which memory ran out; "" where it did not.
        step_seconds: of each timed step, data loading included.
        examples: of a timed step, the mean.
        tokens: of a timed step, the mean, without padding; None where they are unknown.
        host_peak_bytes: of the process, so far; None where it is unknown.
        measured: the figures of the run.
        predicted: those of ``estimate`` for the same; None where it cannot say.
        notes: what was left out, and why.
    """

    model: str
    parameters: Count
    trainable_parameters: Count
    device: str
    gpu: str
    versions: Mapping[str, str]
    method: Method
    precision: Precision
    optim: str
    checkpointing: bool
    accumulation_steps: Count
    batch_size: CountOrZero
    seq_len: Count | None
    steps: CountOrZero
    out_of_memory: str
    step_seconds: tuple[float, ...]
    examples: float
    tokens: float | None
    host_peak_bytes: Count | None
    measured: Figures
    predicted: Figures | None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if missing := [name for name in PACKAGES if name not in self.versions]:
            raise ValueError(f"versions={shown(self.versions)} lack {missing[0]}; expected all of {PACKAGES}. {FIX}")

    @property
    def fits(self) -> bool:
        """Whether the steps ran without running out of memory."""
        return not self.out_of_memory

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens without padding that were trained in a second of the timed steps; None where it is unknown."""
        return (
            None
            if self.tokens is None or not self.step_seconds
            else self.tokens * len(self.step_seconds) / sum(self.step_seconds)
        )

    @property
    def total_bytes(self) -> int:
        """What the device held: reserved bytes and context, of a CPU what tensors held."""
        return self.measured.total_bytes

    def table(self, width: int = 80) -> str:
        """Return measured beside predicted as text of at most ``width`` columns (at least 59)."""
        width = max(width, 59)
        lines = [fill(text, width) for text in _heading(self)]
        lines += ["", ROW.format("", "measured", "predicted", "difference"), *_bytes(self)]
        lines += [*_seconds(self), ""]
        lines += [fill(text, width) for text in (_verdict(self), *(f"Note: {note}." for note in self.notes))]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return everything as JSON text, for ``from_json`` and ``plan(..., measured=...)``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the JSON text to a file.

        Raises:
            ValueError: the file exists and ``force`` is False, its folder does not, or it cannot be written.
        """
        target = check_target("path", path, force=force)
        with writing("path", target):
            write_whole(target, self.to_json() + "\n")

    @staticmethod
    def from_json(text: str | bytes) -> Measurement:
        """Return the measurement that ``to_json`` wrote.

        Raises:
            ValueError: the text is no such JSON object, of a later version, or a value cannot be. The message is a
                clause about a field or about "it".
        """
        values = parse_object(text)
        check_format(values, FORMAT)
        del values["format"]
        for name in ("measured", "predicted"):
            if isinstance(values.get(name), dict):
                values[name] = from_object(Figures, values[name])
        for item in fields(Measurement):
            if isinstance(values.get(item.name), list):
                values[item.name] = tuple(values[item.name])
        return from_object(Measurement, values)


def read_measurement(path: str | os.PathLike[str]) -> Measurement:
    """Return the measurement of a file.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    file = checked_path("measured", path)
    try:
        return Measurement.from_json(file.read_bytes())
    except OSError as error:
        raise ValueError(
            f"measured={str(file)!r} cannot be read: {error.strerror or error}; expected a file that "
            f"hf-memopt measure wrote. {FIX}"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"measured={str(file)!r} is not a measurement ({error}); expected a file that hf-memopt measure "
            f"wrote. {FIX}"
        ) from None


def named_measurement(measured: str | os.PathLike[str] | Measurement) -> tuple[Measurement, str]:
    """Return a measurement, or that of a file, and what notes call it.

    Raises:
        ValueError: the file cannot be read or holds something else, or the steps ran on a CPU.
    """
    if isinstance(measured, Measurement):
        found, name = measured, "the measurement"
    else:
        found, name = read_measurement(measured), os.fspath(measured)
    if not found.gpu:
        raise ValueError(
            f"measured={name!r} is of a CPU, whose seconds and bytes say nothing of a GPU; expected a run on the GPU. "
            "Measure there: hf-memopt measure train.py --output run.json"
        )
    return found, name


# ---- Text


ROW = "{:<23}{:>12}{:>12}{:>12}"


def _heading(found: Measurement) -> Iterator[str]:
    shape = f"{found.batch_size} x {found.accumulation_steps} examples"
    length = "" if found.seq_len is None else f" of {found.seq_len} tokens"
    settings = ", ".join([found.method, found.precision, found.optim, *(["checkpointing"] * found.checkpointing)])
    yield f"{found.model}, {format_count(found.parameters)} parameters, on {found.gpu or 'a CPU'}: {settings}"
    yield f"{found.steps} steps, the largest of {shape}{length}, {len(found.step_seconds)} of them timed"


def _bytes(found: Measurement) -> Iterator[str]:
    """Yield a line for each component, each phase and each total."""
    measured, predicted = found.measured, found.predicted
    for name, size in measured.components.items():
        yield _line(name, size, None if predicted is None else predicted.components.get(name))
    for name, size in measured.phases.items():
        other = None if predicted is None else predicted.phases.get(name)
        yield _line(f"peak in {name}", size, other)
    for name in ("allocated", "reserved", "context"):
        field = f"{name}_bytes"
        size = getattr(measured, field)
        if size is not None:
            yield _line(name if name == "context" else f"peak {name}", size, getattr(predicted, field, None))


def _line(name: str, measured: int, predicted: int | None) -> str:
    if predicted is None:
        return ROW.format(name, format_bytes(measured), "-", "")
    return ROW.format(name, format_bytes(measured), format_bytes(predicted), _difference(predicted, measured))


def _difference(predicted: float, measured: float) -> str:
    return percent(predicted / measured - 1, 1, signed=True) if measured else "0" if not predicted else "-"


def _seconds(found: Measurement) -> Iterator[str]:
    """Yield a line for the median, the shortest and the longest of the timed steps, beside the predicted range."""
    for name, field in (("step, median", "seconds"), ("step, shortest", "low"), ("step, longest", "high")):
        measured, predicted = getattr(found.measured, field), getattr(found.predicted, field, None)
        if measured is None:
            continue
        other = ("-", "") if predicted is None else (f"{format_number(predicted)} s", _difference(predicted, measured))
        yield ROW.format(name, f"{format_number(measured)} s", *other)


def _verdict(found: Measurement) -> str:
    if not found.fits:
        return f"Out of memory in the {found.out_of_memory} phase, after {found.steps} whole steps."
    speed = "" if found.tokens_per_second is None else f"; {found.tokens_per_second:,.0f} real tokens/s"
    host = "" if found.host_peak_bytes is None else f"; host {format_bytes(found.host_peak_bytes)} at its peak"
    other = "" if found.predicted is None else f", predicted {format_bytes(found.predicted.total_bytes)}"
    return f"It fits: {format_bytes(found.total_bytes)} in all{other}{speed}{host}."
