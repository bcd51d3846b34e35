"""Views that bring a length-bucketed order to the stock ``Trainer``, which reads them from front to back.

``batch_size=``: an item is an example and ``batch_size`` neighbours form a batch; every number of the Trainer keeps its
stock meaning. ``max_tokens=``: an item is a whole batch (a list of examples), to be read with
``per_device_train_batch_size=1`` and flattened by ``BucketedCollator``. The order is a pure function of (seed, epoch),
so a resumed run sees the very batches of the straight run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_memopt.batching.buckets import EpochPlan, LengthBuckets, check_batch_limits
from hf_memopt.batching.lengths import token_lengths

__all__ = ["BucketedBatches", "BucketedExamples", "bucketed"]

IN_ORDER = 'TrainingArguments(..., train_sampling_strategy="sequential")'


def bucketed(
    dataset: Any,
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    n_buckets: int | Literal["auto"] = "auto",
    seed: int = 0,
    lengths: ArrayLike | None = None,
    column: str = "input_ids",
    world_size: int | None = None,
    pad_to_multiple_of: int = 8,
) -> BucketedExamples | BucketedBatches:
    """Return a view of a map-style dataset in length-bucketed order, reshuffled every epoch.

    Read it in order: ``TrainingArguments(train_sampling_strategy="sequential")``, or a DataLoader without shuffle.

    Args:
        dataset: a ``datasets.Dataset`` or anything with ``__len__`` and ``__getitem__``; it is not copied.
        batch_size: examples per batch: a multiple of ``per_device_train_batch_size``; or
        max_tokens: padded tokens per batch, with ``per_device_train_batch_size=1``.
        n_buckets: see ``LengthBuckets``.
        seed: as in ``TrainingArguments(data_seed=...)``.
        lengths: tokens per example, shape (examples,); read by ``token_lengths(dataset, column)`` unless given.
        column: the column whose length counts.
        world_size: processes that share the view; from the environment of torchrun unless given.
        pad_to_multiple_of: as in the collator.

    Raises:
        ValueError: a size below 1, both or neither of ``batch_size`` and ``max_tokens``, an empty dataset, one without
            the column, lengths that are not one per example, an example that does not fit into ``max_tokens``.
        TypeError: the dataset is not map-style.
    """
    check_batch_limits(batch_size, max_tokens)
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)  # it inherits a __getitem__ that only raises
    if is_stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"dataset=<{type(dataset).__name__}> cannot be indexed; expected a map-style dataset with __len__ and "
            "__getitem__. Load it without streaming=True"
        )
    found = token_lengths(dataset, column) if lengths is None else np.asarray(lengths)
    if found.shape != (len(dataset),):
        raise ValueError(
            f"lengths=<array of shape {found.shape}> does not belong to a dataset of {len(dataset)} examples; expected "
            "one length per example. Leave lengths out, or pass token_lengths(dataset)"
        )
    buckets = LengthBuckets(
        found,
        batch_size=batch_size,
        max_tokens=max_tokens,
        n_buckets=n_buckets,
        seed=seed,
        world_size=int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    return BucketedExamples(dataset, buckets) if max_tokens is None else BucketedBatches(dataset, buckets)


class _BucketedView(torch.utils.data.Dataset[Any]):
    """What both views share: the epoch, the plan made from it, and the guard against reading out of order."""

    def __init__(self, dataset: Any, buckets: LengthBuckets) -> None:
        self.dataset = dataset
        self.buckets = buckets
        # In shared memory, so that the workers of a persistent DataLoader see a new epoch.
        self._epoch: torch.Tensor = torch.zeros(1, dtype=torch.int64)
        self._epoch.untyped_storage().share_memory_()
        self._planned: tuple[int, EpochPlan] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch.untyped_storage().share_memory_()  # a copy or a plain pickle is private memory

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch whose order the view shows."""
        return int(self._epoch[0])

    def set_epoch(self, epoch: int) -> None:
        """Show the order of an epoch, counted from 0; the Trainer and accelerate call it, more than once an epoch."""
        self._epoch[0] = epoch

    @property
    def plan(self) -> EpochPlan:
        """The order of the current epoch."""
        epoch = self.epoch
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self.buckets.plan(epoch))
        return self._planned[1]

    def _rows(self, indices: Sequence[int]) -> list[Any]:
        if len(self.dataset) != len(self.buckets.lengths):
            raise RuntimeError(
                f"dataset=<{len(self.dataset)} examples> had {len(self.buckets.lengths)} when the view was built; "
                "expected the same. Build the view again: bucketed(dataset, ...)"
            )
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(indices)) if fetch is not None else [self.dataset[i] for i in indices]

    def _check_in_order(self, positions: Sequence[int], most: int) -> None:
        """Raise unless the positions follow each other; at the end they may start over, as padding the ranks does.

        Positions that are fetched one by one show no order: there only ``attach`` refuses the wrong strategy.
        """
        if len(positions) > most:
            raise RuntimeError(
                f"positions=<{len(positions)} at once> are more than a batch of this view; expected at most {most}. "
                f"Pass TrainingArguments(..., per_device_train_batch_size={most}); with several GPUs launch one "
                "process per GPU: torchrun --nproc_per_node=<GPUs> your_script.py"
            )
        for before, after in pairwise(positions):
            if (after - before - 1) % len(self) != 0:
                raise RuntimeError(
                    f"positions={list(positions[:4])!r} ... read a bucketed view out of order; expected one after the "
                    f"other, or the buckets are lost. Pass {IN_ORDER}, or shuffle=False to a DataLoader"
                )

    def _check_trainer_arguments(self, trainer: Any) -> None:
        args = trainer.args
        if isinstance(trainer.eval_dataset, _BucketedView):
            raise ValueError(
                f"eval_dataset=<{type(trainer.eval_dataset).__name__}> is in bucketed order, and so would the "
                "predictions be; expected the dataset itself. Pass Trainer(..., eval_dataset=view.dataset)"
            )
        if args.train_sampling_strategy != "sequential":
            raise ValueError(
                f"train_sampling_strategy={args.train_sampling_strategy!r} would read the bucketed view out of order; "
                f'expected "sequential", since the view brings its own shuffled order. Pass {IN_ORDER}'
            )
        if args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True would shrink the batches that the bucketed view was built for; expected "
                "False. Pass TrainingArguments(..., auto_find_batch_size=False)"
            )
        if args.world_size != self.buckets.world_size:
            raise ValueError(
                f"world_size={self.buckets.world_size} of the bucketed view differs from the run's {args.world_size}; "
                "expected the same. Build it in the launched script, or pass bucketed(..., "
                f"world_size={args.world_size})"
            )


class BucketedExamples(_BucketedView):
    """An item is an example; ``batch_size`` neighbours are of similar length."""

    def __len__(self) -> int:
        return len(self.buckets.lengths)

    def __getitem__(self, position: int) -> Any:
        return self._rows([int(self.plan.order[position])])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the examples at consecutive positions.

        Raises:
            RuntimeError: the positions are out of order or more than a batch.
        """
        self._check_in_order(positions, most=self.buckets.batch_size or 1)
        return self._rows(self.plan.order[np.asarray(positions)].tolist())

    def check_trainer(self, trainer: Any) -> None:
        """Raise ValueError where the Trainer's arguments would spoil the order; ``attach`` calls it."""
        self._check_trainer_arguments(trainer)
        per_device, of_view = trainer.args.per_device_train_batch_size, self.buckets.batch_size or 1
        if of_view % per_device != 0:
            raise ValueError(
                f"per_device_train_batch_size={per_device} does not divide the bucketed view's batch_size={of_view}; "
                f"expected a divisor. Pass bucketed(..., batch_size={per_device})"
            )


class BucketedBatches(_BucketedView):
    """An item is a whole batch: a list of examples whose padded size stays within ``max_tokens``."""

    def __len__(self) -> int:
        return self.buckets.n_batches

    def __getitem__(self, position: int) -> list[Any]:
        if not -len(self) <= position < len(self):
            raise IndexError(f"position={position} is not a batch of this view; expected 0 to {len(self) - 1}")
        return self._rows(self.plan.batch(position % len(self)).tolist())

    def __getitems__(self, positions: Sequence[int]) -> list[list[Any]]:
        """Return the batches at consecutive positions.

        Raises:
            RuntimeError: the positions are out of order or more than one.
        """
        self._check_in_order(positions, most=1)
        return [self[position] for position in positions]

    def check_trainer(self, trainer: Any) -> None:
        """Raise ValueError where the Trainer's arguments or collator do not fit whole batches; ``attach`` calls it."""
        from hf_memopt.batching.collators import BucketedCollator

        self._check_trainer_arguments(trainer)
        per_device = trainer.args.per_device_train_batch_size
        if per_device != 1:
            raise ValueError(
                f"per_device_train_batch_size={per_device} would join whole batches of the max_tokens view; expected "
                "1. Pass TrainingArguments(..., per_device_train_batch_size=1)"
            )
        if not isinstance(trainer.data_collator, BucketedCollator):
            raise ValueError(
                f"data_collator=<{type(trainer.data_collator).__name__}> cannot flatten the whole batches of the "
                "max_tokens view; expected BucketedCollator. Pass Trainer(..., "
                "data_collator=BucketedCollator(tokenizer))"
            )
