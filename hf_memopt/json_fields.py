"""Read the JSON that this package writes for its reports: of this version, or one sentence that says it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_memopt.plain_data import parse_object, shown


def read_json(text: str | bytes, formats: tuple[int, ...], *, path: str, what: str, remedy: str) -> dict[str, Any]:
    """Return the JSON object of a text of one of these formats.

    Args:
        text: of a file.
        formats: its numbers that are read.
        path: of the file, for messages.
        what: the text should be, with its article.
        remedy: the sentence that says how to write it anew.

    Raises:
        ValueError: it is something else, or of another version.
    """
    try:
        told = parse_object(text)
        check_format(told, *formats)
    except ValueError as error:
        expected = f"expected what this version of hf-memopt writes. {remedy}"
        raise ValueError(f"path={path!r} cannot be read as {what} ({error}); {expected}") from None
    return told


def check_format(told: Mapping[str, Any], *formats: int) -> None:
    """Raise ValueError where JSON data has none of these formats."""
    number, versions = told.get("format"), told.get("versions")
    if number not in formats or isinstance(number, bool):
        made_by = versions.get("hf-memopt", "another version") if isinstance(versions, dict) else "another version"
        raise ValueError(f"it has format {shown(number)}, written by hf-memopt {made_by}")
