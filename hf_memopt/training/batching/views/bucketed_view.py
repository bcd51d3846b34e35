"""A view that brings a length-bucketed order to the stock ``Trainer``, which reads them from front to back.

``batch_size=``: an item is an example and ``batch_size`` neighbours form a batch; every number of the Trainer keeps its
stock meaning. ``max_tokens=``: an item is a whole batch (a list of examples), to be read with
``per_device_train_batch_size=1`` and flattened by ``BucketedCollator``. The order is a pure function of (seed, epoch),
so a resumed run sees the very batches of the straight run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hf_memopt.changes import Change, record_changes
from hf_memopt.notices import notify
from hf_memopt.training.batching import lengths_of, token_lengths
from hf_memopt.training.batching.collation import RowReader, has_decoder
from hf_memopt.training.batching.plan import (
    EpochPlan,
    LengthBuckets,
    PackedRows,
    check_batch_limits,
    check_settings,
    checked_position,
)
from hf_memopt.training.batching.views.view import (
    EpochView,
    check_per_device,
    check_world_size_of_run,
    is_padding_free,
    read_in_order,
    take_seed,
    takes_columns,
    tell_what_a_sample_is,
    warn_of_other_batches,
)
from hf_memopt.training.binding.undo import UndoHandle, share_attribute, undo_all

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger(__name__)


def bucketed(
    dataset: Any,
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    n_buckets: int | Literal["auto"] = "auto",
    boundaries: ArrayLike | Literal["auto"] | None = None,
    seed: int | None = None,
    lengths: ArrayLike | None = None,
    column: str = "input_ids",
    world_size: int | None = None,
    pad_to_multiple_of: int = 8,
    too_long: Literal["error", "drop"] = "error",
) -> BucketedView:
    """Return a view of a dataset that batches examples of similar length, reshuffled every epoch.

    It is read in order: an attached Trainer makes its DataLoaders with ``train_sampling_strategy="sequential"``.
    Without ``attach`` set it yourself, or use a DataLoader without shuffle.

    Args:
        dataset: a ``datasets.Dataset`` or anything with ``__len__`` and ``__getitem__``; it is not copied.
        batch_size: examples per batch: a multiple of ``per_device_train_batch_size``; or
        max_tokens: padded tokens per batch, of an encoder-decoder those that it reads, with
            ``per_device_train_batch_size=1``; in the Trainer's log a batch counts as a sample. Short examples come in
            fewer, larger batches and so in fewer steps: made for losses per token, not for one label per text.
            With ``BucketedCollator(inner=DataCollatorWithFlattening())`` a batch is one row without padding, and an
            attached view packs texts of all lengths into nearly ``max_tokens`` tokens.
            ``estimate(model, batch_size=1, seq_len=max_tokens)`` is its memory, for flash attention with
            ``padding=False``.
        n_buckets: see ``LengthBuckets``.
        boundaries: see ``LengthBuckets``; under ``attach`` ``BucketedCollator`` pads to them, other collators
            to the longest row.
        seed: of the order; None: ``attach`` takes that of the training arguments (``data_seed``, else ``seed``), and
            without it 0 counts.
        lengths: tokens per example, shape (examples,); read by ``token_lengths(dataset, column)`` unless given.
        column: the column whose length counts.
        world_size: processes that share the view; from the environment of torchrun unless given.
        pad_to_multiple_of: as in the collator.
        too_long: see ``LengthBuckets``; ``view.buckets.dropped`` counts those left out.

    Raises:
        ValueError: a size below 1, both or neither of ``batch_size`` and ``max_tokens``, an empty dataset, one without
            the column, lengths that are not one per example, an example that does not fit into ``max_tokens``.
        TypeError: the dataset is a stream, or anything else that has no rows by number.
    """
    check_batch_limits(batch_size, max_tokens)
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_settings(world_size=world_size)
    settings: dict[str, Any] = {"batch_size": batch_size, "max_tokens": max_tokens, "boundaries": boundaries}
    settings |= {"seed": 0 if seed is None else seed, "world_size": world_size}
    settings |= {"pad_to_multiple_of": pad_to_multiple_of, "too_long": too_long}
    view = BucketedView(dataset, LengthBuckets(lengths_of(dataset, lengths, column), n_buckets=n_buckets, **settings))
    view.takes_seed = seed is None
    return view


class BucketedView(EpochView, torch.utils.data.Dataset[Any]):
    """A dataset in the order of a plan; ``buckets`` made it.

    With ``batch_size`` an item is an example, and ``batch_size`` neighbours are of similar length. With ``max_tokens``
    an item is a whole batch: a list of examples whose padded size stays within ``max_tokens``.
    """

    def __init__(self, dataset: Any, buckets: LengthBuckets | PackedRows) -> None:
        super().__init__(dataset)
        self.buckets: Any = buckets  # a plan of LengthBuckets or PackedRows
        if buckets.dropped:
            notify(logger, f"{buckets.dropped} of {len(buckets.lengths)} examples are too long and left out")
        self.has_whole_batches = buckets.batch_size is None
        self.reader = RowReader(dataset)
        self._as_columns = False  # hand a batch as columns to the collator, past stock's that takes rows apart
        self._planned: tuple[tuple[int, int, Any], EpochPlan] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": None}

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):  # as accelerate calls it of a dataset that is not viewed
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return int(self.buckets.n_batches if self.has_whole_batches else self.buckets.n_examples)

    def _checked(self, position: Any) -> int:
        return checked_position(position, len(self), "a batch" if self.has_whole_batches else "an example")

    def __getitem__(self, position: int) -> Any:
        rows = self.reader.read(*self._batch([self._checked(position)]))
        return rows if self.has_whole_batches else rows[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the items at consecutive positions; to our collator all as one, their columns.

        Raises:
            RuntimeError: the positions are out of order or more than a batch.
        """
        self._check_in_order(positions, most=self.buckets.batch_size or 1)
        examples, width = self._batch(positions)
        if self._as_columns:
            return [self.reader.read_columns(examples, width)]
        rows = self.reader.read(examples, width)
        return [rows] if self.has_whole_batches else rows

    def indices_of(self, positions: Sequence[int]) -> list[int]:
        """Return the dataset's indices of all examples in the items at ``positions`` of the current epoch."""
        return [int(index) for position in positions for index in self._batch([position])[0]]

    def _batch(self, positions: Sequence[int]) -> tuple[NDArray[np.int32], int | None]:
        """Return the dataset's indices of the examples at positions of one batch, and what they are padded to."""
        self.check_size(len(self.buckets.lengths), "bucketed(dataset, ...)")
        plan, found = self.plan, np.asarray(positions) % len(self)
        if self.has_whole_batches:
            batch = plan.batch(found[0])
            is_packed = isinstance(self.buckets, PackedRows)
            return self.buckets.examples[batch] if is_packed else batch, plan.width(found[0])
        numbers, within = np.divmod(found, self.buckets.batch_size or 1)
        batches = plan.sequence[numbers]
        width = None if plan.widths is None else int(plan.widths[batches].max())
        return plan.order[plan.starts[batches] + within], width

    @property
    def plan(self) -> EpochPlan:
        """The order of the current epoch."""
        epoch = self.epoch
        key, planned = (epoch, self.buckets.seed, self.buckets), self._planned
        if planned is None or planned[0] != key:
            self._planned = None  # the old order is not needed while the new one is made
            self._planned = planned = (key, self.buckets.plan(epoch))
        return planned[1]

    def _check_in_order(self, positions: Sequence[int], most: int) -> None:
        """Raise unless positions follow each other; they may start over, as where ranks are padded.

        Positions that are fetched one by one show no order: there only ``attach`` refuses the wrong strategy.
        """
        if len(positions) > most:
            group = f", or where it varies bucketed(dataset, batch_size={len(positions)})"
            larger = "" if self.has_whole_batches else f"{group} or recipe.replace(bucketing=False)"
            raise RuntimeError(
                f"positions=<{len(positions)} at once> are more than a batch of this view; expected at most {most}. "
                f"Pass TrainingArguments(..., per_device_train_batch_size={most}){larger}; with several GPUs launch "
                "one process per GPU: torchrun --nproc_per_node=<GPUs> your_script.py. A view is for training: to "
                "evaluate pass sorted_by_length(view.dataset)"
            )
        if any((after - before - 1) % len(self) != 0 for before, after in pairwise(positions)):
            raise RuntimeError(
                f"positions={list(positions[:4])!r} ... read a bucketed view out of order; expected one after the "
                'other, or the buckets are lost. Pass TrainingArguments(..., train_sampling_strategy="sequential"), or '
                "shuffle=False to a DataLoader"
            )

    # ---- Under a Trainer --------------------------------------------------------------------------------------------

    def check_evaluation(self, trainer: Any) -> NoReturn:
        """Raise ValueError: an order for training is not one for evaluation; an attached Trainer calls it."""
        raise ValueError(
            f"dataset=<{type(self).__name__}> is in shuffled order, and predictions would be in that order too; "
            "expected the dataset itself, or sorted by length. Evaluate or predict sorted_by_length(view.dataset)"
        )

    def keep_columns(self, names: Iterable[str] | None) -> None:
        """Read only these columns, None: all; an attached Trainer calls it when it makes its DataLoader."""
        self.reader.keep(names)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Fit the view to a Trainer, which reads it in order from now on; ``attach`` calls it.

        Raises:
            ValueError: the Trainer's arguments or collator do not fit the view.
        """
        pads = isinstance(self.buckets, LengthBuckets) and not self.buckets.pads_to_boundaries
        padded_to = self.buckets.pad_to_multiple_of if pads else None
        check_per_device(trainer, self.buckets.batch_size, padded_to=padded_to)
        if trainer.args.dataloader_drop_last and not self.has_whole_batches:
            notify(
                logger,
                "dataloader_drop_last=True leaves what fills no batch out of every epoch, and here that is always of "
                "the shortest examples; expected False. Pass TrainingArguments(..., dataloader_drop_last=False)",
            )
        check_world_size_of_run(trainer, self.buckets.world_size)
        packing = self._pack(trainer) if self.has_whole_batches else undo_all()
        try:
            seed = take_seed(trainer, self.buckets, may_change=self.takes_seed)
        except ValueError:
            packing.remove()
            raise
        if self.has_whole_batches:
            tell_what_a_sample_is(trainer)
            self._tell_of_labels(trainer)
        as_columns = share_attribute(self, "_as_columns", takes_columns(trainer.data_collator), trainer)
        read = read_in_order(trainer), warn_of_other_batches(trainer, self), share_attribute(self, "is_bound", True)
        return undo_all(packing, seed, as_columns, *read)

    def _tell_of_labels(self, trainer: Trainer) -> None:
        """Notify where the labels of an encoder-decoder, which ``max_tokens`` does not count, exceed it."""
        source, buckets = self.dataset, self.buckets
        kind = getattr(source, "format", None)
        is_read_fast = isinstance(source, list) or (isinstance(kind, dict) and kind.get("type", "custom") != "custom")
        if not (is_read_fast and isinstance(buckets, LengthBuckets) and has_decoder(cast(Any, trainer.model))):
            return
        with suppress(IndexError, TypeError, ValueError):  # where they are not one list for each row
            labels, plan = token_lengths(source, "labels"), self.plan
            most = int((np.diff(plan.starts) * np.maximum.reduceat(labels[plan.order], plan.starts[:-1])).max())
            if most > (buckets.max_tokens or 0):
                notify(
                    logger,
                    f"max_tokens={buckets.max_tokens} counts what the encoder reads, and the decoder has {most} padded "
                    "tokens in a batch; expected the longer side counted. Pass bucketed(..., lengths=numpy.maximum("
                    "token_lengths(dataset), token_lengths(dataset, 'labels')))",
                )

    def _pack(self, trainer: Trainer) -> UndoHandle:
        """Plan the batches by their tokens alone if the Trainer's collator pads nothing, else by their padded size."""
        buckets = self.buckets
        if not is_padding_free(trainer):  # but another Trainer of this view may pad nothing
            return share_attribute(self, "buckets", getattr(buckets, "padded", buckets), trainer)
        packed = buckets if isinstance(buckets, PackedRows) else _packed_rows(buckets)
        reason = "a batch without padding costs its tokens, so texts of all lengths share one"
        record_changes(trainer, [Change("what max_tokens limits", "rows x longest row", "sum of lengths", reason)])
        return share_attribute(self, "buckets", packed, trainer)


def _packed_rows(buckets: LengthBuckets) -> PackedRows:
    """Return the plan by the sum of lengths with the settings of length buckets, which it knows as ``padded``."""
    if buckets.pads_to_boundaries:
        raise ValueError(
            f"boundaries={buckets.boundaries.tolist()} are what batches are padded to, and these batches have "
            "no padding; expected none. Leave boundaries out of bucketed(...)"
        )
    settings: Any = {name: getattr(buckets, name) for name in ("too_long", "seed", "world_size")}
    packed = PackedRows(buckets.lengths, row_tokens=buckets.max_tokens or 0, **settings)
    packed.padded = buckets
    return packed
