"""What the views ask of a ``Trainer``: arguments that fit them, a sequential order, one seed for the order."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.handles import UndoHandle, share_attribute, undo_all
from hf_memopt.changes import Change, record_changes

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

__all__ = [
    "check_per_device",
    "check_rank_of_run",
    "check_world_size_of_run",
    "flattens_batches",
    "is_padding_free",
    "read_in_order",
    "take_seed",
]


def check_world_size_of_run(trainer: Trainer, world_size: int, of: str) -> None:
    """Raise ValueError where the run has another number of processes than the view was built for."""
    if trainer.args.world_size != world_size:
        raise ValueError(
            f"world_size={world_size} of the {of} differs from the run's {trainer.args.world_size}; expected the same. "
            f"Build it in the launched script, or pass bucketed(..., world_size={trainer.args.world_size})"
        )


def check_rank_of_run(trainer: Trainer, rank: int) -> None:
    """Raise ValueError where a stream is that of another process than this one."""
    if trainer.args.process_index != rank:
        raise ValueError(
            f"rank={rank} of the bucketed stream is not this process's {trainer.args.process_index}, so the share of "
            "one process would be read twice; expected the rank of the run. "
            'Pass bucketed(..., rank=int(os.environ["RANK"]))'
        )


def check_per_device(trainer: Trainer, batch_size: int | None, of: str) -> None:
    """Raise ValueError where the Trainer's batches would mix buckets; ``batch_size`` None: items are whole batches."""
    per_device = trainer.args.per_device_train_batch_size
    if batch_size is not None:
        if batch_size % per_device != 0:
            raise ValueError(
                f"per_device_train_batch_size={per_device} does not divide the {of}'s batch_size={batch_size}; "
                f"expected a divisor. Pass bucketed(..., batch_size={per_device})"
            )
        return
    if per_device != 1:
        raise ValueError(
            f"per_device_train_batch_size={per_device} would join whole batches of the max_tokens view; expected "
            "1. Pass TrainingArguments(..., per_device_train_batch_size=1)"
        )
    if not flattens_batches(trainer):
        name = type(trainer.data_collator).__name__
        given = f"inner={name}()" if name == "DataCollatorWithFlattening" else "tokenizer"
        raise ValueError(
            f"data_collator=<{name}> cannot flatten the whole batches of the max_tokens view; expected "
            f"BucketedCollator. Pass Trainer(..., data_collator=BucketedCollator({given}))"
        )


def flattens_batches(trainer: Trainer) -> bool:
    """Return whether the Trainer's collator takes an item that is a whole batch."""
    from hf_memopt.batching.collation.collators import BucketedCollator  # imports transformers, which a view need not

    return isinstance(trainer.data_collator, BucketedCollator)


def is_padding_free(trainer: Trainer) -> bool:
    """Return whether the Trainer's collator joins the texts of a batch into one row, without padding."""
    return flattens_batches(trainer) and bool(getattr(trainer.data_collator, "is_padding_free", False))


def read_in_order(trainer: Trainer) -> UndoHandle:
    """Set ``train_sampling_strategy="sequential"``, as a view brings its own shuffled order; record the change."""
    args = trainer.args
    if args.train_sampling_strategy == "sequential":
        return undo_all()
    reason = "the bucketed view brings its own shuffled order, grouped by length"
    record_changes(trainer, [Change("train_sampling_strategy", args.train_sampling_strategy, "sequential", reason)])
    trainer.args = own = _in_order(trainer)

    def undo() -> None:
        if trainer.args is own:
            trainer.args = args

    return UndoHandle(undo)


def _restored(kind: type[TrainingArguments], values: dict[str, Any]) -> TrainingArguments:
    arguments: TrainingArguments = object.__new__(kind)
    vars(arguments).update(values)
    return arguments


def _in_order(trainer: Trainer) -> TrainingArguments:
    """Return the trainer's arguments with ``train_sampling_strategy="sequential"`` while it reads a bucketed view.

    Another Trainer may have the same arguments, and has to shuffle. So it is not the value that changes: the result is
    a second object over the same values, whose class reads this one as "sequential". What is set in either is set in
    both. A copy or a pickle (``training_args.bin``) is of the original class.
    """
    args, name, reference = trainer.args, "train_sampling_strategy", weakref.ref(trainer)

    def read(self: TrainingArguments) -> Any:
        owner = reference()
        has_view = owner is not None and getattr(owner.train_dataset, "technique", None) == "length buckets"
        return "sequential" if has_view else vars(self)[name]

    def write(self: TrainingArguments, value: Any) -> None:
        vars(self)[name] = value

    def reduce(self: TrainingArguments, protocol: Any) -> Any:
        return _restored, (type(args), {**vars(self), name: read(self)})

    kind = type(type(args).__name__, (type(args),), {name: property(read, write), "__reduce_ex__": reduce})
    own: TrainingArguments = object.__new__(kind)
    own.__dict__ = vars(args)
    return own


def take_seed(trainer: Trainer, owner: Any, *, may_change: bool, of: str) -> UndoHandle:
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
            f"seed={seed} of the {of} differs from data_seed={wanted} of the training arguments; expected one seed for "
            "the order of the data. Leave seed out of bucketed(...)"
        )
    if wanted != seed:
        record_changes(trainer, [Change(f"seed of the {of}", seed, wanted, f"that of TrainingArguments({name}=...)")])
    return share_attribute(owner, "seed", wanted)
