"""Check the JSON that a report is made of against ``TypedDict`` classes, field by field.

A file may come from another version or from an editor, so every field is checked before anything is drawn. Fields that
no report shows are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from hf_memopt.plain_data import check_value, parse_object, shown

Number = float | int
SMALLEST, LARGEST = 1e-12, 2.0**63
"""Between them is every number but 0: what a page draws is computed from it, and must neither overflow nor vanish."""


def read_json(
    text: str | bytes,
    kind: Any,
    formats: tuple[int, ...],
    *,
    path: str,
    what: str,
    remedy: str,
    check: Callable[[Any], None] = lambda told: None,
) -> Any:
    """Return the JSON of a text, with all fields of a ``TypedDict`` class.

    Args:
        text: of a file.
        kind: the class.
        formats: its numbers that are read.
        path: of the file, for messages.
        what: the text should be, with its article.
        remedy: the sentence that says how to write it anew.
        check: raises ValueError for what the types do not say.

    Raises:
        ValueError: it is something else, or of another version.
    """
    try:
        # half a character, as of a file name in another encoding, can be neither drawn nor written
        told = parse_object(json.dumps(parse_object(text), ensure_ascii=False).encode("utf-8", "replace"))
        check_format(told, *formats)
        _check_fields_of(told, kind, "")
        check(told)
    except (ValueError, RecursionError) as error:
        expected = f"expected what this version of hf-memopt writes. {remedy}"
        raise ValueError(f"path={path!r} cannot be read as {what} ({error}); {expected}") from None
    return told


def check_format(told: Mapping[str, Any], *formats: int) -> None:
    """Raise ValueError where JSON data has none of these formats."""
    number, versions = told.get("format"), told.get("versions")
    if number not in formats or isinstance(number, bool):
        made_by = versions.get("hf-memopt", "another version") if isinstance(versions, dict) else "another version"
        raise ValueError(f"it has format {shown(number)}, written by hf-memopt {made_by}")


def _check_fields_of(value: Any, kind: Any, name: str) -> None:
    """Raise ValueError if JSON data does not fit a type; the message starts with the field's place."""
    if is_typeddict(kind):
        _expect(isinstance(value, dict), name, value, "an object")
        for key, one in get_type_hints(kind, include_extras=True).items():
            if get_origin(one) is NotRequired:
                if key not in value:
                    continue
                (one,) = get_args(one)
            elif key not in value:
                raise ValueError(f"it has no {_place(name, key)}")
            _check_fields_of(value[key], one, _place(name, key))
    elif get_origin(kind) is list:
        _expect(isinstance(value, list), name, value, "a list")
        for number, one in enumerate(value):
            _check_fields_of(one, get_args(kind)[0], f"{name}[{number}]")
    elif get_origin(kind) is dict:
        _expect(isinstance(value, dict), name, value, "an object")
        if get_args(kind)[1] is not Any:
            for key, one in value.items():
                _check_fields_of(one, get_args(kind)[1], _place(name, key))
    elif NoneType in (options := get_args(kind)):
        if value is not None:
            rest = tuple(one for one in options if one is not NoneType)
            _check_fields_of(value, Union[rest], name)  # noqa: UP007  # of a tuple
    else:
        try:
            check_value(name, value, kind)
        except ValueError as error:
            raise ValueError(str(error).rpartition(". Pass another")[0] or str(error)) from None
        if kind == Number and value != 0 and not SMALLEST <= value < LARGEST:
            _expect(False, name, value, f"0, or a number from {SMALLEST} to 2**63")


def _place(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _expect(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name or 'it'}={shown(value)} is invalid; expected {rule}")
