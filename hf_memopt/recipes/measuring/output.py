"""Show a ``Measurement`` as text: measured beside predicted, by component and phase, and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.recipes.measuring.measurement import Measurement

__all__ = ["measurement_table"]

ROW = "{:<23}{:>12}{:>12}{:>12}"


def measurement_table(found: Measurement, width: int = 80) -> str:
    """Return the measurement as text of at most ``width`` columns (at least 59)."""
    width = max(width, 59)
    lines = [fill(text, width) for text in _heading(found)]
    lines += ["", ROW.format("", "measured", "predicted", "difference"), *_bytes(found)]
    lines += [*_seconds(found), ""]
    lines += [fill(text, width) for text in (_verdict(found), *(f"Note: {note}." for note in found.notes))]
    return "\n".join(line.rstrip() for line in lines)


def _heading(found: Measurement) -> Iterator[str]:
    shape = f"{found.batch_size} x {found.accumulation_steps} examples"
    length = "" if found.seq_len is None else f" of {found.seq_len} tokens"
    settings = ", ".join([found.method, found.precision, found.optim, *(["checkpointing"] * found.checkpointing)])
    yield f"{found.model}, {found.parameters / 1e6:,.1f} M parameters, on {found.gpu or 'a CPU'}: {settings}"
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
    return f"{predicted / measured - 1:+.1%}" if measured else "0" if not predicted else "-"


def _seconds(found: Measurement) -> Iterator[str]:
    """Yield a line for the median, the shortest and the longest of the timed steps, beside the predicted range."""
    for name, field in (("step, median", "seconds"), ("step, shortest", "low"), ("step, longest", "high")):
        measured, predicted = getattr(found.measured, field), getattr(found.predicted, field, None)
        if measured is None:
            continue
        other = ("-", "") if predicted is None else (f"{predicted:.3g} s", _difference(predicted, measured))
        yield ROW.format(name, f"{measured:.3g} s", *other)


def _verdict(found: Measurement) -> str:
    if not found.fits:
        return f"Out of memory in the {found.out_of_memory} phase, after {found.steps} whole steps."
    speed = "" if found.tokens_per_second is None else f"; {found.tokens_per_second:,.0f} real tokens/s"
    host = "" if found.host_peak_bytes is None else f"; host {format_bytes(found.host_peak_bytes)} at its peak"
    other = "" if found.predicted is None else f", predicted {format_bytes(found.predicted.total_bytes)}"
    return f"It fits: {format_bytes(found.total_bytes)} in all{other}{speed}{host}."
