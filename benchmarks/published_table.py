"""README's table of published measurements, from the last run of ``benchmarks/published.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

LOOPS = {"Trainer": "`Trainer`", "SFTTrainer": "TRL's `SFTTrainer`", "manual": "hand-written loop"}


def published_table(figures: Mapping[str, Any]) -> str:
    """Return the errors by source and kind of loop, the summaries, and what was put in place."""
    rows, found = figures["rows"], figures["summaries"]
    groups = list(dict.fromkeys((row["source"], row["loop"]) for row in rows))
    lines = [
        "| measured by | on | loop | what | runs | as is: median | worst | matched: median | worst | worst under |",
        f"|---|{'---|' * 9}",
        *(_line([row for row in rows if (row["source"], row["loop"]) == group]) for group in groups),
    ]
    lines += ["", "| errors without sign, in percent | runs | median | worst | worst under |", f"|---|{'---|' * 4}"]
    for name, summary in found.items():
        cells = [f"{100 * summary[key]:.2f}" for key in ("median", "worst", "worst_under") if key in summary]
        lines.append(f"| {name} | {summary['cases']} | {' | '.join(cells) or '- | - | -'} |")
    counts = Counter(name for row in rows for name in row["behaviours"])
    kept = "; ".join(f"{name} ({count})" for name, count in counts.most_common())
    left_out = "; ".join(f"{count}: {reason}" for reason, count in figures["left_out"].items()) or "none"
    note = (
        "None of this was measured by this project: the runs are other people's, with their source, in "
        "`benchmarks/published/`. An error is predicted / measured - 1, in percent. *As is* is the estimate for "
        "today's software; *matched* has what the measured versions did differently, from one table by library, "
        "version and kind of loop (`benchmarks/published_behaviours.py`; in brackets the runs): "
        f"{kept}. NVML shows all that is on the GPU. Besides torch's reserved bytes and a usual context, an "
        "environment holds memory of its own outside of torch's allocator, the same in all runs of one harness; it is "
        f"taken from the smallest run, which is not counted. Not compared: {left_out}. "
        "`make bench-published` runs it, on a CPU."
    )
    return "\n".join([*lines, "", note])


def _line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the line of one source."""
    first = rows[0]
    errors = {name: [row[f"{name}_bytes"] / row["measured_bytes"] - 1 for row in rows] for name in ("as_is", "matched")}
    cells = [
        _link(first["source"]),
        ", ".join(dict.fromkeys(row["gpu"] for row in rows)),
        LOOPS[first["loop"]],
        ", ".join(dict.fromkeys(row["what"].replace("card", "GPU") for row in rows)),
        str(len(rows)),
    ]
    for values in errors.values():
        sizes = [abs(value) for value in values]
        cells += [f"{100 * median(sizes):.2f}", f"{100 * max(sizes):.2f}"]
    cells.append(f"{100 * max(0.0, -min(errors['matched'])):.2f}")
    return f"| {' | '.join(cells)} |"


def _link(source: str) -> str:
    """Return a link to the repository or dataset of a source such as "github:owner/name path"."""
    place = source.split()[0].removesuffix(":")
    if place.startswith("github:"):
        name = place.removeprefix("github:")
        return f"[{name}](https://github.com/{name})"
    return f"[{place.removeprefix('huggingface.co/datasets/')}](https://{place})"
