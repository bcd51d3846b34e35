"""One pass over a stream: its rows, checked and measured, from any place on, and the groups that are cut of them."""

from __future__ import annotations

import reprlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_memopt.batching.collation.columns import round_up
from hf_memopt.batching.plan.lengths import are_token_ids
from hf_memopt.errors import did_you_mean

if TYPE_CHECKING:
    from hf_memopt.batching.views.bucketed_stream import BucketedStream
    from hf_memopt.batching.views.stream_places import Place
    from hf_memopt.batching.views.stream_source import StreamSource

__all__ = ["Entry", "StreamPass", "cut_groups", "random_numbers"]

ROWS, GROUPS = range(2)  # what random numbers are for
TIES = 1024  # that are drawn at a time
_END = object()


def random_numbers(seed: int, epoch: int, number: int, purpose: int = GROUPS) -> np.random.Generator:
    """Return the random numbers of one group, or of ``TIES`` rows: a pure function of its arguments."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, number, purpose]))


class StreamPass:
    """The rows of one pass, in the order of the stream.

    Args:
        stream: its settings.
        source: what it reads.
        place: where the reading begins.
        on_dropped: None, or what is called with the number of rows that were dropped so far, in all passes.

    Attributes:
        is_empty: whether the pass has brought no example so far.
    """

    def __init__(
        self, stream: BucketedStream, source: StreamSource, place: Place, on_dropped: Callable[[int], None] | None
    ) -> None:
        self.is_empty = place["row"] == 0
        self.dropped = place["dropped"]
        self._stream, self._source, self._begin, self._on_dropped = stream, source, place, on_dropped
        self._row = place["row"]
        self._rows = source.rows(place["epoch"], place["row"], place["dataset"])
        self._ties: tuple[int, list[float]] = -1, []  # the number of a block of rows, and their tie-breaks

    def take(self, count: int) -> list[Entry]:
        """Return the next examples that fit into a batch, fewer at the end of the pass."""
        taken: list[Entry] = []
        while len(taken) < count and (row := next(self._rows, _END)) is not _END:
            entry = self._entry(row)
            if entry is None:
                self.dropped += 1
                if self._on_dropped is not None:
                    self._on_dropped(self.dropped)
            else:
                taken.append(entry)
            self._row += 1
        self.is_empty &= not taken
        return taken

    def place(self, group: int) -> Place:
        """Return where the next row is, before which so many groups are drawn; the turn is not known yet."""
        if self._row == self._begin["row"]:
            return {**self._begin, "group": group}
        state = self._source.state()
        return {**self._begin, "row": self._row, "dataset": state, "group": group, "dropped": self.dropped}

    def _entry(self, row: Any) -> Entry | None:
        """Return a row as it is held; None where it is too long and dropped."""
        stream, where = self._stream, f"row {self._row} of the stream (pass {self._begin['epoch']})"
        length = _checked_length(row, stream, where)
        boundaries = stream.boundaries
        if boundaries is not None and length <= boundaries[-1]:
            width = boundaries[bisect_left(boundaries, length)]
        else:
            width = round_up(length, stream.pad_to_multiple_of)
        most = stream.max_tokens if boundaries is None else boundaries[-1]
        if most is not None and width > most:
            if stream.too_long == "error":
                raise _too_long(stream, where, length, width)
            return None
        kept = stream.kept_columns
        if kept is not None:
            row = {name: value for name, value in row.items() if name in kept}
        return width, self._tie(), self._row, row

    def _tie(self) -> float:
        """Return the random number that orders this row among those of its length."""
        block, within = divmod(self._row, TIES)
        if block != self._ties[0]:
            generator = random_numbers(self._stream.seed, self._begin["epoch"], block, ROWS)
            self._ties = block, generator.random(TIES).tolist()
        return self._ties[1][within]


def _checked_length(row: Any, stream: BucketedStream, where: str) -> int:
    """Return the number of tokens of a row, or raise an error that names it."""
    column = stream.column
    if not isinstance(row, Mapping):
        raise TypeError(
            f"dataset=<{type(stream.dataset).__name__}> gave a {type(row).__name__} as {where}; expected a dict with "
            f"{column!r}. Yield dicts: {{{column!r}: [...], 'labels': ...}}"
        )
    if column not in row:
        raise ValueError(
            f"column={column!r} is not in {where}; expected one of {sorted(row)}."
            f"{did_you_mean(column, map(str, row))} "
            'Tokenise first: dataset.map(lambda row: tokenizer(row["text"]))'
        )
    tokens = row[column]
    if tokens is not None and not are_token_ids(tokens):
        raise ValueError(
            f"column={column!r} holds {reprlib.repr(tokens)} in {where}; expected one flat list of integers "
            'per row. Tokenise without return_tensors: dataset.map(lambda row: tokenizer(row["text"]))'
        )
    if tokens is None or len(tokens) == 0:
        raise ValueError(
            f"column={column!r} is empty or null in {where}; expected 1 token or more. Drop such rows: "
            f"dataset.filter(lambda row: row[{column!r}])"
        )
    return len(tokens)


def _too_long(stream: BucketedStream, where: str, length: int, width: int) -> ValueError:
    if stream.boundaries is None:
        limit, raising = f"max_tokens={stream.max_tokens}", "raise max_tokens"
    else:
        limit, raising = f"boundaries[-1]={stream.boundaries[-1]}", "append a boundary"
    return ValueError(
        f"{limit} has no room for {where}, {length} tokens padded to {width}; "
        "expected every example to fit. Truncate it (tokenizer(..., truncation=True, max_length=...)), "
        f'{raising}, or pass bucketed(..., too_long="drop"), which counts them in stream.dropped'
    )


Entry = tuple[int, float, int, Any]  # padded length, random tie-break, position in the pass, example


def cut_groups(
    held: list[Entry], rows_at: Callable[[int], int], world_size: int, *, full_only: bool
) -> tuple[list[list[Entry]], list[Entry]]:
    """Return the groups, each with its longest example first, and the examples that fill none.

    The groups are cut from the longest examples downwards, so that what is left over are the shortest.

    Args:
        held: examples in ascending order.
        rows_at: how many rows of a padded length a batch holds.
        world_size: batches of a group.
        full_only: whether batches with fewer rows than that are never cut.
    """
    groups, end = [], len(held)
    while end >= world_size:
        size = rows_at(held[end - 1][0]) * world_size
        if full_only and end < size:
            break
        size = min(size, end - end % world_size)
        groups.append(held[end - size : end][::-1])
        end -= size
    return groups, held[:end]
