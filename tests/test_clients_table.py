"""The page of clients is what its script makes of the committed results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that writes the page."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "clients"))
    return importlib.import_module("clients_table")


def test_the_page_of_clients_is_current(table: Any) -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run: python tests/clients/clients_table.py"


def test_the_number_of_clients_is_current(table: Any) -> None:
    _, *rows = [json.loads(line) for line in table.RESULTS.read_text(encoding="utf-8").splitlines()]
    count = len({row["client"] for row in rows})
    for page in ("README.md", "docs/compatibility.md"):
        assert f"{count} trainings" in (ROOT / page).read_text(encoding="utf-8"), page


def test_no_pattern_differs_and_three_quarters_are_not_refused(table: Any) -> None:
    if not table.PATTERN_RESULTS.exists():
        pytest.skip("make test-clients has not run since there are patterns")
    _, *rows = [json.loads(line) for line in table.PATTERN_RESULTS.read_text(encoding="utf-8").splitlines()]
    patterns = {row["client"] for row in rows}
    refused = {row["client"] for row in rows if row["verdict"] == "refused"}
    assert [row for row in rows if not row["is_right"]] == []
    assert len(refused) <= len(patterns) / 4


def test_patterns_are_counted(table: Any) -> None:
    right = {"client": "one", "setup": "attach", "verdict": "same", "is_right": True}
    rows = [
        right,
        {**right, "client": "two"},
        {**right, "client": "two", "verdict": "refused", "remedied": "equal"},
        {**right, "client": "three", "verdict": "refused", "is_right": False},
    ]
    assert table.counted(rows) == "1 equal of 3, 1 refused with a remedy that works, 1 different"
