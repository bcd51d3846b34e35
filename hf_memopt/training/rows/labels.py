"""Tell from a column of labels whether they are classes, numbers or several classes at once, and name the classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Kind = Literal["single_label_classification", "regression", "multi_label_classification"]
"""transformers' names of ``problem_type``."""
IGNORED = -100  # the label that losses leave out
CLASSES = 20  # as many different whole numbers, written as floats, are taken for classes


@dataclass(frozen=True)
class Labels:
    """What the labels of a data set are."""

    kind: Kind  # transformers' `problem_type`
    values: tuple[Any, ...] = ()  # what the data calls each class, in the order of their ids; none for regression
    names: tuple[str, ...] = ()  # of the classes, in the same order
    note: str = ""  # what was assumed; "" for nothing
    # whether rows hold a number from 0 to 1 for each class, instead of the classes they belong to
    is_vector: bool = False

    def __str__(self) -> str:
        several = ", any number of them in a row" if self.kind == "multi_label_classification" else ""
        count = len(self.names)
        return f"{count} class{'es' * (count != 1)}{several}" if count else "regression, one number"

    @property
    def head(self) -> dict[str, Any]:
        """Options of ``from_pretrained`` for a new head: its size, and the names that its configuration stores."""
        options: dict[str, Any] = {"problem_type": self.kind, "num_labels": len(self.names) or 1}
        if self.names:
            options |= {"id2label": dict(enumerate(self.names)), "label2id": {n: i for i, n in enumerate(self.names)}}
        return {**options, "ignore_mismatched_sizes": True}

    def encode(self, label: Any) -> int | float | list[float]:
        """Return a label as the loss takes it: a class's id, or -100 as it is, a number, or one for each class."""
        if self.kind == "regression":
            return _finite(label)
        if self.kind == "single_label_classification":
            return IGNORED if label == IGNORED or self.is_none(label) else self._id(label)
        if self.is_vector:
            return [_finite(one) for one in label]
        chosen = {self._id(one) for one in (label if isinstance(label, list) else [label])}
        return [float(at in chosen) for at in range(len(self.names))]

    def is_none(self, label: Any) -> bool:
        """Return whether a label is the -1 that data sets write for none."""
        return bool(label == -1) and self.kind != "regression" and -1 not in self.values

    @cached_property
    def _ids(self) -> dict[Any, int]:
        return {value: at for at, value in enumerate(self.values)}

    def _id(self, label: Any) -> int:
        if label not in self._ids:
            raise ValueError(
                f"label={label!r} is not among the {len(self.names)} classes of the training rows; expected one of "
                f"{', '.join(map(repr, self.values[:5]))}{' ...' if len(self.values) > 5 else ''}. "
                "Give each class at least one training row"
            )
        return self._ids[label]


def labels_of(column: pa.ChunkedArray, *, names: Sequence[str] | None = None, kind: Kind | None = None) -> Labels:
    """Return what a column of labels holds.

    Whole numbers are classes: 0 to n-1 without gaps stay as they are, others are numbered in their order; -1 beside
    three or more that begin with 0 is no class but no label, as data sets write it. Texts are classes, in alphabetical
    order, or that of their numbers where all are numbers. Floats are regression, unless they are at most 20 different
    whole numbers. Lists are several classes at once.

    Args:
        column: labels of the training rows, shape (rows,).
        names: of the classes 0 to n-1, of a ``ClassLabel``.
        kind: what they are, where it is known.

    Raises:
        ValueError: fewer than two rows for each class on average, lists where numbers are asked for, numbers of several
            classes outside 0 to 1, or labels of other kinds.
    """
    column = _known(column)
    is_list = hasattr(column.type, "value_type")  # of lists of any kind
    values = pc.list_flatten(column).drop_null() if is_list else column
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if not (is_number or pa.types.is_boolean(values.type) or _is_text(values)):
        raise ValueError(
            f"labels are of type {column.type}; expected texts, whole numbers, floats or lists of them. "
            "Name the right column: columns={'label': NAME}"
        )
    if is_list and kind == "regression":
        raise ValueError(
            "labels are lists, and task='regression' learns one number for each row; expected numbers. "
            "Name the right column: columns={'label': NAME}"
        )
    width = _width_of_vectors(column, values) if is_list else 0
    if names is not None and len(names) != width:
        width = 0
    found = [one for one in pc.unique(values).to_pylist() if one != IGNORED]
    asked: Kind | None = "multi_label_classification" if is_list else kind
    given = Given(len(column), values, found, names, asked, is_list, width)
    return READERS[kind_of(given)](given)


class Given(NamedTuple):
    """A column of labels that are known."""

    rows: int
    values: pa.ChunkedArray  # of lists, what is in them
    found: list[Any]  # the different values
    names: Sequence[str] | None  # of the classes, where they have names
    kind: Kind | None  # what they are, where it is known
    is_list: bool
    width: int  # of lists that hold a number for each class; 0 for others


def kind_of(given: Given) -> str:
    """Return which of ``READERS`` reads these labels."""
    if given.width:
        return "vectors"
    if given.kind == "regression":
        return "numbers"
    if given.names is not None:
        return "named"
    if pa.types.is_floating(given.values.type):
        are_whole = len(given.found) <= CLASSES and all(one.is_integer() for one in given.found)
        return "numbers" if given.kind is None and not are_whole else "floats"
    if pa.types.is_integer(given.values.type):
        return "integers"
    return "texts" if _is_text(given.values) else "truths"


def _vectors(given: Given) -> Labels:
    numbers = given.values.cast(pa.float64())
    outside = numbers.filter(pc.or_(pc.less(numbers, 0), pc.greater(numbers, 1)))
    if len(outside):
        raise ValueError(
            f"labels are lists of {given.width} numbers with {outside[0].as_py()!r} among them; expected numbers "
            "from 0 to 1, one for each class. Name the right column: columns={'label': NAME}"
        )
    names = tuple(given.names or [f"label_{at}" for at in range(given.width)])
    return Labels("multi_label_classification", names, names, is_vector=True)


def _named(given: Given) -> Labels:
    names = tuple(given.names or ())
    return Labels(given.kind or "single_label_classification", tuple(range(len(names))), names)


def _texts(given: Given) -> Labels:
    found = given.found
    if any(found) and all(re.fullmatch(r"""\[(\s*['"\d].*)?\]""", one, re.DOTALL) for one in found):
        raise ValueError(
            f"labels are lists written as text, like {found[0]!r:.60}; expected lists. "
            "Read them: dataset.map(lambda row: {NAME: ast.literal_eval(row[NAME])}), with the column's name"
        )
    is_one = given.kind == "multi_label_classification" and not given.is_list
    several = [one for one in found if is_one and re.search("[,;|]", one)]
    if several:
        raise ValueError(
            f"label={several[0]!r:.60} is one text, and would be one class; expected a list of the row's classes. "
            "Split it: dataset.map(lambda row: {NAME: row[NAME].split(',')}), with the column's name"
        )
    # texts that are whole numbers stand in the order of the numbers
    are_digits = all(re.fullmatch(r"-?\d+", one) for one in found)
    return _classes(given, sorted(found, key=int if are_digits else None))


def _floats(given: Given) -> Labels:
    count = len(given.found)
    note = f"labels are floats but {count} whole numbers: taken for classes; task='regression' learns them"
    return _classes(given, sorted(given.found), note)


def _integers(given: Given) -> Labels:
    found, count = sorted(given.found), len(given.found)
    if not given.kind and count > 3 and found == [*range(-1, count - 1)]:
        note = (
            f"{len(given.values.filter(pc.equal(given.values, -1)))} of {len(given.values)} labels are -1, taken for "
            f"no label beside the classes 0 to {found[-1]}, and left out; where -1 is a class, number the classes from "
            "0"
        )
        return _classes(given, found[1:], note)
    if found != [*range(count)]:
        return _classes(
            given, found, f"classes {found[0]} to {found[-1]} are numbered 0 to {count - 1}; id2label has them"
        )
    return _classes(given, found)


READERS: dict[str, Callable[[Given], Labels]] = {
    "vectors": _vectors,
    "numbers": lambda given: Labels("regression"),
    "named": _named,
    "texts": _texts,
    "truths": lambda given: _classes(given, sorted(given.found)),
    "floats": _floats,
    "integers": _integers,
}


def _classes(given: Given, values: list[Any], note: str = "") -> Labels:
    """Return classes with these values, in this order."""
    count = len(given.found)
    if given.rows < 2 * count:
        raise ValueError(
            f"labels of {given.rows} rows are {count} different classes, fewer than 2 rows for each; expected "
            "classes that repeat. Name the right column: columns={'label': NAME}, or learn numbers: task='regression'"
        )
    if len(values) == 1:
        note = f"all labels are {values[0]!r}: there is nothing to tell apart"
    names = tuple(str(int(one) if isinstance(one, float) else one) for one in values)
    return Labels(given.kind or "single_label_classification", tuple(values), names, note)


def _is_text(values: pa.ChunkedArray) -> bool:
    return str(values.type) in ("string", "large_string")


def _width_of_vectors(column: pa.ChunkedArray, values: pa.ChunkedArray) -> int:
    """Return how long lists are that hold a number for each class; 0 for lists of the classes of a row.

    Lists of one length that hold floats or booleans are such, and those of two or more whole numbers 0 and 1.
    """
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1 or not lengths[0] or "string" in str(values.type):
        return 0
    rows = values.to_numpy().reshape(-1, lengths[0])
    is_counted = pa.types.is_integer(values.type)
    return 0 if is_counted and not (lengths[0] > 1 and np.isin(rows, (0, 1)).all()) else int(lengths[0])


def is_known(label: Any) -> bool:
    """Return whether a label, or each of a list of them, is neither None nor NaN."""
    return all(map(is_known, label)) if isinstance(label, list) else label is not None and label == label


def _known(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the labels that are known; rows without one are left out."""
    column = column.drop_null()
    values = pc.list_flatten(column) if hasattr(column.type, "value_type") else column
    if not values.null_count and not (pa.types.is_floating(values.type) and pc.any(pc.is_nan(values)).as_py()):
        return column
    return column.filter(pa.array([is_known(one) for one in column.to_pylist()]))


def _finite(label: Any) -> float:
    if not isfinite(label):
        raise ValueError(f"label={label!r} is no finite number; expected one. Leave its rows out: dataset.filter(...)")
    return float(label)
