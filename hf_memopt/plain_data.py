"""Check data that users pass or files hold: JSON objects, and values against the annotations of a dataclass.

One field, one rule: its annotation. ``Annotated[int, range(1, 8)]`` bounds an integer; ``Literal``, unions,
``tuple[X, ...]`` and ``Mapping[X, Y]`` mean what they say, and True is not an integer.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hf_memopt.errors import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray

Count = Annotated[int, range(1, 2**63)]
CountOrZero = Annotated[int, range(2**63)]

Kind = TypeVar("Kind", bound="DataclassInstance")
Value = TypeVar("Value")

_NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "None",
    Callable: "a function",
}


class FixedMapping(Mapping[str, Value]):
    """A table that is read only; unlike ``MappingProxyType`` it can be copied and pickled."""

    def __init__(self, rows: Mapping[str, Value]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> Value:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)


# ---- JSON -----------------------------------------------------------------------------------------------------------


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text holds.

    Raises:
        ValueError: it is not JSON or not an object. The message is a clause about "it".
    """
    try:
        found = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is not an object but {shown(found)}")
    return found


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
        found = parse_object(text)
        check_format(found, *formats)
    except ValueError as error:
        expected = f"expected what this version of hf-memopt writes. {remedy}"
        raise ValueError(f"path={path!r} cannot be read as {what} ({error}); {expected}") from None
    return found


def check_format(found: Mapping[str, Any], *formats: int) -> None:
    """Raise ValueError where JSON data has none of these formats."""
    number, versions = found.get("format"), found.get("versions")
    if number not in formats:
        made_by = versions.get("hf-memopt", "another version") if isinstance(versions, dict) else "another version"
        raise ValueError(f"it has format {shown(number)}, written by hf-memopt {made_by}")


def packaged_rows(folder: str, name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file of this package, in a folder such as "hf_memopt.training.devices"."""
    text = resources.files(folder).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def from_object(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """Return the dataclass with these fields; it checks their values itself, by ``check_fields``.

    Raises:
        ValueError: a field that it does not have, or one missing that has no default. The message starts with its name.
    """
    known = {item.name: item for item in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"{name}={shown(value)} is not a field of {kind.__name__}; expected one of {', '.join(known)}."
                f"{did_you_mean(name, known)} Remove it"
            )
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{name} is missing; expected {_rule(_kinds(kind)[name])}. Add {name}")
    return kind(**values)


# ---- Values ---------------------------------------------------------------------------------------------------------


def check_fields(instance: DataclassInstance) -> None:
    """Check every field of a dataclass against its annotation; for ``__post_init__``.

    Raises:
        ValueError: a value does not fit. The message starts with the field's name and proposes its default.
    """
    kinds = _kinds(type(instance))
    for item in fields(instance):
        example = item.default if item.default_factory is MISSING else item.default_factory()
        check_value(item.name, getattr(instance, item.name), kinds[item.name], example)


def check_value(name: str, value: Any, kind: Any, example: Any = MISSING) -> None:
    """Raise ValueError if ``value`` does not fit the annotation ``kind``; ``example`` is a value that does.

    Examples:
        >>> check_value("steps", 0, Count, 8)
        Traceback (most recent call last):
        ValueError: steps=0 is invalid; expected an integer of 1 or more. Pass steps=8
    """
    if _fits(value, kind):
        return
    options = get_args(kind) if get_origin(kind) is Literal else ()
    proposal = f" Pass {name}={example!r}" if example is not MISSING else f" Pass another {name}"
    end = _end(kind)
    most = f", below {'2**63' if end == 2**63 else end}" if isinstance(value, int) and value >= end else ""
    raise ValueError(
        f"{name}={shown(value)} is invalid; expected {_rule(kind)}{most}.{did_you_mean(value, options) or proposal}"
    )


def check_word(name: str, value: Any, known: Iterable[str], example: str = "") -> None:
    """Raise ValueError if ``value`` is not one of the known words; ``example`` is proposed, or the first."""
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        meant = "" if isinstance(value, str) and value in example else did_you_mean(value, words)
        raise ValueError(
            f"{name}={shown(value)} is unknown; expected one of {', '.join(map(repr, words))}."
            f"{meant or f' Pass {name}={(example or words[0])!r}'}"
        )


def items_of(values: Any) -> tuple[Any, ...] | None:
    """Return what can be iterated as a tuple; None for anything else, for text and for tensors without dimensions."""
    try:
        return None if isinstance(values, str | bytes) else tuple(values)
    except TypeError:
        return None


def checked_path(name: str, value: Any) -> Path:
    """Return a path that a user passes, existing or not; ``name`` is what the message calls it.

    Raises:
        ValueError: no file can have it: it is not text or a path, has a zero byte, or is too long.
    """
    try:
        path = Path(value)
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return path
    except (TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"{name}={shown(value)} cannot be a path ({getattr(error, 'strerror', None) or error}); expected text or a "
            "pathlib.Path. Pass another path"
        ) from None
    return path


def checked_array(name: str, values: Any) -> NDArray[Any]:
    """Return what a user passes as an array; ``name`` is what the message calls it.

    Raises:
        ValueError: it is none: rows of different lengths, or a tensor that needs a gradient.
    """
    import numpy as np

    try:
        return np.asarray(values)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}={shown(values)} is not an array ({error}); expected a flat list or array of integers. "
            f"Pass {name}=[64, 128, 256]"
        ) from None


def shown(value: Any, most: int = 60) -> str:
    """Return the ``repr`` of a value of any type, cut to ``most`` characters."""
    try:
        text = repr(value)
    except Exception:  # integers of more than 4,300 digits; lists nested as deep as JSON may be; a repr that fails
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


@cache
def _kinds(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fits(value, arguments[0]) and all(int(value) in bounds for bounds in arguments[1:])
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return any(isinstance(value, type(one)) and value == one for one in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, arguments[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and _fits(one, arguments[1]) for key, one in value.items()
        )
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _rule(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"an integer of {arguments[1].start} or more"
    if origin in (Union, UnionType):
        return ", or ".join(_rule(one) for one in arguments)
    if origin is Literal:
        *most, last = map(repr, arguments)
        return f"{', '.join(most)} or {last}" if most else last
    if origin is tuple:
        return f"a tuple or list of {_plural(arguments[0])}"
    if origin is Mapping:
        return f"{_plural(arguments[1])} by name"
    return _NAMES.get(kind) or f"a {kind.__name__}"


def _end(kind: Any) -> int:
    """Return what an integer of this kind is below."""
    bounds = (get_args(one)[1] for one in (kind, *get_args(kind)) if get_origin(one) is Annotated)
    return next((one.stop for one in bounds), 2**63)


def _plural(kind: Any) -> str:
    return "strings" if kind is str else f"values that are each {_rule(kind)}"
