"""The page of clients is what its script makes of the committed results."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_clients_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "clients"))
    table = importlib.import_module("clients_table")
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run: python tests/clients/clients_table.py"
