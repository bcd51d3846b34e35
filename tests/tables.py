"""The tables of a file of tests, in JSON, and the calls that are refused: in files beside it."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

__all__ = ["refusals", "tables"]


def tables(test_file: str) -> Any:
    """Return the tables of a test's file by their names; call it with ``__file__``."""
    return json.loads(Path(test_file).with_suffix(".json").read_text(encoding="utf-8"))


def refusals(test_file: str, **names: Any) -> int:
    """Check that every call of a test's text file is refused with its whole message; return how many there are.

    Lines may be broken anywhere; ``...`` stands for what depends on versions.
    """
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    name = Path(test_file).stem.removeprefix("test_")
    path = str(Path(test_file).with_name(f"refused_{name}.txt"))  # pytest runs each text that is called test
    found = doctest.testfile(path, module_relative=False, globs=names, optionflags=flags, encoding="utf-8")
    assert found.failed == 0
    return found.attempted
