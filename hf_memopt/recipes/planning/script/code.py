"""Lay out lines of Python for a script that people read and edit, stable under ``ruff format`` from 88 columns on.

A call stands in one line where it fits, else each argument has a line of its own that ends in a comma. Arguments that
share a reason share a line: there ``# fmt: skip`` keeps formatters from pulling them apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

__all__ = ["COLUMNS", "Argument", "call", "commented", "quoted", "together"]

COLUMNS = 88  # ruff's own limit
INDENT = "    "


@dataclass(frozen=True)
class Argument:
    """An argument of a call: its code, the reason for it, and what stands in it or beside it.

    Attributes:
        code: without a comma; the first line where there are ``items``.
        reason: a comment; "" for none.
        items: of a list that ``code`` opens, one in a line.
        beside: more arguments with the same reason, in the same line as far as they fit.
    """

    code: str
    reason: str = ""
    items: Sequence[Argument] = ()
    beside: tuple[str, ...] = ()


def together(codes: Iterable[str], reason: str = "") -> Argument:
    """Return arguments that have one reason."""
    first, *beside = codes
    return Argument(first, reason, beside=tuple(beside))


def quoted(text: str) -> str:
    """Return a string literal in the quotes that ``ruff format`` prefers."""
    if '"' in text and "'" not in text:
        return repr(text)
    return json.dumps(text, ensure_ascii=False)


def call(head: str, arguments: Iterable[Argument], reason: str = "", indent: str = "", end: str = ")") -> list[str]:
    """Return the lines of a call: ``head`` is everything before its opening parenthesis, ``end`` what closes it."""
    arguments = list(arguments)
    line = f"{head}({', '.join(code for one in arguments for code in (one.code, *one.beside))}{end}"
    if len(indent + line) <= COLUMNS and not any(one.reason or one.items for one in arguments):
        return commented(line, reason, indent)
    kept = "  # fmt: skip" if any(one.beside for one in arguments) else ""
    return [*_above(reason, indent), f"{indent}{head}(", *_exploded(arguments, indent + INDENT), f"{indent}{end}{kept}"]


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
            lines += commented(one.code, one.reason, indent)
            lines += [*_exploded(one.items, indent + INDENT), f"{indent}],"]
            continue
        first, *more = _filled([f"{code}," for code in (one.code, *one.beside)], COLUMNS - len(indent))
        lines += [*_above(one.reason, indent), indent + first] if more else commented(first, one.reason, indent)
        lines += [indent + line for line in more]
    return lines


def _filled(parts: Iterable[str], columns: int) -> list[str]:
    """Return lines of as many parts as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 1 + len(part) <= columns:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return lines


def _above(reason: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return wrap(reason, COLUMNS, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
