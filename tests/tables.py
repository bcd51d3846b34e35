"""Tables beside the tests: values of a file of tests (JSON), rows of literals (TSV), whole messages, refused calls."""

from __future__ import annotations

import ast
import doctest
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def tables(test_file: str) -> Any:
    """Return the tables of a test's file by their names; call it with ``__file__``."""
    return json.loads(Path(test_file).with_suffix(".json").read_text(encoding="utf-8"))


def table(name: str) -> list[tuple[Any, ...]]:
    """Return the rows of ``name``.tsv in this folder: Python literals, and as they stand what is none (messages)."""
    return [tuple(map(_cell, line.split("\t"))) for line in (TESTS / f"{name}.tsv").read_text("utf-8").splitlines()]


def _cell(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@cache
def _messages() -> set[str]:
    return {line for path in TESTS.glob("*/messages.txt") for line in path.read_text("utf-8").splitlines()}


def whole(start: str, **values: Any) -> str:
    """Return the one line of the ``messages.txt`` that begins so, with the values that it has places for."""
    (found,) = (line for line in _messages() if line.startswith(start))
    return found.format(**values) if values else found


def refuses(kind: Any, message: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that the call raises an error of the kind with the whole message."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    assert str(error.value) == message


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
