"""Lay out a script that people read and edit, in lines of 88 columns.

A call stands in one line where it fits. Else arguments that stand in one line of the template share a line and its
reason; a formatter would give each a line of its own. A reason stands behind its line where both fit, else above it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from hf_memopt.notices import printable

COLUMNS = 88  # ruff's own limit
INDENT = "    "


def literal(value: Any) -> str:
    """Return the code of a value, its strings in the quotes that ``ruff format`` prefers."""
    if isinstance(value, str):
        text = repr(value) if '"' in value and "'" not in value else json.dumps(value, ensure_ascii=False)
        return printable(text).replace("  #", "  \\x23")  # two spaces and # begin a reason
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        items = ", ".join(map(literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    return repr(value)


def heading_of(text: str) -> str:
    """Return a text as a comment, in lines of which all but the first are indented."""
    return "\n".join(
        wrap(
            printable(text),
            COLUMNS,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def laid_out(text: str) -> str:
    """Return a script with lines of 88 columns; a call whose line ends in "(" has groups of arguments up to its end."""
    lines, found = iter(text.split("\n")), []
    for line in lines:
        code, reason = _parted(line)
        if code.endswith("("):
            inner: list[str] = []
            while not (end := next(lines)).startswith(")"):
                inner.append(end)
            found += _call(code, inner, end, reason)
        else:
            found += _statement(code, reason)
    return "\n".join(found)


def _parted(line: str) -> tuple[str, str]:
    code, _, reason = line.partition("  #")
    return code, reason.strip()


def _statement(code: str, reason: str) -> list[str]:
    """Return the lines of a statement in one line of the template."""
    call = None if len(code) <= COLUMNS or code[0] in "# " else getattr(ast.parse(code).body[0], "value", None)
    if not isinstance(call, ast.Call):
        return _commented(code, reason)
    head, _, arguments = code[:-1].partition("(")
    return _call(f"{head}(", [f"{INDENT}{one}," for one in _arguments(arguments)], ")", reason)


def _call(head: str, inner: Sequence[str], end: str, reason: str) -> list[str]:
    groups = [_parted(line) for line in inner]
    line = head + " ".join(code.strip() for code, _ in groups).removesuffix(",") + end
    if len(line) <= COLUMNS and not any(why or code.endswith("[") for code, why in groups):
        return _commented(line, reason)
    found = [*_above(reason, ""), head]
    for code, why in groups:
        indent = code[: len(code) - len(code.lstrip())]
        arguments = [] if code.endswith("[") or code.strip() == "]," else _arguments(code)
        first, *more = _filled(arguments, indent) or [code]
        found += [*_above(why, indent), first] if more else _commented(first, why, indent)
        found += more
    return [*found, end]


def _arguments(code: str) -> list[str]:
    source = f"_({code.strip()})"
    call: Any = ast.parse(source, mode="eval").body
    ordered = sorted((*call.args, *call.keywords), key=lambda one: one.col_offset)
    return [str(ast.get_source_segment(source, one)) for one in ordered]


def _filled(arguments: Sequence[str], indent: str) -> list[str]:
    lines: list[str] = []
    for one in arguments:
        if lines and len(lines[-1]) + len(one) + 2 <= COLUMNS:
            lines[-1] += f" {one},"
        else:
            lines.append(f"{indent}{one},")
    return lines


def _commented(code: str, reason: str, indent: str = "") -> list[str]:
    if not reason or len(code) + len(reason) + 4 <= COLUMNS:
        return [f"{code}  # {reason}" if reason else code]
    return [*_above(reason, indent), code]


def _above(reason: str, indent: str) -> Iterator[str]:
    start = f"{indent}# "
    yield from wrap(reason, COLUMNS, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
