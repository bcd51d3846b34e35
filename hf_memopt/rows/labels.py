"""Tell from a column of labels whether they are classes, numbers or several classes at once, and name the classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal

__all__ = ["KINDS", "Kind", "Labels", "labels_of"]

Kind = Literal["single_label_classification", "regression", "multi_label_classification"]
KINDS: tuple[Kind, ...] = ("single_label_classification", "regression", "multi_label_classification")
"""transformers' names of ``problem_type``."""
CLASSES = 20  # as many different whole numbers, written as floats, are taken for classes


@dataclass(frozen=True)
class Labels:
    """What the labels of a data set are.

    Attributes:
        kind: transformers' ``problem_type``.
        names: of the classes, in the order of their ids; none for regression.
        values: what the data calls each class, in the same order.
        note: what was assumed; "" for nothing.
        is_vector: whether rows hold 0 and 1 for each class, instead of the classes they belong to.
    """

    kind: Kind
    names: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()
    note: str = ""
    is_vector: bool = False

    @property
    def head(self) -> dict[str, Any]:
        """Options of ``from_pretrained`` for a new head: its size, and the names that its configuration stores."""
        options: dict[str, Any] = {"problem_type": self.kind, "num_labels": len(self.names) or 1}
        if self.names:
            options |= {"id2label": dict(enumerate(self.names)), "label2id": {n: i for i, n in enumerate(self.names)}}
        return {**options, "ignore_mismatched_sizes": True}

    def encode(self, label: Any) -> int | float | list[float]:
        """Return a label as the loss takes it: a class's id, a number, or 0.0 and 1.0 for each class.

        Raises:
            ValueError: a class that is not known.
        """
        if self.kind == "regression":
            return float(label)
        if self.is_vector:
            return [float(one) for one in label]
        if self.kind == "multi_label_classification":
            chosen = {self._id(one) for one in label}
            return [float(at in chosen) for at in range(len(self.names))]
        return self._id(label)

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


def labels_of(labels: Sequence[Any], *, names: Sequence[str] | None = None, kind: Kind | None = None) -> Labels:
    """Return what a column of labels holds.

    Whole numbers are classes: 0 to n-1 without gaps stay as they are, others are numbered in their order. Texts are
    classes, in alphabetical order, or that of their numbers where all are numbers. Floats are regression, unless they
    are at most 20 different whole numbers. Lists are several classes at once.

    Args:
        labels: of the training rows, without None.
        names: of the classes 0 to n-1, of a ``ClassLabel``.
        kind: what they are, where it is known.

    Raises:
        ValueError: fewer than two rows for each class on average, or labels of mixed or other kinds.
    """
    first = labels[0]
    if isinstance(first, Sequence) and not isinstance(first, str):
        if _are_vectors(labels):
            columns = names or [f"label_{at}" for at in range(len(first))]
            return Labels("multi_label_classification", tuple(columns), tuple(columns), is_vector=True)
        known = dict.fromkeys(one for label in labels for one in label)
        return _classes(list(known), "multi_label_classification", names, len(labels))
    if kind == "regression":
        return Labels("regression")
    if names is not None:
        return _named(list(range(len(names))), names, kind or KINDS[0])
    if not all(isinstance(label, str) for label in labels) and not all(isinstance(label, Real) for label in labels):
        raise ValueError(
            f"label={first!r:.60} is one of several kinds of labels; expected texts, whole numbers, floats or lists. "
            "Name the right column: columns={'label': NAME}"
        )
    found, note = dict.fromkeys(labels), ""
    if not isinstance(first, str) and not all(isinstance(label, Integral) for label in found):
        is_whole = all(float(label).is_integer() for label in found)
        if kind is None and not (is_whole and len(found) <= CLASSES):
            return Labels("regression")
        note = f"labels are floats but {len(found)} whole numbers: taken for classes; task='regression' learns them"
    return _classes(list(found), kind or KINDS[0], None, len(labels), note)


def _are_vectors(labels: Sequence[Any]) -> bool:
    """Return whether lists hold 0 or 1 for each class: floats or bools, or whole numbers one of which comes twice."""
    if len({len(label) for label in labels}) > 1 or any(one not in (0, 1) for label in labels for one in label):
        return False
    is_number = not isinstance(labels[0][0], Integral) or isinstance(labels[0][0], bool) if len(labels[0]) else False
    return is_number or any(len(set(label)) < len(label) for label in labels)


def _classes(found: list[Any], kind: Kind, names: Sequence[str] | None, rows: int, note: str = "") -> Labels:
    if names is not None:
        return _named(list(range(len(names))), names, kind)
    if rows < 2 * len(found):
        raise ValueError(
            f"labels of {rows} rows are {len(found)} different classes, fewer than 2 rows for each; expected classes "
            "that repeat. Name the right column: columns={'label': NAME}, or learn numbers: task='regression'"
        )
    values = _in_order(found)
    is_numbers = all(isinstance(value, Integral) and not isinstance(value, bool) for value in values)
    if is_numbers and values != list(range(len(values))):
        note = note or f"classes {values[0]} to {values[-1]} are numbered 0 to {len(values) - 1}; id2label has them"
    return _named(values, [_name(value) for value in values], kind, note)


def _named(values: list[Any], names: Sequence[str], kind: Kind, note: str = "") -> Labels:
    return Labels(kind, tuple(names), tuple(values), note)


def _name(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) else str(value)


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Return values in order; texts that are all whole numbers in the order of the numbers."""
    found = list(values)
    is_number = all(isinstance(value, str) and re.fullmatch(r"-?\d+", value.strip()) for value in found)
    return sorted(found, key=int) if is_number else sorted(found)
