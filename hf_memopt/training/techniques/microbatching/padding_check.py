"""Whether the loss of a row is the same without its padding, so that micro-batches may cut it off.

Most models mask padding; heads that read it (XLNet's last column, a mean over all of them) and layers that mix columns
whatever the mask is (YOSO, ConvBERT) do not. No names: the loss of one row is computed with its padding and without,
and where it is the same, also its gradient by what the embeddings give:

- For padding it is exactly 0 where that is masked, in any dtype and whatever dropout draws (seen in 29 models with
  fresh weights). That of ConvBERT with two layers is 2e-6 of the largest or more, while its loss may differ by 1e-7, as
  if by rounding.
- For tokens it is the same but for 7e-7 of the largest, or 1e-4 in T5 with large weights. This finds models that read
  the number of columns and not what they hold: CANINE's differs by 5e-3 or more.

The price: two forward passes of one row without a graph, and a forward and a backward pass each without gradients of
weights, before the first cut, and again for a batch that is wider or a row that is shorter than any compared before,
since some models change at a length, and in one of 200 batches, since weights change.

Limitations: in 16 bits or TF32 a difference of the loss below 5 % may pass if no gradient reaches padding, and any if
the model has a dropout that ``without_dropout`` does not know, such as Falcon's. Gradients are not compared in a
model that calls reentrant checkpointing itself and without an ``nn.Embedding``. Not compared are rows that do not fit
with all their padding.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from hf_memopt.changes import Change, record_changes
from hf_memopt.training.binding.losses import KnownLoss
from hf_memopt.training.binding.trials import StepState, is_narrow, untraced
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.training.techniques.microbatching.accumulation_step import (
    LARGEST_ERROR_16_BITS,
    SMALLEST,
    AccumulationStep,
    loss_of,
)
from hf_memopt.training.techniques.microbatching.backbones import CHECKED_STEPS
from hf_memopt.training.techniques.microbatching.splitting import row_lengths, take_rows

logger = logging.getLogger(__name__)

LARGEST_ERROR = 64 * 2**-23  # of the loss of a row: columns are added in another order
LARGEST_AT_PADDING = 1e-9  # of the largest gradient: exactly 0 where padding is masked, 2e-6 and more elsewhere
LARGEST_ERROR_AT_TOKENS = 1e-3  # of the largest gradient


class Padding:
    """Knows whether padding may be cut off."""

    def __init__(self) -> None:
        self.is_kept = False
        self._widest, self._shortest = 0, 0  # of what was compared, in tokens
        self._draw = random.Random(0)  # of its own: nobody else's numbers are drawn

    def check(self, trainer: Any, step: AccumulationStep, loss: KnownLoss) -> None:
        """Compare the shortest row of a batch with and without its padding, if nothing like it was compared before."""
        lengths = None if self.is_kept else row_lengths(step.inputs)
        if lengths is None:
            return
        weights = loss.row_weights(step.inputs) or [1.0] * len(lengths)
        columns = (row_lengths(step.inputs, keeps_padding=True) or lengths)[0]
        row = min(range(len(lengths)), key=lambda row: (not weights[row], lengths[row]))
        is_new = columns > self._widest or lengths[row] < self._shortest or self._draw.random() < CHECKED_STEPS
        if lengths[row] == columns or not is_new:
            return
        self._shortest = min(lengths[row], self._shortest or columns)
        self._widest = max(columns, self._widest)
        reason = _reason_to_keep(trainer, step, row)
        if reason is not None:
            self.is_kept = True
            change = Change("micro-batches", "padding cut off", "padding kept", reason)
            logger.info("micro-batching: %s", change)
            record_changes(trainer, [change])


def _reason_to_keep(trainer: Any, step: AccumulationStep, row: int) -> str | None:
    """Return how a row differs with and without its padding; None if it does not, or cannot be compared."""
    # no column of padding in the second
    rows = [take_rows(step.inputs, [row], keeps_padding=keeps, multiple=1) for keeps in (True, False)]
    with warnings.catch_warnings(), untraced(trainer, step.model) as state:
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # no graph is wanted
        try:
            with torch.no_grad():
                reason = _difference_of_losses(trainer, step, rows, state)
            if reason is None:
                reason = _difference_of_gradients(trainer, step, rows, state)
            return reason
        except _NotComparedError as error:
            text = str(error)
    free_failed_step()
    logger.info("micro-batching: %s", text)
    return None


class _NotComparedError(Exception):
    """Something of a row cannot be compared, for the reason given."""


def _difference_of_losses(
    trainer: Any, step: AccumulationStep, rows: list[dict[str, Any]], state: StepState
) -> str | None:
    """Return how the loss of a row differs; None if it does not, or is random."""
    narrow, losses, is_random = is_narrow(trainer, step.model), list[float](), False
    unit = (1.0 if narrow else SMALLEST) / float(step.num_items_in_batch or 1)
    limit = LARGEST_ERROR_16_BITS if narrow else LARGEST_ERROR

    def loss(keeps_padding: bool) -> float:
        return float(loss_of(trainer, step, rows[not keeps_padding]).detach())

    def is_same(one: float, other: float) -> bool:
        # not a number: no label counts
        return one != one or abs(one - other) <= limit * max(abs(one), abs(other), unit)

    try:
        losses.append(loss(True))
        is_random = state.has_drawn() and not is_same(losses[0], loss(True))  # a dropout that is unknown here
        state.restore()
        losses.append(loss(False))
    except Exception as error:
        if not is_out_of_memory(error):
            if not losses:
                raise
            return f"a row fails without its padding ({type(error).__name__}: {str(error)[:80]})"
    if len(losses) < 2:  # a row does not fit with all its padding, which has to be cut off then
        raise _NotComparedError("padding is cut off unchecked: one row with all of its padding does not fit")
    one, other = losses
    if is_random or is_same(one, other):
        return None
    return f"the loss of a row is {one:.7g} with its padding and {other:.7g} without"


def _difference_of_gradients(
    trainer: Any, step: AccumulationStep, rows: list[dict[str, Any]], state: StepState
) -> str | None:
    """Return how the gradient of a row's loss by what the embeddings give differs; None if it does not."""
    try:
        found = []
        for taken in rows:
            state.restore()
            found.append(_embedding_gradients(trainer, step, taken))
        pairs = [*zip(*found, strict=True)]
    except Exception as error:  # what cannot be differentiated again, or does not fit with a graph
        text = f"{type(error).__name__}: {str(error)[:80]}"
        raise _NotComparedError(f"with and without padding losses are compared alone ({text})") from None
    has_tokens = not (is_narrow(trainer, step.model) or state.has_drawn())
    texts = [(value, rows[1][name]) for name, value in rows[0].items() if torch.is_tensor(value) and value.dim() > 1]
    cut = {one.shape[1] - other.shape[1] for one, other in texts} - {0}
    for one, other in pairs:
        if one is None or other is None or one.dim() != other.dim():
            continue
        sizes = enumerate(zip(one.shape, other.shape, strict=True))
        place = next(((dim, kept) for dim, (every, kept) in sizes if every - kept in cut), None)
        if place is None:  # no columns: the padding of a model's own up to a multiple, distances of columns
            continue
        (dim, columns), largest = place, float(one.abs().max())
        tokens, padding = one.tensor_split([columns], dim)
        if (size := float(padding.abs().max())) > LARGEST_AT_PADDING * largest:
            return f"the gradient of the loss of a row is {size / largest:.1e} of its largest at padding, not 0"
        if not has_tokens or tokens.shape != other.shape:  # relative positions have columns twice
            continue
        if (size := float((tokens - other).abs().max())) > LARGEST_ERROR_AT_TOKENS * largest:
            return f"the gradient of the loss of a row differs by {size / largest:.1e} without its padding"
    return None


def _embedding_gradients(
    trainer: Any, step: AccumulationStep, taken: Mapping[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the loss of a row by each output of an embedding, in the order of their calls.

    Weights are frozen meanwhile: whatever runs backward inside, they get no gradient, and none of their hooks runs.
    """
    moves: list[torch.Tensor] = []  # 0, added to each output

    def move(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return output
        moves.append(torch.zeros_like(output).requires_grad_())
        return output + moves[-1]

    trained = [weight for weight in step.model.parameters() if weight.requires_grad]
    with ExitStack() as stack:
        for module in step.model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(move).remove)
        for weight in trained:
            stack.callback(weight.requires_grad_)
            weight.requires_grad_(False)
        with torch.enable_grad():
            loss = loss_of(trainer, step, taken)
            return torch.autograd.grad(loss, tuple(moves), allow_unused=True) if moves else ()
