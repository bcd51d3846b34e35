"""Print a rehearsal: verdict first, within 80 columns."""

from __future__ import annotations

import linecache
from textwrap import fill

from hf_memopt.rehearsal.result import Held, Rehearsal
from hf_memopt.units import format_bytes, format_duration, to_gib

COLUMNS = 80
MOST_PLACES = 8


def text_of(found: Rehearsal, command: str, width: int = COLUMNS) -> str:
    """Return the text; ``command`` is what to do next, ``width`` that of the terminal."""
    width = min(width, COLUMNS)
    parts = [_verdict(found), _phases(found), _held(found, width), _notes(found, command)]
    lines = [line for part in parts if part for line in (*part, "")]
    return "\n".join(
        line if len(line) <= width or line.startswith("  ") else fill(line, width, subsequent_indent="  ")
        for line in lines[:-1]
    )


def _verdict(found: Rehearsal) -> list[str]:
    usable, failure = f"{to_gib(found.usable_bytes):.2f} GiB", found.out_of_memory
    how = "on it" if found.is_measured else "without it"
    steps = f"{found.steps} step{'s' if found.steps != 1 else ''} rehearsed {how} in {format_duration(found.seconds)}"
    if found.needed_bytes is not None:
        lines = [f"FITS: {to_gib(found.needed_bytes):.2f} of {usable} ({found.gpu})"]
        most = found.context_bytes + max(peak.reserved_bytes for peak in found.phases.values())
        if most > found.needed_bytes * 1.01:
            lines.append(f"torch reserves up to {format_bytes(most)} where it can, and gives back what it must.")
        if found.recovered:
            lines.append(f"Memory ran out {found.recovered} time(s), and the script went on by itself.")
        return [*lines, f"{steps}; with 1 % less it runs out in the {found.peak_phase} phase."]
    assert failure is not None
    batch = "" if failure.batch is None else f", batch of {failure.batch}"
    gaps = failure.reserved_bytes - failure.allocated_bytes
    return [
        f"RUNS OUT in step {failure.step}, {failure.phase}{batch}: {format_bytes(failure.asked_bytes)} asked for, "
        f"{format_bytes(failure.free_bytes)} free",
        f"{usable} ({found.gpu}): {format_bytes(failure.allocated_bytes)} in use, {format_bytes(gaps)} in gaps between, "
        f"{format_bytes(found.context_bytes)} CUDA's context",
        f"at {_short(failure.place)}",
        f"{steps}.",
    ]


def _phases(found: Rehearsal) -> list[str]:
    context = to_gib(found.context_bytes)
    rows = [f"{'phase':<12}{'allocated':>11}{'reserved':>11}   GiB, each with {context:.2f} of CUDA's context"]
    for name, peak in found.phases.items():
        mark = "   < peak" if name == found.peak_phase else ""
        sizes = (to_gib(size) + context for size in (peak.allocated_bytes, peak.reserved_bytes))
        rows.append(f"{name:<12}" + "".join(f"{size:>11.2f}" for size in sizes) + mark)
    return rows


def _held(found: Rehearsal, width: int) -> list[str]:
    shown = found.held[:MOST_PLACES]
    rows = [_row(one, width) for one in shown]
    rest = found.held[MOST_PLACES:]
    if rest:
        rows.append(_row(Held("other places", sum(r.size_bytes for r in rest), sum(r.blocks for r in rest)), width))
    heading = "At the peak" if found.needed_bytes is not None else "When memory ran out"
    return [f"{heading} these held it:", *rows]


def _row(held: Held, width: int) -> str:
    row = f"  {format_bytes(held.size_bytes):>10} {held.blocks:>5} x  {_short(held.place)}"
    path, _, rest = held.place.partition(":")
    code = linecache.getline(path, int(number)).strip() if (number := rest.split(" ")[0]).isdigit() else ""
    return f"{row}: {code}"[:width] if code else row[:width]


def _short(place: str) -> str:
    """Return a place with the file's name alone."""
    path, colon, rest = place.partition(":")
    return f"{path.rpartition('/')[2]}{colon}{rest}" if rest[:1].isdigit() else place


def _notes(found: Rehearsal, command: str) -> list[str]:
    batch = [] if found.largest_batch is None else [f"largest batch {found.largest_batch}"]
    row = [] if found.longest_row is None else [f"longest row of the data {found.longest_row} tokens"]
    seen = [f"Batches    {', '.join([*batch, *row])}"] if batch or row else []
    seconds = [f"Seconds    {', '.join(f'{one:.2f}' for one in found.step_seconds)} of the steps"]
    return [
        *seen,
        *(seconds if found.step_seconds else []),
        *(f"Note       {note}" for note in found.notes),
        f"Next       {command}",
    ]
