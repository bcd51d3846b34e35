"""The parts of README.md and docs/ that are made of the code: the help of the command line, the presets, what works
together, and the versions that the suite was run with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from results_file import markdown
from typer.testing import CliRunner

from hf_memopt.cli.app import app
from hf_memopt.prediction.recipes import PRESETS, preset_rows
from hf_memopt.technique_list import ENGINES, TECHNIQUES, VARIANTS, Refusal
from hf_memopt.training.binding.compatibility import refusal_of
from hf_memopt.training.binding.compatibility.conflicts import SETTINGS

TESTED = Path(__file__).resolve().parent.parent / "tests" / "compat" / "results.jsonl"
WIDTH = "80"

PARTS: Mapping[str, str] = {
    "gradient-scale repair": "what attach does for a head that ignores num_items_in_batch",
    "LoRA": "adapters of peft",
    "bitsandbytes optimizer": "its optimizers in 8 and 32 bits, paged or not",
}
"""What is not a technique with a name of its own, but can be incompatible with an engine all the same."""

RUN_IN_ONE_PROCESS = (
    "bf16",
    "accumulation",
    "norm clipping",
    "NEFTune",
    "reentrant checkpointing",
    "auto_find_batch_size",
)
RUN = (*RUN_IN_ONE_PROCESS, "DDP", "DDP, default flags", "FSDP2")
"""The settings with which the tests run every technique that is not refused, in one process or in two."""


def every_refusal() -> tuple[Refusal, ...]:
    """Return every pair that is refused, in the order of the techniques."""
    listed = (*TECHNIQUES.values(), *VARIANTS.values())
    return tuple(refusal for technique in listed for refusal in technique.refusals())


def cli_help() -> str:
    """Return the help of each command, as a terminal of 80 columns shows it."""
    parts = []
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="hf-memopt", env={"COLUMNS": WIDTH}).output
        lines = "\n".join(line.rstrip() for line in shown.strip("\n").splitlines())
        parts.append(f"## hf-memopt {name}\n\n```text\n{lines}\n```")
    return "\n\n".join(parts)


def presets() -> str:
    """Return the table of presets."""
    rows = preset_rows(PRESETS)
    return markdown(f"| {' | '.join(rows[0])} |", [list(row.values()) for row in rows])


def tested_versions() -> str:
    """Return the environments that ``make test-compat`` ran the suite in, from ``tests/compat/results.jsonl``."""
    if not TESTED.exists():
        return "Not run yet for this version."
    rows = [json.loads(line) for line in TESTED.read_text(encoding="utf-8").splitlines()]
    packages = list(next(row["versions"] for row in rows if row["counts"]))
    lines = []
    for row in sorted(rows, key=lambda row: row["environment"]):
        if row["counts"] is None:
            cells = ["not installed, not run", *[""] * (len(packages) + 2)]
        else:
            counts = row["counts"]
            failed = counts["failures"] + counts["errors"]
            passed = counts["tests"] - failed - counts["skipped"]
            cells = [*(row["versions"][name] for name in packages), f"{passed:,}", str(failed), str(counts["skipped"])]
        lines.append((f"`{row['environment']}`", *cells, row.get("commit", "-"), row["date"]))
    return markdown(f"| | {' | '.join(packages)} | passed | failed | skipped | commit | date |", lines)


def compatibility() -> str:
    """Return the exceptions, from the table that ``attach`` enforces: what cannot be used with what, why, and what to
    do instead; then what nothing speaks against and the tests do not run.
    """
    refused: dict[tuple[str, str, str], list[str]] = {}
    seen: set[frozenset[str]] = set()
    for row, column in compatibility_pairs():
        found = refusal_of(row, column)
        if found is not None and frozenset((row, column)) not in seen:
            seen.add(frozenset((row, column)))
            refused.setdefault((row, found.reason, found.fix), []).append(column)
    lines = [(row, "; ".join(columns), reason, fix) for (row, reason, fix), columns in refused.items()]
    untried: dict[tuple[str, ...], list[str]] = {}
    for column in SETTINGS:
        if column not in RUN:
            rows = tuple(one for one in TECHNIQUES if refusal_of(one, column) is None)
            untried.setdefault(rows, []).append(column)
    not_run = [("; ".join(columns), _most_of(rows)) for rows, columns in untried.items() if rows]
    return "\n\n".join(
        [
            markdown("| | not with | because | instead |", lines),
            markdown("| not run by the tests | with |", not_run),
        ]
    )


def compatibility_pairs() -> list[tuple[str, str]]:
    """Return what is asked: technique and technique, technique and setting, what is no technique and engine."""
    pairs = [(row, column) for row in TECHNIQUES for column in (*TECHNIQUES, *SETTINGS) if row != column]
    return pairs + [(row, column) for row in PARTS for column in ENGINES]


def _most_of(rows: Sequence[str]) -> str:
    """Return names of techniques, those that are missing where these are fewer."""
    missing = [one for one in TECHNIQUES if one not in rows]
    if len(missing) >= len(rows):
        return ", ".join(rows)
    return f"all but {', '.join(missing)}" if missing else "all"
