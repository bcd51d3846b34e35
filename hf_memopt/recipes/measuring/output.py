"""Show a ``Measurement`` as text: measured beside predicted, by component and phase, and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.recipes.measuring.measurement import Measurement

__all__ = ["measurement_table"]

NAMES = {"kept by forward": "activations and logits", "context": "context"}
ROW = "{:<26}{:>13}{:>13}{:>12}"


def measurement_table(found: Measurement, width: int = 80) -> str:
    """Return the measurement as text of at most ``width`` columns (at least 64)."""
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
        yield _line(NAMES.get(name, name), size, None if predicted is None else predicted.components.get(name))
    for name, size in measured.phases.items():
        other = None if predicted is None else predicted.phases.get(name)
        yield _line(f"peak in {name}", size, other)
    for name in ("allocated", "reserved", "context"):
        field = f"{name}_bytes"
        size = getattr(measured, field)
        if size is not None:
            yield _line(NAMES.get(name, f"peak {name}"), size, getattr(predicted, field, None))


def _line(name: str, measured: int, predicted: int | None) -> str:
    if predicted is None:
        return ROW.format(name, format_bytes(measured), "-", "")
    return ROW.format(name, format_bytes(measured), format_bytes(predicted), _difference(predicted, measured))


def _difference(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else "0" if not predicted else "-"


def _seconds(found: Measurement) -> Iterator[str]:
    measured, predicted = found.measured, found.predicted
    if measured.seconds is None:
        return
    other = None if predicted is None else predicted.seconds
    cells = ("-", "") if other is None else (f"{other:.3g} s", _difference(other, measured.seconds))
    yield ROW.format("a step, the median", f"{measured.seconds:.3g} s", *cells)
    yield f"from {measured.low:.3g} to {measured.high:.3g} s" + (
        "" if predicted is None or other is None else f", predicted {predicted.low:.3g} to {predicted.high:.3g} s"
    )


def _verdict(found: Measurement) -> str:
    if not found.fits:
        return f"Out of memory in the {found.out_of_memory} phase, after {found.steps} whole steps."
    speed = "" if found.tokens_per_second is None else f"; {found.tokens_per_second:,.0f} real tokens/s"
    host = "" if found.host_peak_bytes is None else f"; host {format_bytes(found.host_peak_bytes)} at its peak"
    return f"It fits: {format_bytes(found.total_bytes)} in all{speed}{host}."
