"""The ways in which people write rows, told apart by the names of their columns.

They are in ``formats.csv`` in the order in which they are looked for: ``part=name/name`` are the names that data sets
give to a part, those of TRL and of the best-known data sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import packaged_rows

__all__ = ["ALIASES", "FORMATS", "TASKS", "Format", "fitting_format", "row_format"]

TASKS = ("causal-lm", "masked-lm", "seq2seq", "sequence-classification", "token-classification", "question-answering")
ALIASES = {"regression": "regression", "multi-label-classification": "multi_label_classification"}


class Format(NamedTuple):
    """A way of writing rows.

    Attributes:
        name: of the format.
        tasks: whose rows are written so.
        columns: the names that data sets give to each part.
        optional: those of the parts that rows may lack.
    """

    name: str
    tasks: list[str]
    columns: dict[str, list[str]]
    optional: dict[str, list[str]]

    def found_in(self, names: Sequence[str], given: Mapping[str, str]) -> dict[str, str] | None:
        """Return the column of each part; None where one lacks, or ``given``, the column of a part, has others."""
        parts = {**self.columns, **self.optional}
        named = {part: next((name for name in usual if name in names), "") for part, usual in parts.items()}
        found = {part: name for part, name in {**named, **given}.items() if name}
        return found if self.columns.keys() <= found.keys() <= parts.keys() else None


def _parts(cell: str) -> dict[str, list[str]]:
    """Return the names of each part, of ``"words=tokens/words tags"``."""
    named = (one.partition("=") for one in cell.split())
    return {part: (names or part).split("/") for part, _, names in named}


FORMATS = [
    Format(row["format"], row["tasks"].split(), _parts(row["columns"]), _parts(row["optional"]))
    for row in packaged_rows("hf_memopt.rows", "formats.csv")
]


def fitting_format(
    names: Sequence[str], task: str | None, columns: Mapping[str, str]
) -> tuple[Format, dict[str, str]] | None:
    """Return the first format of a task, or of any, that has these columns, and the column of each part; else None."""
    possible = (one for one in FORMATS if task is None or task in one.tasks)
    return next(((one, found) for one in possible if (found := one.found_in(names, columns)) is not None), None)


def row_format(
    names: Sequence[str], task: str, columns: Mapping[str, str] | None = None
) -> tuple[Format, dict[str, str]]:
    """Return the format of rows with these columns, and the column of each of its parts.

    Args:
        names: of the columns.
        task: what is trained, one of ``TASKS``.
        columns: the column of a part, where its name is another one: ``{"text": "body"}``.

    Raises:
        ValueError: an unknown column, or columns that no format has.
    """
    given = dict(columns or {})
    absent = next((name for name in given.values() if name not in names), None)
    if absent is not None:
        raise ValueError(
            f"columns={given!r} name {absent!r}, which is not in the data; expected names among {sorted(names)}."
            f"{did_you_mean(absent, names)} Pass columns={{'text': {next(iter(names), 'text')!r}}}"
        )
    found = fitting_format(names, task, given)
    if found is not None:
        return found
    possible = [one for one in FORMATS if task in one.tasks]
    wanted = "; ".join(dict.fromkeys(f"{one.name} ({', '.join(one.columns)})" for one in possible))
    example = dict.fromkeys(possible[-1].columns, "NAME")
    raise ValueError(
        f"columns {sorted(names)} are in no format of {task}; expected one of: {wanted}. Name them: columns={example!r}"
    )
