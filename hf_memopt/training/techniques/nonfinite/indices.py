"""Find the examples of the dataset that are being trained on, from public facts alone and without reading any.

The order of an epoch is a pure function of the sampler's seed and the epoch, so a copy of the sampler repeats it; the
run's own sampler and its generators are not touched. It costs one shuffle of the dataset's indices: meant for a report,
not for every step.
"""

from __future__ import annotations

import copy
import inspect
from itertools import islice
from math import isclose
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import Trainer

COPIES_HAVE_THE_EPOCH = "iteration" in inspect.signature(DataLoaderShard.__init__).parameters


def example_indices(trainer: Trainer, window_position: int) -> tuple[int, ...] | None:
    """Return the dataset indices of the rows in an accumulation step of this process, in their order.

    Args:
        trainer: a Trainer within ``training_step``.
        window_position: the accumulation step since the last optimizer step, counted from 0.

    Returns:
        Indices into ``trainer.train_dataset``; of a bucketed view, into the dataset under it. None where they cannot be
        known: streams, samplers that draw from the global generator (``group_by_length``,
        ``use_seedable_sampler=False``) or that are the user's own, ``dispatch_batches``, ``ignore_data_skip``, epochs
        after one that a callback cut short, and the epoch in which several processes were resumed, or one process with
        accelerate before 1.15, which goes on in the order of the first epoch.
    """
    loader = trainer.callback_handler.train_dataloader
    if not isinstance(loader, DataLoaderShard) or trainer.args.ignore_data_skip:
        return None
    window = trainer.args.gradient_accumulation_steps
    steps_per_epoch = -(-len(loader) // window)
    epoch, step = divmod(trainer.state.global_step, steps_per_epoch)
    # after a resume a copy of the loader is read, which has the epoch from accelerate 1.15 on
    is_resumed = loader.iteration == 0 and trainer.args.world_size == 1 and COPIES_HAVE_THE_EPOCH
    epochs_read = epoch + step * window / len(loader)
    if (loader.iteration != epoch and not is_resumed) or not isclose(trainer.state.epoch or 0, epochs_read):
        return None
    batches = _copy_of(loader.batch_sampler, epoch)
    if batches is None:
        return None
    position = step * window + window_position
    rows = next(islice(batches, position, None), None)
    indices_of = getattr(loader.dataset, "indices_of", tuple)  # a view's: of the dataset under it
    return None if rows is None else tuple(indices_of(rows))


def _copy_of(sampler: Any, epoch: int) -> Any:
    """Return a copy of a batch sampler, or of a sampler in it, that yields the order of an epoch; None if unknown."""
    copied = copy.copy(sampler)
    if type(sampler) is SequentialSampler:
        return copied
    if type(sampler) is SeedableRandomSampler:
        if sampler.epoch not in (epoch, epoch + 1):  # it is one ahead once all of it was read
            return None
        copied.generator = None if sampler.generator is None else torch.Generator(sampler.generator.device)
        copied.set_epoch(epoch)
        return copied
    inner = {BatchSampler: "sampler", BatchSamplerShard: "batch_sampler"}.get(type(sampler))
    if inner is None:
        return None
    inner_copy = _copy_of(getattr(sampler, inner), epoch)
    setattr(copied, inner, inner_copy)
    return None if inner_copy is None else copied
