"""Tables beside the tests: rows of literals, and whole messages that a test names by how they begin."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


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
