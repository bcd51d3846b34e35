"""What all views share: the descriptions of their dataset, and what they ask of a ``Trainer``.

That is arguments that fit them, DataLoaders that read from front to back, and one seed for the order.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from hf_memopt.changes import Change, record_changes
from hf_memopt.notices import notify
from hf_memopt.training.binding.first_use import calling_trainer
from hf_memopt.training.binding.undo import (
    UndoHandle,
    is_overridden,
    nothing_to_undo,
    override_method,
    set_attribute,
    share_attribute,
    undo_all,
)

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

DESCRIPTIONS = {"builder_name", "citation", "column_names", "config_name", "dataset_size"}
DESCRIPTIONS |= {"description", "download_checksums", "download_size", "features", "homepage"}
DESCRIPTIONS |= {"info", "license", "size_in_bytes", "split", "version"}
"""The properties of a ``datasets.Dataset`` that hold for its rows in any order (datasets 3.0 to 5.2)."""
READS_IN_ORDER, OTHER_BATCHES = "reads in order", "other batches"  # purposes of overrides


class DescribedByDataset:
    """Answer ``column_names``, ``features``, ``info`` and the like as ``self.dataset`` does, if it does."""

    dataset: Any
    made_by = "bucketed"  # by this function, in errors

    def check_size(self, size: int, build: str) -> None:
        """Raise RuntimeError where rows were added to the dataset, or taken, since the view was built."""
        if len(self.dataset) != size:
            raise RuntimeError(
                f"dataset=<{len(self.dataset)} examples> had {size} when the view was built; expected the same. "
                f"Build the view again: {build}"
            )

    def __getattr__(self, name: str) -> Any:
        if name in DESCRIPTIONS:
            return getattr(vars(self)["dataset"], name)
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and callable(getattr(vars(self).get("dataset"), name, None)):
            message += (
                ": a view is read as it is; expected its dataset to be changed before. "
                f"Call: {self.made_by}(dataset.{name}(...), ...)"
            )
        raise AttributeError(message)


class SharedEpoch:
    """The epoch, in memory that a view shares with its copies in forked and spawned DataLoader workers."""

    def __init__(self) -> None:
        self.__setstate__(torch.zeros(1, dtype=torch.int64))

    def __getstate__(self) -> torch.Tensor:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().share_memory_()  # a copy or a plain pickle is private memory
        self.tensor = tensor
        self.values: NDArray[Any] = tensor.numpy()


class EpochView(DescribedByDataset):
    """A view for training, in another order every epoch.

    Attributes:
        dataset: what is viewed.
        takes_seed: whether ``attach`` may set the seed, since none was given.
        technique: the name by which ``attach`` knows what it cannot be used with.
    """

    technique = "length buckets"
    is_bound = False  # to a Trainer

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.takes_seed = False
        self._was_named = False  # as read by a Trainer that is not attached
        self._shared = SharedEpoch()  # the workers of a persistent DataLoader see a new one

    @property
    def epoch(self) -> int:
        """The epoch whose order the view shows."""
        return int(self._shared.values[0])

    def set_epoch(self, epoch: int) -> None:
        """Show the order of an epoch, counted from 0; the Trainer and accelerate call it, more than once an epoch."""
        self._shared.values[0] = epoch
        if self.is_bound or self._was_named:
            return
        if calling_trainer(lambda trainer: trainer.train_dataset is self) is not None:
            self._was_named = True
            notify(
                logger,
                f"{type(self).__name__} is read by a Trainer that is not attached: its order, batch size and seed are "
                "not checked. Call attach(trainer) before trainer.train(), with: from hf_memopt import attach",
            )


def check_world_size_of_run(trainer: Trainer, world_size: int) -> None:
    """Raise ValueError where the run has another number of processes than the view was built for."""
    if trainer.args.world_size != world_size:
        raise ValueError(
            f"world_size={world_size} of the bucketed view differs from the run's {trainer.args.world_size}; expected "
            f"the same. Build it in the launched script, or pass bucketed(..., world_size={trainer.args.world_size})"
        )


def check_per_device(trainer: Trainer, batch_size: int | None, padded_to: int | None = None) -> None:
    """Raise ValueError where the Trainer's batches would mix buckets; ``batch_size`` None: items are whole batches.

    ``padded_to`` is the multiple in which a view counts the padded tokens of a batch; None where it asks for a width.
    """
    per_device = trainer.args.per_device_train_batch_size
    if batch_size is not None:
        if batch_size % per_device != 0:
            raise ValueError(
                f"per_device_train_batch_size={per_device} does not divide the bucketed view's batch_size="
                f"{batch_size}; expected a divisor. Pass bucketed(..., batch_size={per_device})"
            )
        return
    if per_device != 1:
        raise ValueError(
            f"per_device_train_batch_size={per_device} would join items that are whole batches; expected 1. "
            "Pass TrainingArguments(..., per_device_train_batch_size=1)"
        )
    if not flattens_batches(trainer.data_collator):
        name = type(trainer.data_collator).__name__
        given = f"inner={name}()" if name == "DataCollatorWithFlattening" else "tokenizer"
        raise ValueError(
            f"data_collator=<{name}> cannot flatten items that are whole batches; expected "
            f"BucketedCollator. Pass Trainer(..., data_collator=BucketedCollator({given}))"
        )
    pads = getattr(trainer.data_collator, "inner", None) or trainer.data_collator
    multiple = getattr(pads, "pad_to_multiple_of", None) or 1
    if padded_to is not None and padded_to % multiple and not is_padding_free(trainer):
        raise ValueError(
            f"pad_to_multiple_of={multiple} of the collator pads batches beyond max_tokens, which the bucketed "
            f"view counts in multiples of {padded_to}; expected a multiple of {multiple}. Pass bucketed(..., "
            f"pad_to_multiple_of={multiple})"
        )


def tell_what_a_sample_is(trainer: Trainer) -> None:
    """Record that the Trainer's log counts whole batches."""
    reason = "an item of a max_tokens= view is a whole batch"
    record_changes(trainer, [Change("samples in the Trainer's log", "examples", "batches", reason)])


def flattens_batches(collator: Any) -> bool:
    """Return whether a collator, or the one in stock's that removes columns, takes an item that is a whole batch."""
    from hf_memopt.training.batching.collation import BucketedCollator  # imports transformers, which a view need not

    return isinstance(getattr(collator, "data_collator", collator), BucketedCollator)


def takes_columns(collator: Any) -> bool:
    """Return whether such a collator takes the columns of a batch instead of its rows."""
    from hf_memopt.training.batching.collation import BucketedCollator

    collator = getattr(collator, "data_collator", collator)
    return flattens_batches(collator) and type(collator).__call__ is BucketedCollator.__call__ and not collator.inner


def is_padding_free(trainer: Trainer) -> bool:
    """Return whether the Trainer's collator joins the texts of a batch into one row, without padding."""
    return bool(getattr(trainer.data_collator, "is_padding_free", False))


def read_in_order(trainer: Trainer) -> UndoHandle:
    """Let a trainer make its DataLoaders with ``train_sampling_strategy="sequential"``; record the change.

    A view brings its own shuffled order. The arguments are as before once a DataLoader is made, since another Trainer
    may have the same ones; where the trainer gets another training set, nothing is changed.
    """
    args, name = trainer.args, "train_sampling_strategy"
    if args.train_sampling_strategy == "sequential" or reads_in_order(trainer):
        return undo_all()
    reason = "the bucketed view brings its own shuffled order, grouped by length"
    record_changes(trainer, [Change(name, args.train_sampling_strategy, "sequential", reason)])

    def get_dataloader(before: Callable[..., Any], *given: Any, **named: Any) -> Any:
        has_view = getattr(trainer.train_dataset, "technique", None) == "length buckets"
        with set_attribute(trainer.args, name, "sequential") if has_view else nothing_to_undo():
            return before(*given, **named)

    methods = ("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader")
    return undo_all(*(override_method(trainer, method, get_dataloader, purpose=READS_IN_ORDER) for method in methods))


def reads_in_order(trainer: Trainer) -> bool:
    """Return whether a trainer reads in order although its arguments say otherwise."""
    return is_overridden(trainer, "get_train_dataloader", READS_IN_ORDER)


def warn_of_other_batches(trainer: Trainer, view: Any) -> UndoHandle:
    """Warn where a run goes on within an epoch whose order was another: batches of another size are cut otherwise."""
    batch_size = view.buckets.batch_size
    from transformers import TrainerState
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import get_last_checkpoint

    if is_overridden(trainer, "train", OTHER_BATCHES):
        return undo_all()

    def train(before: Callable[..., Any], *given: Any, **named: Any) -> Any:
        args, asked = trainer.args, given[0] if given else named.get("resume_from_checkpoint")
        if asked is True:
            asked = get_last_checkpoint(args.output_dir or "")  # type: ignore[no-untyped-call]
        file = Path(asked, TRAINER_STATE_NAME) if asked and not args.ignore_data_skip else None
        if file is not None and file.is_file():
            state = TrainerState.load_from_json(str(file))
            found = _other_epoch(args, view, state) if batch_size is None else _other_size(args, batch_size, state)
            if found:
                warnings.warn(found, stacklevel=2)
        return before(*given, **named)

    return override_method(trainer, "train", train, purpose=OTHER_BATCHES)


def _other_epoch(args: TrainingArguments, view: Any, state: TrainerState) -> str:
    """Return what to say where the step of a checkpoint would end at another epoch with a view of whole batches."""
    filled = len(view) + (0 if args.dataloader_drop_last else args.world_size - 1)
    batches, accumulation = max(filled // args.world_size, 1), args.gradient_accumulation_steps
    steps = max(-(-batches // accumulation), 1)
    # as stock counts it, of the batches that a process takes in each epoch
    epoch = state.global_step // steps + state.global_step % steps * accumulation / batches
    if math.isclose(epoch, state.epoch or 0, rel_tol=1e-6):
        return ""
    return (
        f"step {state.global_step} of the checkpoint ends at epoch {state.epoch or 0:.6g}, and at {epoch:.6g} with the "
        f"{len(view)} batches of {view.made_by}(...): the rest of this epoch repeats examples and lacks others; "
        "expected the view and gradient_accumulation_steps of the first run. "
        f"Build {view.made_by}(...) with the same settings and data"
    )


def _other_size(args: TrainingArguments, batch_size: int, state: TrainerState) -> str:
    """Return what to say where a checkpoint within an epoch is of another batch size.

    The view's own is in no checkpoint: a multiple of both sizes may have been the same then.
    """
    now, then = args.per_device_train_batch_size, state.train_batch_size
    is_within = (state.epoch or 0) % 1 > 0
    if not is_within or then in (None, 0, now) or (batch_size % then == 0 and batch_size != now):
        return ""
    action = "bucketed(..., batch_size=" if then % now == 0 else "TrainingArguments(..., per_device_train_batch_size="
    but = "" if batch_size % then else f", unless it had batch_size={batch_size} then"
    return (
        f"per_device_train_batch_size={now} differs from the checkpoint's {then}, and so does the order of the "
        f"bucketed view{but}: the rest of this epoch repeats examples and lacks others; expected the view of the first "
        f"run. Pass {action}{then})"
    )


def take_seed(trainer: Trainer, owner: Any, *, may_change: bool) -> UndoHandle:
    """Give ``owner.seed``, that of an order, the value that the training arguments have for it; record the change.

    Raises:
        ValueError: the order has a seed of its own, and ``data_seed`` is another one.
    """
    args, seed = trainer.args, owner.seed
    name = "seed" if args.data_seed is None else "data_seed"
    wanted = getattr(args, name)
    if not may_change:
        if name == "seed" or wanted == seed:
            return undo_all()
        raise ValueError(
            f"seed={seed} of the bucketed view differs from data_seed={wanted} of the training arguments; expected one "
            "seed for the order of the data. Leave seed out of bucketed(...)"
        )
    if wanted != seed:
        record_changes(
            trainer, [Change("seed of the bucketed view", seed, wanted, f"that of TrainingArguments({name}=...)")]
        )
    return share_attribute(owner, "seed", wanted, trainer)
