"""Read the rows of a stream, or one process's share of them, pass after pass and from any place in a pass.

A ``datasets.IterableDataset`` is split by ``split_dataset_by_node``: by shards where the processes divide their number,
else every ``world_size``-th row. Of any other stream a process keeps every ``world_size``-th row. Either way each row
belongs to one process.

DataLoader workers run ahead of the training, so only the main process knows how many batches were trained on, and only
the worker knows where in the dataset they were read. The worker notes a place whenever it begins to hand out what it
holds, in a ring in shared memory; the main process takes the latest one that is not ahead of the training.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypedDict, cast

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import get_worker_info

from hf_memopt.batching import token_count
from hf_memopt.batching.collation import cut_text, round_up
from hf_memopt.batching.views.view import SharedArray
from hf_memopt.plain_data import shown

if TYPE_CHECKING:
    from hf_memopt.batching.views.bucketed_stream import BucketedStream

ROWS, GROUPS = range(2)  # what random numbers are for
TIES = 1024  # that are drawn at a time
_END = object()

Entry = tuple[int, float, int, Any]  # padded length, random tie-break, position in the pass, example


def random_numbers(seed: int, epoch: int, number: int, purpose: int = GROUPS) -> np.random.Generator:
    """Return the random numbers of one group, or of ``TIES`` rows: a pure function of its arguments."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, number, purpose]))


# ---- Rows -----------------------------------------------------------------------------------------------------------


class StreamReader:
    """The rows that one process reads of a stream, checked and measured; ``notes``: the stream is told of the dropped.

    Where it ``is_resumed``, the first pass begins at a state of the dataset, which a copy of it takes.
    """

    is_empty: bool  # whether the pass has brought no example so far
    dropped: int  # rows that were dropped so far, in all passes

    def __init__(self, stream: BucketedStream, *, notes: bool, is_resumed: bool) -> None:
        self._stream, self._notes = stream, notes
        self._dataset: Any = stream.dataset
        in_worker, is_of_datasets = get_worker_info() is not None, isinstance(stream.dataset, datasets.IterableDataset)
        if in_worker and is_of_datasets:
            import fsspec.asyn

            fsspec.asyn.reset_lock()  # a forked worker cannot use its parent's thread; datasets does so in its own
        if is_resumed or (in_worker and is_of_datasets):  # all workers would share its epoch
            self._dataset = copy.deepcopy(self._dataset)
        self._step, self._offset, self.taken = 1, 0, 0
        if stream.rank is not None and is_of_datasets:
            self._dataset = split_dataset_by_node(self._dataset, rank=stream.rank, world_size=stream.world_size)
        elif stream.rank is not None:
            self._step, self._offset = stream.world_size, stream.rank
        self._is_resumable = all(hasattr(self._dataset, name) for name in ("state_dict", "load_state_dict"))
        self._is_resumable &= not _holds_rows_back(getattr(self._dataset, "_ex_iterable", None))

    def begin(self, place: Place) -> None:
        """Read a pass from a place on; with the dataset's state there, the rows before are not read."""
        self._begin, self._row, self.dropped = place, place["row"], place["dropped"]
        self.is_empty = place["row"] == 0
        self._ties: tuple[int, list[float]] = -1, []  # the number of a block of rows, and their tie-breaks
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(place["epoch"])
        first, state = self._offset + place["row"] * self._step, place["dataset"]
        if state is not None:  # of the moment after a row of this process
            try:
                self._dataset.load_state_dict(state)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise ValueError(
                    f"state['place']['dataset']={shown(state)} is not a state of <{type(self._dataset).__name__}> "
                    f"({type(error).__name__}: {error}); expected what its state_dict() returned. "
                    "Save it anew: stream.state_dict()"
                ) from error
            first = self._step - 1
        rows, loaded = _read_whole(self._dataset), self._stream.loaded_state
        if loaded is not None and place is loaded["place"]:
            rows = _told_of_random_order(rows, type(self._dataset).__name__)
        self._rows = islice(rows, first, None, self._step)

    def take(self, count: int) -> list[Entry]:
        """Return the next examples that fit into a batch with all their parts, fewer at the end of the pass."""
        taken: list[Entry] = []
        most = self.taken + count
        while self.taken < most and (row := next(self._rows, _END)) is not _END:
            entries = [self._entry(part) for part in self._parts(row)]
            if None in entries:
                self.dropped += 1
                if self._notes:
                    self._stream.dropped = self.dropped
            else:
                taken += cast(list[Entry], entries)
                self.taken += 1
            self._row += 1
        self.is_empty &= not taken
        return taken

    def place(self, group: int) -> Place:
        """Return where the next row is, before which so many groups are drawn; the turn is not known yet."""
        if self._row == self._begin["row"]:
            return {**self._begin, "group": group}
        state = self._dataset.state_dict() if self._is_resumable else None
        return {**self._begin, "row": self._row, "dataset": state, "group": group, "dropped": self.dropped}

    def _parts(self, row: Any) -> list[Any]:
        """Return a row, or the parts of one that the stream splits."""
        column, most = self._stream.column, self._stream.max_tokens or 0
        length = token_count(row, column, f"row {self._row} of the stream") if self._stream.too_long == "split" else 0
        return [cut_text(row, column, i, most) for i in range(0, length, most)] if length > most else [row]

    def _entry(self, row: Any) -> Entry | None:
        """Return a row as it is held; None where it is too long and dropped."""
        stream, where = self._stream, f"row {self._row} of the stream (pass {self._begin['epoch']})"
        length = token_count(row, stream.column, where)
        if length == 0:
            raise ValueError(
                f"column={stream.column!r} is empty or null in {where}; expected 1 token or more. Drop such rows: "
                f"dataset.filter(lambda row: len(row[{stream.column!r}] or []) > 0)"
            )
        boundaries = stream.boundaries
        if boundaries is not None and length <= boundaries[-1]:
            width = boundaries[bisect_left(boundaries, length)]
        else:
            width = round_up(length, stream.pad_to_multiple_of)
        limit, most, more = stream.limit, stream.max_tokens, f"raise {stream.limit}"
        if boundaries is not None:
            limit, most, more = "boundaries[-1]", boundaries[-1], "append a boundary"
        if most is not None and width > most:
            if stream.too_long == "drop":
                return None
            raise ValueError(
                f"{limit}={most} has no room for {where}, {length} tokens padded to {width}; expected every example to "
                f"fit. Truncate it (tokenizer(..., truncation=True, max_length=...)), {more}, or pass "
                f'{stream.made_by}(..., too_long="drop"), which counts them in stream.dropped'
            )
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


def _read_whole(source: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a source as if there was no DataLoader worker: it would give each of them a share of its own, and
    streams that are cut differently would be read at different speeds, so that no pass was a pass.
    """
    # `_worker_info` is what get_worker_info() returns (torch 2.6 to 2.13; pinned by a test). It is put back before
    # every row is handed out: between two rows the worker runs the collator, and may begin another iteration.
    module = torch.utils.data._utils.worker
    here = module._worker_info
    rows: Iterator[Any] | None = None
    while True:
        module._worker_info = None
        try:
            rows = iter(source) if rows is None else rows
            row = next(rows)
        except StopIteration:
            return
        finally:
            module._worker_info = here
        yield row


def _told_of_random_order(rows: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield the rows, and warn if the first of them draws global random numbers, which are others after a resume."""
    before = _global_random_numbers()
    first = list(islice(rows, 1))
    if _global_random_numbers() != before:
        warnings.warn(
            f"dataset=<{name}> draws global random numbers, and they are others than before the checkpoint: if they "
            "order its rows, some are trained on twice and others never; expected an order that the pass decides. "
            "Shuffle by random.Random(epoch), or resume with TrainingArguments(..., ignore_data_skip=False)",
            stacklevel=2,
        )
    yield from first
    yield from rows


def _global_random_numbers() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2], torch.get_rng_state().numpy().tobytes()


def _holds_rows_back(examples: Any) -> bool:
    """Return whether a stream of datasets holds rows in a shuffle buffer, which its state leaves out."""
    # `_ex_iterable`, `ex_iterable(s)` and the name of the class: datasets 3.0 to 5.2; pinned by a test.
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable" and examples.buffer_size > 1:
        return True
    inside = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(map(_holds_rows_back, inside))


def check_source(dataset: Any) -> None:
    """Raise for a dataset that cannot be read again and again, or of which a part only would be read.

    Raises:
        TypeError: it cannot be iterated, or only once.
        ValueError: it is split by node already.
    """
    name = type(dataset).__name__
    if isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        what = "can be read only once" if isinstance(dataset, Iterator) else "cannot be iterated"
        raise TypeError(
            f"dataset=<{name}> {what}; expected a stream that starts over when it is iterated again. "
            "Pass the function that makes the rows: datasets.IterableDataset.from_generator(make_rows)"
        )
    # `_distributed` is what split_dataset_by_node sets (datasets 3.0 to 5.2; pinned by a test).
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            f"dataset=<{name}> is split by node already, so a part of its examples would never be seen; expected the "
            "whole stream in every process. Leave out split_dataset_by_node"
        )


# ---- Places ----------------------------------------------------------------------------------------------------------

PLACES = 16  # the first is the beginning; 15 fillings of the buffer are more than workers prefetch
LARGEST_BYTES, CHECKSUM_BYTES = 2**16, 4


class Place(TypedDict):
    """Where the reading of what a stream holds began, and what had been handed out when that began to be."""

    epoch: int  # the pass
    row: int  # rows of the pass that were read before
    dataset: Any  # the dataset's own state there; None: the rows before are read again
    group: int  # groups drawn so far: of the pass, or with a rank of all passes
    turn: int  # turns handed out so far, of all passes: a batch for each process
    dropped: int


class SharedPlaces:
    """The latest places, in memory that forked and spawned workers share."""

    def __init__(self) -> None:
        self._memory = SharedArray(PLACES, LARGEST_BYTES, dtype=torch.uint8)
        self._added = 0

    def begin(self, place: Place) -> None:
        """Forget all places but this one, where an iteration begins."""
        self._memory.values[:] = 0
        self._added = 0
        self._write(0, place)

    def add(self, place: Place) -> None:
        """Note a place in the room of the oldest."""
        self._write(1 + self._added % (PLACES - 1), place)
        self._added += 1

    def latest(self, turn: int) -> Place | None:
        """Return the latest place at or before a turn; None before the first iteration."""
        found = [place for number in range(PLACES) if (place := self._read(number)) is not None]
        return max((place for place in found if place["turn"] <= turn), key=lambda place: place["turn"], default=None)

    def _write(self, number: int, place: Place) -> None:
        try:
            text = json.dumps(place).encode()
        except TypeError:  # a dataset whose state is not JSON
            text = b""
        if not text or len(text) >= LARGEST_BYTES - CHECKSUM_BYTES:
            text = json.dumps({**place, "dataset": None}).encode()
        written = zlib.crc32(text).to_bytes(CHECKSUM_BYTES, "little") + text + b"\0"
        self._memory.values[number, : len(written)] = np.frombuffer(written, np.uint8)

    def _read(self, number: int) -> Place | None:
        found = self._memory.values[number].tobytes()
        text = found[CHECKSUM_BYTES:].partition(b"\0")[0]
        if not text or zlib.crc32(text) != int.from_bytes(found[:CHECKSUM_BYTES], "little"):  # a worker is writing it
            return None
        place: Place = json.loads(text)
        return place
