"""Every error message says what is wrong, what was expected and what to do: read from each ``raise`` of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_memopt

PACKAGE = Path(hf_memopt.__file__).parent
ERRORS = ("ValueError", "TypeError", "RuntimeError", "FileNotFoundError", "NotADirectoryError")
RULE = re.compile(r"expected .+[.:](\{\})? .+", re.DOTALL)  # ...; expected <rule>. <action>
# Clauses that the caller completes: parse_object's about "it", those that end in a value with rule or action, why a
# column is read row by row, and what is wrong with a configuration.
CLAUSE = re.compile(r"^it (is|has) |\{\}$|^null in a list$|^\{\}=\{\} is negative$")


def literal(node: ast.expr) -> str:
    """Return the text of a message, with ``{}`` for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return "{}"


def messages() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", literal(node.args[0])


MESSAGES = dict(messages())


def test_there_are_messages_to_check() -> None:
    assert len(MESSAGES) > 200


@pytest.mark.parametrize("place", MESSAGES)
def test_a_message_says_what_was_expected_and_what_to_do(place: str) -> None:
    message = MESSAGES[place]
    assert CLAUSE.search(message) or RULE.search(message), message
