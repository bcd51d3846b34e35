"""Lay out lines of Python as ``ruff format`` leaves them, at any length of line from 88 columns on.

A call stands in one line where it fits, else each argument has a line of its own that ends in a comma.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

__all__ = ["COLUMNS", "Argument", "call", "commented", "quoted"]

COLUMNS = 88  # ruff's own limit
INDENT = "    "


@dataclass(frozen=True)
class Argument:
    """An argument of a call: its code, the reason for it, and what stands in it line by line, such as a list.

    Attributes:
        code: without a comma; the first line where there are ``items``.
        reason: a comment; "" for none.
        items: of a list that ``code`` opens.
    """

    code: str
    reason: str = ""
    items: Sequence[Argument] = ()


def quoted(text: str) -> str:
    """Return a string literal in the quotes that ``ruff format`` prefers."""
    if '"' in text and "'" not in text:
        return repr(text)
    return json.dumps(text, ensure_ascii=False)


def call(head: str, arguments: Iterable[Argument], reason: str = "", indent: str = "") -> list[str]:
    """Return the lines of a call: ``head`` is everything before its opening parenthesis."""
    arguments = list(arguments)
    line = f"{head}({', '.join(one.code for one in arguments)})"
    if len(indent + line) <= COLUMNS and not any(one.reason or one.items for one in arguments):
        return commented(line, reason, indent)
    above = _above(reason, indent) if reason else []
    return [*above, f"{indent}{head}(", *_exploded(arguments, indent + INDENT), f"{indent})"]


def commented(line: str, reason: str, indent: str = "") -> list[str]:
    """Return a line with its comment behind it where both fit, else above it."""
    line = indent + line
    if not reason or len(line) + len(reason) + 4 <= COLUMNS:
        return [f"{line}  # {reason}" if reason else line]
    return [*_above(reason, indent), line]


def _exploded(arguments: Iterable[Argument], indent: str) -> list[str]:
    lines = []
    for one in arguments:
        if one.items:
            lines += [
                *commented(one.code, one.reason, indent),
                *_exploded(one.items, indent + INDENT),
                f"{indent}],",
            ]
        else:
            lines += commented(f"{one.code},", one.reason, indent)
    return lines


def _above(reason: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return wrap(reason, COLUMNS, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
