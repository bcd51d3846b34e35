"""Read the rows of a stream, or one process's share of them, pass after pass and from any place in a pass.

A ``datasets.IterableDataset`` is split by ``split_dataset_by_node``: by shards where the processes divide their number,
else every ``world_size``-th row. Of any other stream a process keeps every ``world_size``-th row. Either way each row
belongs to one process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hf_memopt.plain_data import shown

__all__ = ["StreamSource", "check_source"]


class StreamSource:
    """The rows that one process reads.

    Args:
        dataset: the stream, which is not split.
        rank: the process whose share is read; None: all rows.
        world_size: processes that share the stream.
        is_resumed: whether the first pass begins at a state of the dataset, which a copy of it takes.
    """

    def __init__(self, dataset: Iterable[Any], rank: int | None, world_size: int, *, is_resumed: bool) -> None:
        is_of_datasets = _is_datasets_stream(dataset)
        in_worker = get_worker_info() is not None
        if in_worker and is_of_datasets:
            import fsspec.asyn

            fsspec.asyn.reset_lock()  # a forked worker cannot use its parent's thread; datasets does so in its own
        if is_resumed or (in_worker and is_of_datasets):  # all workers would share its epoch
            dataset = copy.deepcopy(dataset)
        self._step = 1
        self._offset = 0
        if rank is not None and is_of_datasets:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank=rank, world_size=world_size)
        elif rank is not None:
            self._step, self._offset = world_size, rank
        self.dataset: Any = dataset
        self.is_resumable = all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))
        self.is_resumable &= not _holds_rows_back(getattr(dataset, "_ex_iterable", None))

    def rows(self, epoch: int, row: int = 0, state: Any = None) -> Iterator[Any]:
        """Yield the rows of a pass from ``row`` on; with the dataset's ``state`` there, those before are not read."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        first = self._offset + row * self._step
        if state is not None:  # of the moment after a row of this process
            try:
                self.dataset.load_state_dict(state)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise ValueError(
                    f"state['place']['dataset']={shown(state)} is not a state of <{type(self.dataset).__name__}> "
                    f"({type(error).__name__}: {error}); expected what its state_dict() returned. "
                    "Save it anew: stream.state_dict()"
                ) from error
            first = self._step - 1
        return islice(_read_whole(self.dataset), first, None, self._step)

    def state(self) -> Any:
        """Return the dataset's state after the latest row; None where it has none, or none that is exact."""
        return self.dataset.state_dict() if self.is_resumable else None


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


def _holds_rows_back(examples: Any) -> bool:
    """Return whether a stream of datasets holds rows in a shuffle buffer, which its state leaves out."""
    # `_ex_iterable`, `ex_iterable(s)` and the name of the class: datasets 3.0 to 5.2; pinned by a test.
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable" and examples.buffer_size > 1:
        return True
    inside = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(map(_holds_rows_back, inside))


def _is_datasets_stream(dataset: Any) -> bool:
    import datasets

    return isinstance(dataset, datasets.IterableDataset)


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
