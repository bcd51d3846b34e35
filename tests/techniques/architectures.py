"""The architectures that tests of all layers try, ``architectures.csv``: the fast ones by default, all on request."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import auto_heads
import pytest
from slow_cases import slow_except

ARCHITECTURES = {
    row["kind"]: row
    for row in csv.DictReader(Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines())
}


def cases(technique: str) -> list[Any]:
    """Return the kinds that a column of the table names."""
    named = {kind: row[technique] for kind, row in ARCHITECTURES.items() if row[technique]}
    return slow_except([kind for kind, pace in named.items() if pace == "fast"], named)


def head(kind: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model in float64 with other sizes, and a batch."""
    for name, size in sizes.items():
        monkeypatch.setitem(auto_heads.SIZES, name, size)
    task = ARCHITECTURES[kind]["task"]
    model = auto_heads.build(task, kind, dict(auto_heads.heads(task))[kind])
    return model, auto_heads.batch(task, model)
