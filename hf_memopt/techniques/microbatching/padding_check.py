"""Whether the loss of a row is the same without its padding, so that micro-batches may cut it off.

Most models mask padding; heads that read it (XLNet's last column, a mean over all of them) and layers that mix columns
whatever the mask is (YOSO, ConvBERT) do not. No names: the loss of one row is computed with its padding and without.

The price: two forward passes of one row, without a graph, before the first cut, and again for a batch that is wider or
a row that is shorter than any compared before, since some models change at a length, and in one of 200 batches, since
weights change.

Limitations: in 16 bits or TF32 a difference below 5 % may pass, and in float32 one below 1e-5, as that of ConvBERT
with fresh weights. Under FSDP2 it is compared once.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding.losses import KnownLoss
from hf_memopt.binding.undo import override_method
from hf_memopt.changes import Change, record_changes
from hf_memopt.devices.readings import is_out_of_memory
from hf_memopt.techniques.microbatching.backbones import CHECKED_STEPS
from hf_memopt.techniques.microbatching.row_check import without_dropout
from hf_memopt.techniques.microbatching.splitting import copied_batch, row_lengths, take_rows
from hf_memopt.techniques.microbatching.step_state import StepState

logger = logging.getLogger(__name__)

LARGEST_ERROR = 64 * 2**-23  # of the loss of a row: columns are added in another order
LARGEST_ERROR_16_BITS = 5e-2
SMALLEST = 1e-2  # of the unit of a loss: a smaller loss is a difference of larger numbers

Items = torch.Tensor | int | None
"""``num_items_in_batch``, as ``training_step`` gets it."""


class AccumulationStep(NamedTuple):
    """One call of ``training_step``: what it runs, its arguments, and what stock divided its loss by at that time."""

    run: Callable[..., torch.Tensor]
    model: nn.Module
    inputs: Any
    num_items_in_batch: Items
    accumulation_steps: int

    def call(self, trainer: Any, rows: Any) -> torch.Tensor:
        """Train on these rows of the batch."""
        # An epoch that ended early leaves accumulation steps, and their gradients, to the next epoch's first step.
        trainer.current_gradient_accumulation_steps = self.accumulation_steps
        return self.run(self.model, copied_batch(rows), self.num_items_in_batch)  # a subclass may pop columns from it


@contextmanager
def untraced(trainer: Any, model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run losses without dropout and without a trace in the Trainer, its model and the generators inside the context;
    yields what puts all of them back in between.
    """
    state = StepState(trainer)
    with ExitStack() as stack:
        stack.callback(state.restore)
        stack.enter_context(trainer.accelerator.no_sync(model))
        stack.enter_context(override_method(trainer, "log", lambda before, *args, **kwargs: None))
        stack.enter_context(without_dropout(model))
        yield state.restore


def loss_of(trainer: Any, step: AccumulationStep, rows: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of these rows as the Trainer computes it."""
    with trainer.compute_loss_context_manager():
        given = send_to_device(copied_batch(dict(rows)), trainer.args.device)
        loss: torch.Tensor = trainer.compute_loss(step.model, given, num_items_in_batch=step.num_items_in_batch)
    return loss


class Padding:
    """Knows whether padding may be cut off."""

    def __init__(self) -> None:
        self.is_kept = False
        self._widest, self._shortest = 0, 0  # of what was compared, in tokens
        self._draw = random.Random(0)  # of its own: nobody else's numbers are drawn

    def check(self, trainer: Any, step: AccumulationStep, loss: KnownLoss) -> None:
        """Compare the shortest row of a batch with and without its padding, if nothing like it was compared before."""
        if self.is_kept or (trainer.is_fsdp_enabled and self._widest):
            return
        lengths = row_lengths(step.inputs)
        if lengths is None:
            return
        weights = loss.row_weights(step.inputs) or [1.0] * len(lengths)
        columns = (row_lengths(step.inputs, keeps_padding=True) or lengths)[0]
        row = min(range(len(lengths)), key=lambda row: (not weights[row], lengths[row]))
        is_new = columns > self._widest or lengths[row] < self._shortest or self._draw.random() < CHECKED_STEPS
        if not trainer.is_fsdp_enabled and (lengths[row] == columns or not is_new):
            return
        self._shortest = min(lengths[row], self._shortest or columns)
        self._widest = max(columns, self._widest)
        reason = _difference(trainer, step, row)
        if trainer.is_fsdp_enabled:  # all have to keep it or none, since their numbers of passes are those of lengths
            flag = torch.tensor([int(reason is not None)], device=trainer.args.device)
            if bool(trainer.accelerator.gather(flag).any()):
                reason = reason or "the loss of a row of another process differs with and without its padding"
        if reason is not None:
            self.is_kept = True
            change = Change("micro-batches", "padding cut off", "padding kept", reason)
            logger.info("micro-batching: %s", change)
            record_changes(trainer, [change])


def _difference(trainer: Any, step: AccumulationStep, row: int) -> str | None:
    """Return how the loss of a row differs with and without its padding; None if it does not."""
    both = []
    with torch.no_grad(), warnings.catch_warnings(), untraced(trainer, step.model) as restart:
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # no graph is wanted
        for keeps_padding in (True, False):
            try:
                taken = take_rows(step.inputs, [row], keeps_padding=keeps_padding, multiple=1)  # no column of padding
                both.append(float(loss_of(trainer, step, taken)))
            except Exception as error:
                if keeps_padding or is_out_of_memory(error):
                    raise
                return f"a row fails without its padding ({type(error).__name__}: {str(error)[:80]})"
            restart()
    one, other = both
    is_narrow = trainer.args.bf16 or trainer.args.fp16 or torch.get_float32_matmul_precision() != "highest"
    is_narrow = is_narrow or any(weight.element_size() < 4 for weight in step.model.parameters())
    unit = (1.0 if is_narrow else SMALLEST) / float(step.num_items_in_batch or 1)
    limit = LARGEST_ERROR_16_BITS if is_narrow else LARGEST_ERROR
    if one != one or abs(one - other) <= limit * max(abs(one), abs(other), unit):  # not a number: no label counts
        return None
    return f"the loss of a row is {one:.7g} with its padding and {other:.7g} without"
