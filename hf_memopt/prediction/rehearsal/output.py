"""Print a rehearsal: verdict first, within 80 columns."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from hf_memopt.units import format_bytes, format_duration, to_gib

if TYPE_CHECKING:
    from hf_memopt.prediction.rehearsal.result import Rehearsal

COLUMNS = 80
MOST_PLACES = 8


def text_of(found: Rehearsal, command: str, width: int = COLUMNS) -> str:
    """Return the text; ``command`` is what to do next, ``width`` that of the terminal."""
    width = min(width, COLUMNS)
    parts = [first_lines(found), _phases(found), _held(found, width), _notes(found, command)]
    lines = [line for part in parts if part for line in (*part, "")]
    return "\n".join(
        line if len(line) <= width or line.startswith("  ") else fill(line, width, subsequent_indent="  ")
        for line in lines[:-1]
    )


def first_lines(found: Rehearsal) -> list[str]:
    """Return the verdict, and what it means."""
    usable, failure = f"{to_gib(found.usable_bytes):.2f} GiB", found.out_of_memory
    steps = f"{found.steps} step{'s' * (found.steps != 1)} in {format_duration(found.seconds)}"
    steps += ", measured on this GPU" if found.is_measured else ", rehearsed without the GPU"
    if failure is None:
        reserved = found.context_bytes + max(peak.reserved_bytes for peak in found.phases.values())
        needed = found.needed_bytes or reserved
        lines = [f"FITS: {to_gib(needed):.2f} of {usable} ({found.gpu})"]
        if found.recovered:
            steps += f"; ran out {found.recovered} x and went on by itself"
        else:
            steps += f". With 1 % less: out in {found.peak_phase}"
        if reserved > needed * 1.01:
            lines.append(f"Where there is more, torch's allocator keeps up to {format_bytes(reserved)}")
        return [*lines, steps]
    batch = "" if failure.batch is None else f", batch of {failure.batch}"
    where = failure.phase if failure.phase in ("load", "evaluation") else f"step {failure.step}, {failure.phase}"
    used, gaps = failure.allocated_bytes, failure.reserved_bytes - failure.allocated_bytes
    return [
        f"RUNS OUT in {where}{batch}: {format_bytes(failure.asked_bytes)} asked for, "
        f"{format_bytes(failure.free_bytes)} free",
        f"Of {usable} ({found.gpu}): {format_bytes(used)} used, {format_bytes(gaps)} in gaps, "
        f"{format_bytes(found.context_bytes)} context",
        f"At {_short(failure.place)}",
        steps,
    ]


def _phases(found: Rehearsal) -> list[str]:
    context, out = to_gib(found.context_bytes), found.out_of_memory and found.out_of_memory.phase
    rows = [f"{'phase':<12}{'allocated':>11}{'reserved':>11}   GiB, each with {context:.2f} of CUDA's context"]
    for name, peak in found.phases.items():
        mark = "   < peak" if name == found.peak_phase else "   < out" if name == out else ""
        sizes = (to_gib(size) + context for size in (peak.allocated_bytes, peak.reserved_bytes))
        rows.append(f"{name:<12}" + "".join(f"{size:>11.2f}" for size in sizes) + mark)
    return rows


def _held(found: Rehearsal, width: int) -> list[str]:
    shown, rest = found.held[:MOST_PLACES], found.held[MOST_PLACES:]
    rows = [(one.size_bytes, one.blocks, _short(one.place) + (one.code and f": {one.code}")) for one in shown]
    rows += [(sum(one.size_bytes for one in rest), sum(one.blocks for one in rest), "other places")] if rest else []
    heading = "At peak memory" if found.out_of_memory is None else "When memory ran out"
    lines = (f"  {format_bytes(size):>10} {blocks:>5} x  {where}"[:width] for size, blocks, where in rows)
    return [f"{heading} these held it:", *map(str.rstrip, lines)]


def _short(place: str) -> str:
    """Return a place with the file's name alone."""
    path, colon, rest = place.partition(":")
    return f"{path.rpartition('/')[2]}{colon}{rest}" if rest[:1].isdigit() else place


def _notes(found: Rehearsal, command: str) -> list[str]:
    batches = [] if found.largest_batch is None else [f"largest batch {found.largest_batch}"]
    batches += [] if found.longest_row is None else [f"longest row of the data {found.longest_row} tokens"]
    seconds = ", ".join(f"{one:.2f}" for one in found.step_seconds)
    rows = [("Batches", ", ".join(batches)), ("Seconds", seconds and f"{seconds} of the steps")]
    rows += [*(("Note", note) for note in found.notes), ("Next", command)]
    return [f"{name:<11}{text}" for name, text in rows if text]
