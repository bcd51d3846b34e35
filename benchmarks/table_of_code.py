"""The parts of README.md and docs/ that are made of the code: the help of the command line, the presets, what works
together, and the versions that the suite was run with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import typer
from results_file import markdown
from typer.testing import CliRunner

from hf_memopt.binding.compatibility import refusal_of
from hf_memopt.binding.compatibility.refusals import SETTINGS
from hf_memopt.cli.app import app
from hf_memopt.recipes import PRESETS, preset_rows
from hf_memopt.technique_list import ENGINES, TECHNIQUES, VARIANTS, Refusal

TESTED = Path(__file__).resolve().parent.parent / "tests" / "compat" / "results.jsonl"
WIDTH = "80"

PARTS: Mapping[str, str] = {
    "exact_loss": "compute_loss_func=exact_loss(model)",
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
        lines.append((f"`{row['environment']}`", *cells, row["date"]))
    return markdown(f"| | {' | '.join(packages)} | passed | failed | skipped | date |", lines)


def compatibility() -> str:
    """Return which techniques and settings are compatible, from the table that ``attach`` enforces: technique by
    technique, technique by setting, what is no technique by the engines of several processes, and the reasons.
    """
    numbered = {name: str(number) for number, name in enumerate(TECHNIQUES, 1)}
    techniques = {f"{number} {name}": name for name, number in numbered.items()}
    reasons = [f"{number}. {found.reason}" for number, found in enumerate(_distinct_refusals(), 1)]
    return "\n\n".join(
        [
            _compatibility_table(techniques, numbered),
            _compatibility_table(techniques, {name: name for name in SETTINGS}),
            _compatibility_table({name: name for name in PARTS}, {name: name for name in ENGINES}),
            "\n".join(reasons),
        ]
    )


def _compatibility_table(rows: Mapping[str, str], columns: Mapping[str, str]) -> str:
    """Return one table: rows by the text that heads them, columns each with its head."""
    numbers = {found.reason: number for number, found in enumerate(_distinct_refusals(), 1)}
    lines = [(head, *(_compatibility_cell(row, column, numbers) for column in columns)) for head, row in rows.items()]
    return markdown(f"| | {' | '.join(columns.values())} |", lines)


def _distinct_refusals() -> list[Refusal]:
    """Return one refusal for each reason."""
    return list({found.reason: found for found in reversed(every_refusal())}.values())[::-1]


def _compatibility_cell(row: str, column: str, numbers: Mapping[str, int]) -> str:
    if row == column:
        return ""
    found = refusal_of(row, column)
    if found is not None:
        return f"no ({numbers[found.reason]})"
    return "yes" if column in TECHNIQUES or column in RUN else "?"
