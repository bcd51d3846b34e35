"""Run a batch whose loss is a known sum or mean over rows in whole micro-batches, forward and backward one by one.

Padding that a micro-batch does not need is cut off, unless the loss of a row differs with it (``padding_check``). What
a loss calls may have been exchanged, so that of the first batch of each kind, and of one step in 200, is compared with
that of its parts: forward alone, the price of two forward passes.

Between processes under DDP gradients are shared in the backward pass of the last micro-batch alone.

"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.training.binding.losses import KnownLoss, observed_hooks
from hf_memopt.training.binding.trials import is_narrow, row_count, untraced
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.training.techniques.microbatching.accumulation_step import (
    SMALLEST,
    AccumulationStep,
    loss_of,
)
from hf_memopt.training.techniques.microbatching.backbones import CHECKED_STEPS
from hf_memopt.training.techniques.microbatching.limits import Limit, are_set
from hf_memopt.training.techniques.microbatching.module_call import DRAWS, code_of, settings_of
from hf_memopt.training.techniques.microbatching.padding_check import Padding
from hf_memopt.training.techniques.microbatching.splitting import (
    cut,
    decoder_lengths,
    row_lengths,
    take_rows,
    tensors_by_name,
)


class OtherLossError(Exception):
    """The loss of a batch is not made of those of its parts as its source says."""


class WholeMicroBatches:
    """Runs batches in micro-batches within limits, each with its weight."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._limits = limits
        self.rows: list[int] = []  # of the micro-batch that runs, or ran last
        self.are_shared = False  # gradients of this batch were sent to other processes
        self.padding = Padding()
        self.compared: set[Any] = set()  # kinds of batches whose loss was compared with those of its parts
        self._draw = random.Random(0)  # of its own: nobody else's numbers are drawn
        self._weight = 1.0
        self._share_gradients: Callable[[], None] | None = None

    def compute_loss(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Multiply the loss by the weight of the current micro-batch."""
        loss = before(*args, **kwargs)
        if self._share_gradients is not None:
            self._share_gradients()
        if self._weight == 1.0:
            return loss
        return (loss[0] * self._weight, *loss[1:]) if isinstance(loss, tuple) else loss * self._weight

    def run(self, trainer: Any, step: AccumulationStep, loss: KnownLoss, *, syncs: bool) -> tuple[torch.Tensor, bool]:
        """Run an accumulation step; return the sum of the losses, and whether the batch was split. The last micro-batch
        shares its gradients where ``syncs``.
        """
        self.rows = [0]  # what fails before any of them runs, with few rows, is not helped by smaller ones
        micro_batches = self._split(trainer, step, loss)
        is_split, losses = len(micro_batches) > 1, []
        try:
            with observed_hooks(trainer.model) if is_split else nullcontext():
                for number, (self.rows, self._weight) in enumerate(micro_batches, 1):
                    taken = step.inputs
                    if are_set(self._limits):
                        taken = take_rows(step.inputs, self.rows, keeps_padding=self.padding.is_kept)
                    shares = syncs and number == len(micro_batches)
                    with self._without_sync(trainer, step.model, shares=shares):
                        losses.append(step.call(trainer, taken))
                    del taken
        finally:
            self._weight = 1.0
        return sum(losses[1:], losses[0]), is_split

    def _split(self, trainer: Any, step: AccumulationStep, loss: KnownLoss) -> list[tuple[list[int], float]]:
        """Return the rows of each micro-batch of an accumulation step, and their part of its loss."""
        if are_set(self._limits):
            self.padding.check(trainer, step, loss)
        groups = groups_of(step.inputs, self._limits, keeps_padding=self.padding.is_kept)
        if len(groups) == 1:
            return [(groups[0], 1.0)]
        weights = loss.row_weights(step.inputs)
        self._compare(trainer, step, loss, groups)
        if weights is None:  # losses add up
            return [(rows, 1.0) for rows in groups]
        kept = ([row for row in rows if weights[row]] for rows in groups)  # a mean over nothing would be 0 / 0
        return [(rows, sum(weights[row] for row in rows)) for rows in kept if rows]

    def _compare(self, trainer: Any, step: AccumulationStep, loss: KnownLoss, groups: list[list[int]]) -> None:
        """Compare the loss of a batch of a new kind, and in some steps of any, with those of its parts."""
        flags = ((name, code_of(value)) for name, value in tensors_by_name(step.inputs) if value.dim() < 2)
        kind = self.padding.is_kept, *step.inputs, *flags, settings_of(step.model)
        if self._draw.random() < CHECKED_STEPS or kind not in self.compared:
            compare_with_parts(trainer, step, loss, groups, self.padding.is_kept)
            self.compared.add(kind)

    @contextmanager
    def _without_sync(self, trainer: Any, model: nn.Module, *, shares: bool) -> Iterator[None]:
        """Keep the gradients of a micro-batch in this process, or share them where ``shares``.

        DDP shares gradients within the backward pass, but decides on that in the forward pass. A process that runs out
        of memory in between would leave the others waiting, so sharing is switched on only once the forward pass and
        the loss are done: ``trigger_sync_in_backward``.
        """
        if trainer.args.world_size == 1:
            yield
        elif shares and not isinstance(model, DistributedDataParallel):  # torch.compile around DDP
            self.are_shared = True
            yield
        else:
            with trainer.accelerator.no_sync(model), ExitStack() as stack:

                def share() -> None:
                    self.are_shared = True
                    stack.enter_context(trainer.accelerator.trigger_sync_in_backward(model))

                self._share_gradients = share if shares else None
                try:
                    yield
                finally:
                    self._share_gradients = None


def groups_of(inputs: Mapping[str, Any], limits: Mapping[str, Limit], *, keeps_padding: bool) -> list[list[int]]:
    """Return the rows of each micro-batch of a batch; of a single one all of them in their order."""
    every_row = list(range(row_count(inputs)))
    if not are_set(limits):
        return [every_row]
    most = {name: limit.limit for name, limit in limits.items()}
    lengths = row_lengths(inputs, keeps_padding=keeps_padding)
    if lengths is None:
        groups = cut([1] * len(every_row), max_examples=most["max_examples"])
    else:
        groups = cut(lengths, **most, decoder_lengths=decoder_lengths(inputs, keeps_padding=keeps_padding))
    return groups if len(groups) > 1 else [every_row]


# ---- A known loss, compared with what runs ---------------------------------------------------------------------------

LARGEST_OF_LOSS = 1e-3  # rows are added in another order, over shorter ones; of experts a few take other ways
LARGEST_OF_LOSS_16_BITS = 2**-6  # seen: 0.013, T5 in bfloat16, whose losses are rounded to 2**-8


def compare_with_parts(
    trainer: Any, step: AccumulationStep, loss: KnownLoss, groups: list[list[int]], keeps_padding: bool
) -> None:
    """Raise OtherLossError if the loss of a batch, or of as many rows as fit, is not that of its parts: forward alone,
    without dropout.
    """
    ran_out = False
    try:
        with untraced(trainer, step.model) as state, torch.no_grad():
            whole, joined = float(loss_of(trainer, step, step.inputs)), 0.0
            if state.has_drawn() and float(loss_of(trainer, step, step.inputs)) != whole:
                raise OtherLossError(DRAWS)
            weights = loss.row_weights(step.inputs)
            for rows in groups:
                share = 1.0 if weights is None else sum(weights[row] for row in rows)
                state.restore()
                part = take_rows(step.inputs, rows, keeps_padding=keeps_padding)
                joined += share * float(loss_of(trainer, step, part)) if share else 0.0
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ran_out = True
    if ran_out:  # the except block has ended, and with it the frames that hold tensors
        free_failed_step()
        fewer = list(range(row_count(step.inputs) // 2))
        if len(fewer) > 1:
            step = step._replace(inputs=take_rows(step.inputs, fewer, keeps_padding=keeps_padding))
            compare_with_parts(trainer, step, loss, [[row] for row in fewer], keeps_padding)
        return
    limit = LARGEST_OF_LOSS_16_BITS if is_narrow(trainer, step.model) else LARGEST_OF_LOSS
    if abs(whole - joined) > limit * max(abs(whole), abs(joined), SMALLEST / float(step.num_items_in_batch or 1)):
        raise OtherLossError(f"that of a batch is {whole:.6g}, and that of its parts {joined:.6g}")
