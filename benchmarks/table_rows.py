"""The last row of a benchmark in ``benchmarks/results``, for the generated parts of README.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MACHINE = "2 CPU cores without an accelerator"


def last_row(case: str, *, program: str | None = None) -> dict[str, Any]:
    """Return the latest row of a case; ``program`` is the file that makes it, where its name is another one."""
    rows = [
        json.loads(line) for file in sorted(RESULTS.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()
    ]
    found = [row for row in rows if row["case"] == case]
    if not found:
        raise SystemExit(
            f"benchmarks/results has no row of the case {case!r}; run benchmarks/{program or case}.py first"
        )
    return max(found, key=lambda row: row["date"])


def versions_of(row: dict[str, Any], *packages: str) -> str:
    """Return the versions of packages, of those that the row has."""
    return ", ".join(f"{name} {row['versions'][name]}" for name in packages if name in row["versions"])
