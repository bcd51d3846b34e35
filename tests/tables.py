"""The tables of a file of tests, which stand in a file of JSON of the same name beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["tables"]


def tables(test_file: str) -> Any:
    """Return the tables of a test's file by their names; call it with ``__file__``."""
    return json.loads(Path(test_file).with_suffix(".json").read_text(encoding="utf-8"))
