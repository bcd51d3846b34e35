"""Bucketing a stream: an ``IterableDataset`` of unknown length, through one bounded buffer.

The buffer is kept sorted by padded length. Once it is full it is cut, from the longest example downwards, into groups
(a batch for each process); one of them is drawn at random and handed out, and the stream fills the gap. So a batch
holds neighbours in length, every group has the same chance at every draw (no length waits for ever, and lengths do not
come in waves), and memory is that of ``buffer_examples`` examples whatever the stream. No boundaries need to be learnt
beforehand, and a stream whose lengths drift is followed.

Trade: of 1e5 lognormal lengths (median 60, at most 512) with ``max_tokens=8192``, the share of real tokens is .85, .92,
.94 and .96 with 1024, 4096, 8192 and 32768 examples held, which are read before the first step
(benchmarks/streaming.py).

The order is a pure function of the stream, the seed, the sizes and the number of processes, whatever the number of
workers: every process and every DataLoader worker reads the whole stream and hands out its own share of the batches.
One worker is enough to read ahead of the training; more of them share the collation, not the reading.
"""

from __future__ import annotations

import copy
import itertools
import reprlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import get_worker_info

from hf_memopt.batching.collation.columns import round_up
from hf_memopt.batching.collation.rows import RowBatch
from hf_memopt.batching.plan.checks import (
    check_batch_limits,
    check_counts,
    check_seed,
    check_too_long,
    checked_boundaries,
)
from hf_memopt.batching.plan.lengths import are_token_ids
from hf_memopt.batching.plan.stream_buffer import Entry, StreamBuffer
from hf_memopt.batching.views.descriptions import DescribedByDataset
from hf_memopt.batching.views.trainer_checks import check_per_device, check_world_size_of_run, take_seed
from hf_memopt.binding.handles import UndoHandle, set_attribute, share_attribute, undo_all
from hf_memopt.changes import Change, record_changes
from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import check_value

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["BUFFER_EXAMPLES", "BucketedStream"]

EPOCH, DROPPED = 0, 1  # places in the shared memory
BUFFER_EXAMPLES = 8192


class BucketedStream(DescribedByDataset, torch.utils.data.IterableDataset[Any]):
    """An endless stream of a stream's examples in length-bucketed order: pass after pass, each in another order.

    ``batch_size=``: an item is an example; ``batch_size * world_size`` neighbours are of similar length, and every
    batch is full. ``max_tokens=``: an item is a whole batch (a list of examples), and ``world_size`` neighbours have
    the same number of rows; ``BucketedCollator`` flattens them. Every example of a pass is handed out exactly once;
    what fills no group at the end of a pass opens the next one. The stream ends after a pass that brought no example.

    A Trainer needs ``max_steps`` and ``attach(trainer)``; a resumed run reads again what it skips. In its log a sample
    of a ``max_tokens=`` stream is a batch.

    Args:
        dataset: a ``datasets.IterableDataset``, a torch ``IterableDataset`` or any iterable of dicts that starts over
            when iterated again. Its ``set_epoch``, if it has one, is called with the number of the pass. In a
            DataLoader worker it is read as if there was none, so it need not share itself out.
        batch_size: examples per batch: a multiple of ``per_device_train_batch_size``; or
        max_tokens: padded tokens per batch, with ``per_device_train_batch_size=1``.
        boundaries: ascending limits that batches are made for, instead of their own padded lengths; a batch of
            ``max_tokens=`` is padded to its limit. An example above the last one is too long.
        buffer_examples: examples held at most by each process and each worker, besides the group that is being handed
            out. More of them pad less: 100 batches for each process are a good measure.
        seed: together with the number of the pass it fixes the order.
        world_size: processes that read side by side.
        column: the column whose length counts.
        pad_to_multiple_of: as in the collator.
        too_long: what to do with an example that fits into no batch: raise, or drop it and count it in ``dropped``.

    Raises:
        ValueError: a size below 1, both or neither of ``batch_size`` and ``max_tokens``, a buffer smaller than one
            group, boundaries that do not ascend or fit, a dataset that is split by node already.
        TypeError: the dataset cannot be iterated more than once.

    Examples:
        >>> rows = [{"input_ids": [1] * length} for length in (3, 50, 4, 52, 5, 51)]
        >>> stream = BucketedStream(rows, batch_size=3, buffer_examples=6)
        >>> [len(row["input_ids"]) // 10 for row in itertools.islice(stream, 12)]
        [0, 0, 0, 5, 5, 5, 0, 0, 0, 5, 5, 5]
    """

    takes_seed = False  # attach may set the seed

    technique = "length buckets"

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        boundaries: ArrayLike | None = None,
        buffer_examples: int = BUFFER_EXAMPLES,
        seed: int = 0,
        world_size: int = 1,
        column: str = "input_ids",
        pad_to_multiple_of: int = 8,
        too_long: Literal["error", "drop"] = "error",
    ) -> None:
        check_batch_limits(batch_size, max_tokens)
        _check_source(dataset)
        self.dataset, self.batch_size, self.max_tokens = dataset, batch_size, max_tokens
        self.buffer_examples, self.seed, self.world_size = buffer_examples, seed, world_size
        self.column, self.pad_to_multiple_of, self.too_long = column, pad_to_multiple_of, too_long
        self._check_settings()
        self.boundaries: list[int] | None = None
        if boundaries is not None:
            self.boundaries = checked_boundaries(np.asarray(boundaries), max_tokens).tolist()
        self._rows_per_turn = batch_size  # what a process takes at a time; bind_trainer learns it from the Trainer
        self._kept_columns: frozenset[str] | None = None
        # The workers of a persistent DataLoader see a new epoch, and the process sees what they dropped.
        self._shared: torch.Tensor = torch.zeros(2, dtype=torch.int64)
        self._shared.untyped_storage().share_memory_()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.untyped_storage().share_memory_()  # a copy or a plain pickle is private memory

    @property
    def epoch(self) -> int:
        """The number of the pass that the next iteration begins with; 0 in a Trainer, which knows one epoch only."""
        return int(self._shared[EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this pass, counted from 0; the Trainer and accelerate call it."""
        self._shared[EPOCH] = epoch

    @property
    def dropped(self) -> int:
        """How many examples the latest iteration dropped as too long so far, over all its passes."""
        return int(self._shared[DROPPED])

    @property
    def group_examples(self) -> int:
        """The fewest examples that are handed out together: one batch for each process, one row each in token mode."""
        return self.world_size * (self.batch_size or 1)

    def __iter__(self) -> Iterator[Any]:
        """Hand out the examples or batches; in a DataLoader worker, its turns of them."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        turns = (turn for group, generator in self._groups(number) for turn in self._deal(group, generator))
        for position, turn in enumerate(turns):
            if position % workers == number:
                yield from turn

    # ---- Order ----

    def _groups(self, worker: int) -> Iterator[tuple[list[Entry], np.random.Generator]]:
        """Yield what the processes read side by side, longest example first, and the random numbers of its pass."""
        rest: list[Entry] = []  # of the pass before, fewer than a group
        source = self._source()
        if worker == 0:
            self._shared[DROPPED] = 0
        capacity = self.buffer_examples // self.group_examples * self.group_examples
        for number in itertools.count(self.epoch):
            generator = np.random.Generator(np.random.Philox(key=[self.seed, number]))
            buffer = StreamBuffer(self._rows_at, self.world_size, generator, full_only=self.max_tokens is None)
            is_empty = True
            for entry in self._entries(source, number, generator, counts=worker == 0):
                is_empty = False
                insort(rest if rest else buffer.held, entry)
                if len(rest) == self.group_examples:
                    yield rest[::-1], generator
                    rest = []
                elif len(buffer.held) == capacity:
                    yield buffer.take(), generator
            if is_empty:
                if rest:
                    yield rest[::-1], generator
                return
            yield from ((group, generator) for group in buffer.drain())
            rest = rest or buffer.held

    def _deal(self, group: list[Entry], generator: np.random.Generator) -> Iterator[list[Any]]:
        """Cut a group into turns, what all processes take at a time, and give each process every ``world_size``-th row.

        The rows are sorted, so each process has one of the longest, and all pad to nearly the same length.
        """
        rows, world = [entry[-1] for entry in group], self.world_size
        if self.max_tokens is not None:
            batches = [RowBatch(rows[rank::world]) for rank in range(min(world, len(rows)))]
            for batch in batches:
                batch.width = None if self.boundaries is None else group[0][0]
            yield batches
            return
        size = (self._rows_per_turn or 1) * world
        turns = [rows[start : start + size] for start in range(0, len(rows), size)]
        for i in generator.permutation(len(turns)) if len(rows) == self.group_examples else range(len(turns)):
            yield [row for rank in range(world) for row in turns[i][rank::world]]

    def _rows_at(self, width: int) -> int:
        """Return how many rows of a padded length one batch holds."""
        return self.batch_size if self.batch_size is not None else (self.max_tokens or 0) // width

    # ---- Reading ----

    def _source(self) -> Iterable[Any]:
        """Return the dataset; in a worker a copy of a datasets stream, whose epoch all workers would share."""
        if get_worker_info() is None or not _is_datasets_stream(self.dataset):
            return self.dataset
        import fsspec.asyn

        fsspec.asyn.reset_lock()  # a forked worker cannot use its parent's thread; datasets does so in its own workers
        return copy.deepcopy(self.dataset)

    def _entries(
        self, source: Iterable[Any], number: int, generator: np.random.Generator, *, counts: bool
    ) -> Iterator[Entry]:
        """Yield the examples of one pass that fit into a batch."""
        if hasattr(source, "set_epoch"):
            source.set_epoch(number)
        most = self.max_tokens if self.boundaries is None else self.boundaries[-1]
        for position, row in enumerate(_read_whole(source)):
            length = self._length(row, position, number)
            width = self._width(length)
            if most is not None and width > most:
                if self.too_long == "error":
                    raise self._too_long(length, width, position, number)
                self._shared[DROPPED] += counts
                continue
            if self._kept_columns is not None:
                row = {name: value for name, value in row.items() if name in self._kept_columns}
            yield width, generator.random(), position, row

    def _width(self, length: int) -> int:
        if self.boundaries is not None and length <= self.boundaries[-1]:
            return self.boundaries[bisect_left(self.boundaries, length)]
        return round_up(length, self.pad_to_multiple_of)

    def _length(self, row: Any, position: int, number: int) -> int:
        where = f"row {position} of the stream (pass {number})"
        if not isinstance(row, Mapping):
            raise TypeError(
                f"dataset=<{type(self.dataset).__name__}> gave a {type(row).__name__} as {where}; expected a dict with "
                f"{self.column!r}. Yield dicts: {{{self.column!r}: [...], 'labels': ...}}"
            )
        if self.column not in row:
            raise ValueError(
                f"column={self.column!r} is not in {where}; expected one of {sorted(row)}."
                f"{did_you_mean(self.column, map(str, row))} "
                'Tokenise first: dataset.map(lambda row: tokenizer(row["text"]))'
            )
        tokens = row[self.column]
        if tokens is not None and not are_token_ids(tokens):
            raise ValueError(
                f"column={self.column!r} holds {reprlib.repr(tokens)} in {where}; expected one flat list of integers "
                'per row. Tokenise without return_tensors: dataset.map(lambda row: tokenizer(row["text"]))'
            )
        if tokens is None or len(tokens) == 0:
            raise ValueError(
                f"column={self.column!r} is empty or null in {where}; expected 1 token or more. Drop such rows: "
                f"dataset.filter(lambda row: row[{self.column!r}])"
            )
        return len(tokens)

    def _too_long(self, length: int, width: int, position: int, number: int) -> ValueError:
        if self.boundaries is None:
            limit, raising = f"max_tokens={self.max_tokens}", "raise max_tokens"
        else:
            limit, raising = f"boundaries[-1]={self.boundaries[-1]}", "append a boundary"
        return ValueError(
            f"{limit} has no room for row {position} of the stream (pass {number}), {length} tokens padded to {width}; "
            "expected every example to fit. Truncate it (tokenizer(..., truncation=True, max_length=...)), "
            f'{raising}, or pass bucketed(..., too_long="drop"), which counts them in stream.dropped'
        )

    # ---- Settings and the Trainer ----

    def _check_settings(self) -> None:
        check_value("column", self.column, str, example="input_ids")
        counts = ("world_size", "buffer_examples", "pad_to_multiple_of")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_seed(self.seed)
        check_too_long(self.too_long)
        if self.buffer_examples < self.group_examples:
            raise ValueError(
                f"buffer_examples={self.buffer_examples} is less than one batch for each of {self.world_size} "
                f"processes; expected {self.group_examples} or more. "
                f"Pass bucketed(..., buffer_examples={100 * self.group_examples})"
            )

    def check_evaluation(self, trainer: Any) -> NoReturn:
        """Raise ValueError: a stream for training never ends; an attached Trainer calls it."""
        raise ValueError(
            "dataset=<BucketedStream> never ends, and neither would the evaluation; expected the dataset itself. "
            "Evaluate or predict stream.dataset"
        )

    def keep_columns(self, names: Iterable[str] | None) -> None:
        """Hand out only these columns, None: all; an attached Trainer calls it when it makes its DataLoader."""
        self._kept_columns = None if names is None else frozenset(names)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Let every process read the stream for itself, and check the Trainer's arguments; ``attach`` calls it.

        Stock reads a stream in the first process and cuts each batch up for the others, so unequal batches crash. The
        accelerator's ``dispatch_batches`` is read when the DataLoader is prepared, so it is in time here.

        Raises:
            ValueError: arguments or collator do not fit the stream.
        """
        check_world_size_of_run(trainer, self.world_size, of="bucketed stream")
        for name in ("dispatch_batches", "split_batches"):
            if getattr(trainer.args.accelerator_config, name):
                raise ValueError(
                    f"accelerator_config.{name}=True would cut the batches of the bucketed stream up; expected False. "
                    f'Pass TrainingArguments(..., accelerator_config={{"{name}": False}})'
                )
        check_per_device(trainer, self.batch_size, of="bucketed stream")
        handles = [take_seed(trainer, self, may_change=self.takes_seed, of="bucketed stream")]
        changes = []
        if self.batch_size is not None:
            handles.append(share_attribute(self, "_rows_per_turn", trainer.args.per_device_train_batch_size))
        else:
            reason = "an item of a max_tokens= stream is a whole batch, and its number of examples is unknown before"
            changes.append(Change("samples in the Trainer's log", "examples", "batches", reason))
        config = trainer.accelerator.dataloader_config
        if config.dispatch_batches is not False:
            reason = "each process reads the stream for itself: stock would cut up batches of the first one for all"
            name = "accelerator_config.dispatch_batches"
            changes.append(Change(name, config.dispatch_batches, False, reason))
            handles.append(set_attribute(config, "dispatch_batches", False))
        record_changes(trainer, changes)
        return undo_all(*handles)


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


def _is_datasets_stream(dataset: Any) -> bool:
    import datasets

    return isinstance(dataset, datasets.IterableDataset)


def _check_source(dataset: Any) -> None:
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
