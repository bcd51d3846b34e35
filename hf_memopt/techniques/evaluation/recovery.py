"""Recover from out of memory in evaluation and prediction: split the batch by rows, and join the outputs.

Loss, logits and labels are those of the whole batch, so metrics stay what they were, for any ``compute_metrics``. The
outputs of each micro-batch are written into one tensor for the batch, so joining needs the outputs of one batch and of
one micro-batch. A micro-batch keeps the batch's columns, since logits would have another shape otherwise.

The losses of the micro-batches are combined as this trainer's own loss needs it, a sum or a weighted mean of its rows
(``loss_rules`` finds that out with a few rows, in an evaluation that is split).

Limitations: sharded weights, which a process cannot gather alone, so a batch that does not fit raises; generation that
samples, where other rows get the random numbers then. What cannot be split raises, and the
error says why: a loss that compares rows with each other, an output that does not have one entry per row. Where only
single rows fit, a loss that ignores the number of labels is taken for a mean over labels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from hf_memopt.binding.handles import UndoHandle, override_method, remove_all, set_attribute
from hf_memopt.binding.model_traits import IGNORED_LABEL
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.notices import notify
from hf_memopt.techniques.microbatching.loss_rules import LossWeights
from hf_memopt.techniques.microbatching.probed_loss import Items, NotSplittableError
from hf_memopt.techniques.microbatching.splitting import (
    row_count,
    row_lengths,
    select_rows,
    splittable_batch_reason,
    splittable_reason,
)

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["recover_predictions"]

logger = logging.getLogger(__name__)

RECOVERING = "_memopt_is_recovering"  # the attribute that a trainer has while a batch is predicted


def recover_predictions(trainer: Trainer) -> UndoHandle:
    """Let ``trainer.evaluate`` and ``trainer.predict`` survive out of memory, with the results of the whole batch.

    Overrides ``prediction_step`` on this instance. A batch that does not fit is run by half as many rows, and so on;
    the number of rows that fit is remembered until the evaluation ends. Works with generation
    (``predict_with_generate``) too, and in each of several processes alone, since stock evaluates without waiting for
    the others within a batch.

    Returns:
        A handle that takes it off again. Of several such overrides the outermost recovers.

    Raises:
        torch.OutOfMemoryError: in evaluation, a single row does not fit, or rows depend on each other; the message says
            what to try.
    """
    recovery = _Recovery(trainer)
    handles = [
        override_method(trainer, "prediction_step", recovery.wrap_prediction_step),
        override_method(trainer, "evaluation_loop", recovery.wrap_evaluation_loop),
    ]
    return UndoHandle(partial(remove_all, handles))


class _Recovery:
    """What one evaluation has learned: how many rows fit, and how the losses of micro-batches add up."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self._forget()

    def _forget(self) -> None:
        self.rows_that_fit: int | None = None
        self.weights = LossWeights()
        self.batches = 0

    def wrap_evaluation_loop(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Forget what fits: the next evaluation may have more memory."""

        def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
            self._forget()
            return before(*args, **kwargs)

        return evaluation_loop

    def wrap_prediction_step(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Split a batch that does not fit, and join its outputs."""

        def prediction_step(
            model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
        ) -> Any:
            def predict(rows: Mapping[str, Any]) -> Any:
                return before(model, rows, prediction_loss_only, *args, **kwargs)

            if hasattr(self.trainer, RECOVERING):  # another technique's recovery, around this one
                return predict(inputs)
            self.batches += 1
            count = _ItemCount(self.trainer, inputs)
            with set_attribute(self.trainer, RECOVERING, True), count.once_per_batch():
                return self._predict(model, inputs, predict, count)

        return prediction_step

    def _predict(
        self, model: nn.Module, inputs: Mapping[str, Any], predict: Callable[..., Any], count: _ItemCount
    ) -> Any:
        if self.rows_that_fit is None or row_count(inputs) <= self.rows_that_fit:
            output, message = _attempt(partial(predict, inputs))
            if message is None:
                return output
            free_failed_step()
            self._shrink(inputs, 0, row_count(inputs), message)
        joined = _JoinedRows(row_count(inputs), _generation_padding(self.trainer.model))
        while joined.done < joined.rows:
            stop = min(joined.rows, joined.done + (self.rows_that_fit or joined.rows))
            _, message = _attempt(partial(_add, joined, predict, inputs, stop))
            if message is not None:
                free_failed_step()
                self._shrink(inputs, joined.done, stop, message)
        loss = None if not joined.losses else joined.loss(self._weights_of(model, inputs, count.items))
        return loss, joined.logits, joined.labels

    def _weights_of(self, model: nn.Module, inputs: Mapping[str, Any], items: Items) -> list[float] | None:
        """Return how much each row weighs in the loss of a batch, shape (rows,); None if losses add up."""
        try:
            return self.weights.of_rows(self.trainer, model, inputs, items, self.rows_that_fit or 1)
        except NotSplittableError as error:
            raise _unsplit_error(row_count(inputs), error.reason) from error.__cause__

    def _shrink(self, inputs: Mapping[str, Any], start: int, stop: int, message: str) -> None:
        """Remember half of the rows that did not fit; raise if there is no half."""
        reason = "the processes gather sharded weights together" if self.trainer.is_fsdp_enabled else None
        reason = reason or splittable_reason(self.trainer.model) or splittable_batch_reason(inputs)
        rows = stop - start
        if reason is not None:
            raise _unsplit_error(rows, f"{reason} ({message})")
        if rows == 1:
            lengths = row_lengths(inputs)
            length = "" if lengths is None else f", {lengths[start]} tokens long,"
            raise torch.OutOfMemoryError(
                f"row {start} of batch {self.batches - 1} of this evaluation{length} does not fit alone; expected a "
                "row that fits. Try shorter text (truncation=True, max_length=...), bf16_full_eval=True outside "
                f"training, or EvaluationGuardCallback(reduce='argmax'). ({message})"
            )
        self.rows_that_fit = (rows + 1) // 2
        notify(
            logger,
            f"evaluation: out of memory with {rows} rows; it goes on with {self.rows_that_fit} at a time, and joins "
            "the results.",
        )


def _add(joined: _JoinedRows, predict: Callable[..., Any], inputs: Mapping[str, Any], stop: int) -> None:
    joined.add(predict(select_rows(inputs, slice(joined.done, stop), joined.rows)), stop)


def _unsplit_error(rows: int, reason: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"a batch of {rows} rows does not fit into memory and cannot be split: {reason}; expected a batch that fits. "
        f"Lower it: TrainingArguments(..., per_device_eval_batch_size={max(1, rows // 2)})"
    )


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of a call, or the first line of its out-of-memory error; nothing keeps the error alive."""
    try:
        return call(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0]


def _generation_padding(model: Any) -> int:
    """Return the token with which ``generate`` fills up the shorter texts of a batch."""
    config = getattr(model, "generation_config", None)
    padding, end = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    if padding is None:  # then generate uses the end token, the first of several
        padding = end[0] if isinstance(end, list) else end
    return IGNORED_LABEL if padding is None else int(padding)


class _ItemCount:
    """The number of labels that stock counts for one batch: once, and for the whole batch.

    Several processes wait for each other to add up their counts, so a process that counted again for a micro-batch
    would wait for ever.
    """

    def __init__(self, trainer: Any, inputs: Mapping[str, Any]) -> None:
        self._trainer, self._inputs = trainer, inputs
        self._is_counted = False
        self.items: Items = None

    def once_per_batch(self) -> UndoHandle:
        """Return the context in which ``prediction_step`` gets the count of the whole batch."""

        def wrap(before: Callable[..., Any]) -> Callable[..., Any]:
            def count(batch_samples: Any, device: torch.device) -> Any:
                if not self._is_counted:
                    self.items, self._is_counted = before([self._inputs], device), True
                return self.items

            return count

        # private; prediction_step calls it so in transformers 5.8.1, 5.17.0 and 5.23.0, and no public name is between
        return override_method(self._trainer, "_get_num_items_in_batch", wrap)


class _JoinedRows:
    """The outputs of a batch whose rows come in micro-batches, in one tensor each."""

    def __init__(self, rows: int, padding: int) -> None:
        self.rows = rows
        self.padding = padding
        self.done = 0
        self.losses: list[tuple[int, torch.Tensor]] = []  # each with the row at which its micro-batch ends
        self.logits: Any = None
        self.labels: Any = None

    def add(self, output: tuple[Any, Any, Any], stop: int) -> None:
        """Add loss, logits and labels of the rows up to ``stop``; on an error nothing was added."""
        loss, logits, labels = output
        joined_logits = self._place(self.logits, logits, stop)
        self.labels = self._place(self.labels, labels, stop)
        self.logits = joined_logits
        if loss is not None:
            self.losses.append((stop, loss))
        self.done = stop

    def loss(self, weights: list[float] | None) -> torch.Tensor:
        """Return the loss of all rows: the sum over micro-batches, or their mean by ``weights``, shape (rows,)."""
        losses = torch.stack([loss for _, loss in self.losses])  # (micro-batches,)
        kind = losses.dtype
        losses = losses.to(torch.promote_types(kind, torch.float32))  # in bfloat16 257 labels would weigh as 256
        if weights is None:
            return losses.sum().to(kind)
        ends = [stop for stop, _ in self.losses]
        of_parts = [sum(weights[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]
        shares = torch.tensor(of_parts, dtype=losses.dtype, device=losses.device)
        is_counted = shares > 0  # the mean over none is nan
        return (losses[is_counted] @ shares[is_counted]).to(kind)

    def _place(self, whole: Any, part: Any, stop: int) -> Any:
        """Write the outputs of a micro-batch into those of the batch, which the first micro-batch allocates."""
        if part is None:
            return None
        kind: Any = type(part)
        if isinstance(part, Mapping):
            return kind({name: self._place(whole and whole[name], part[name], stop) for name in part})
        if isinstance(part, (tuple, list)):
            wholes = whole or [None] * len(part)
            return kind(self._place(one, other, stop) for one, other in zip(wholes, part, strict=True))
        rows = stop - self.done
        if not torch.is_tensor(part) or part.shape[:1] != (rows,):
            shown = f"shape {tuple(part.shape)}" if torch.is_tensor(part) else type(part).__name__
            raise ValueError(
                f"an output of the model ({shown}) does not have one entry for each of {rows} rows, so the batch, "
                "which does not fit into memory, cannot be split; expected outputs of shape (batch, ...). Leave it "
                'out: trainer.evaluate(ignore_keys=["name_of_output"])'
            )
        if whole is None:
            whole = part.new_full((self.rows, *part.shape[1:]), self.padding)
        elif part.dim() > 1 and part.shape[1] > whole.shape[1]:  # generated text
            whole = pad(whole, [0] * (2 * (part.dim() - 2)) + [0, part.shape[1] - whole.shape[1]], value=self.padding)
        index = (slice(self.done, stop), *([slice(part.shape[1])] if part.dim() > 1 else []))
        whole[index] = part
        return whole
