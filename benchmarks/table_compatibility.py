"""What works together, from the table that ``attach`` enforces, and the versions that the suite was run with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hf_memopt.binding.refusals import ENGINES, PARTS, RUN, SETTINGS, TECHNIQUES, Refusal, every_refusal, refusal_of

TESTED = Path(__file__).resolve().parent.parent / "tests" / "compat" / "results.jsonl"


def tested_versions() -> str:
    """Return the environments that ``make test-compat`` ran the suite in, from ``tests/compat/results.jsonl``."""
    if not TESTED.exists():
        return "Not run yet for this version."
    rows = [json.loads(line) for line in TESTED.read_text(encoding="utf-8").splitlines()]
    packages = list(next(row["versions"] for row in rows if row["counts"]))
    lines = [
        f"| | {' | '.join(packages)} | passed | failed | skipped | date |",
        f"|---|{'---|' * (len(packages) + 4)}",
    ]
    for row in sorted(rows, key=lambda row: row["environment"]):
        if row["counts"] is None:
            cells = ["not installed, not run", *[""] * (len(packages) + 2)]
        else:
            counts = row["counts"]
            failed = counts["failures"] + counts["errors"]
            passed = counts["tests"] - failed - counts["skipped"]
            cells = [*(row["versions"][name] for name in packages), f"{passed:,}", str(failed), str(counts["skipped"])]
        lines.append(f"| `{row['environment']}` | {' | '.join([*cells, row['date']])} |")
    return "\n".join(lines)


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
    lines = [f"| | {' | '.join(columns.values())} |", f"|---|{'---|' * len(columns)}"]
    for head, row in rows.items():
        cells = [_compatibility_cell(row, column, numbers) for column in columns]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
