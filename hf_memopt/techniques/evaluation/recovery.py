"""Recover from out of memory in evaluation and prediction: cut the batch by rows, and join what comes out.

Loss, logits and labels are those of the whole batch, so metrics stay what they were, for any ``compute_metrics``. The
joined outputs are written piece by piece into one tensor, so joining needs the outputs of one batch and of one piece.
A piece keeps the batch's columns, since logits would have another shape without.

The losses of the parts are added up as this trainer's own loss asks for, a sum or a weighted mean of its rows
(``loss_rules`` finds out with a few rows, in an evaluation that is split).

Limitations: generation that samples, whose random numbers go to other rows then. What cannot be cut raises, and the
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

from hf_memopt.binding.handles import UndoHandle, is_overridden, override_method, remove_all
from hf_memopt.binding.model_traits import IGNORED_LABEL
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.techniques.microbatching.loss_rules import LossWeights, NotSplittableError
from hf_memopt.techniques.microbatching.splitting import (
    row_count,
    row_lengths,
    splittable_batch_reason,
    splittable_reason,
)

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["recover_predictions"]

logger = logging.getLogger(__name__)

RECOVERS = "recovery of predictions"  # the purpose of the override


def recover_predictions(trainer: Trainer) -> UndoHandle | None:
    """Let ``trainer.evaluate`` and ``trainer.predict`` survive out of memory, with the results of the whole batch.

    Overrides ``prediction_step`` on this instance. A batch that does not fit is run by half as many rows, and so on;
    the number of rows that fit is remembered until the evaluation ends. Works with generation
    (``predict_with_generate``) too, and in each of several processes alone, since stock evaluates without waiting for
    the others within a batch.

    Returns:
        A handle that takes it back, or None where the Trainer has it already.

    Raises (in evaluation):
        torch.OutOfMemoryError: a single row does not fit, or rows depend on each other; the message says what to try.
    """
    if is_overridden(trainer, "prediction_step", RECOVERS):
        return None
    recovery = _Recovery(trainer)
    handles = [
        override_method(trainer, "prediction_step", recovery.recovering, purpose=RECOVERS),
        override_method(trainer, "evaluation_loop", recovery.starting_afresh),
    ]
    return UndoHandle(partial(remove_all, handles))


class _Recovery:
    """What one evaluation has learned: how many rows fit, and how the losses of pieces add up."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._forget()

    def _forget(self) -> None:
        self.rows_that_fit: int | None = None
        self.weights = LossWeights()
        self.batches = 0

    def starting_afresh(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``evaluation_loop``: the next one may have more room."""

        def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
            self._forget()
            return before(*args, **kwargs)

        return evaluation_loop

    def recovering(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``prediction_step``."""

        def prediction_step(
            model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
        ) -> Any:
            def predict(rows: Mapping[str, Any]) -> Any:
                return before(model, rows, prediction_loss_only, *args, **kwargs)

            self.batches += 1
            count = _ItemCount(self.trainer, inputs)
            with count.once_per_batch():
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
            self._shrink(model, inputs, 0, row_count(inputs), message)
        joined = _JoinedRows(row_count(inputs), _generation_padding(self.trainer.model))
        while joined.done < joined.rows:
            stop = min(joined.rows, joined.done + (self.rows_that_fit or joined.rows))
            _, message = _attempt(partial(_add, joined, predict, inputs, stop))
            if message is not None:
                free_failed_step()
                self._shrink(model, inputs, joined.done, stop, message)
        loss = None if not joined.losses else joined.loss(self._weights_of(model, inputs, count.items))
        return loss, joined.logits, joined.labels

    def _weights_of(self, model: nn.Module, inputs: Mapping[str, Any], items: Any) -> list[float] | None:
        """Return how much each row weighs in the loss of a batch; None if losses add up."""
        try:
            return self.weights.of_rows(self.trainer, model, inputs, items, self.rows_that_fit or 1)
        except NotSplittableError as error:
            raise _uncut_error(row_count(inputs), error.reason) from error.__cause__

    def _shrink(self, model: nn.Module, inputs: Mapping[str, Any], start: int, stop: int, message: str) -> None:
        """Remember half of the rows that did not fit; raise where there is no half."""
        reason = splittable_reason(model) or splittable_batch_reason(inputs)
        rows = stop - start
        if reason is not None:
            raise _uncut_error(rows, f"{reason} ({message})")
        if rows == 1:
            lengths = row_lengths(inputs)
            length = "" if lengths is None else f", {lengths[start]} tokens long,"
            raise torch.OutOfMemoryError(
                f"row {start} of batch {self.batches - 1} of this evaluation{length} does not fit alone; expected a "
                "row that fits. Try shorter text (truncation=True, max_length=...), bf16_full_eval=True outside "
                f"training, or EvaluationGuardCallback(reduce='argmax'). ({message})"
            )
        self.rows_that_fit = (rows + 1) // 2
        logger.info(
            f"evaluation ran out of memory with {rows} rows; it goes on with {self.rows_that_fit} at a time and joins "
            "the results"
        )


def _add(joined: _JoinedRows, predict: Callable[..., Any], inputs: Mapping[str, Any], stop: int) -> None:
    joined.add(predict(_slice(inputs, joined.done, stop, joined.rows)), stop)


def _uncut_error(rows: int, reason: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"a batch of {rows} rows does not fit into memory and cannot be cut: {reason}; expected a batch that fits. "
        f"Lower it: TrainingArguments(..., per_device_eval_batch_size={max(1, rows // 2)})"
    )


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a call returns, or the first line of its out-of-memory error, of which nothing else stays."""
    try:
        return call(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0]


def _slice(value: Any, start: int, stop: int, rows: int) -> Any:
    """Return rows ``start`` to ``stop`` of everything in a batch that has a row each, without copying them."""
    if isinstance(value, Mapping):
        return {name: _slice(inner, start, stop, rows) for name, inner in value.items()}
    is_per_row = value.shape[:1] == (rows,) if torch.is_tensor(value) else _is_list_of(value, rows)
    return value[start:stop] if is_per_row else value


def _is_list_of(value: Any, rows: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == rows


def _generation_padding(model: Any) -> int:
    """Return what ``generate`` ends the shorter texts of a batch with."""
    config = getattr(model, "generation_config", None)
    padding, end = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    if padding is None:  # generate takes the end then, the first of several
        padding = end[0] if isinstance(end, list) else end
    return IGNORED_LABEL if padding is None else int(padding)


class _ItemCount:
    """The number of labels that stock counts for one batch: once, and of the whole batch, whatever pieces are run.

    Several processes wait for each other to add theirs up, so one that counted again for a piece would wait for ever.
    """

    def __init__(self, trainer: Any, inputs: Mapping[str, Any]) -> None:
        self._trainer, self._inputs = trainer, inputs
        self._is_counted = False
        self.items: Any = None

    def once_per_batch(self) -> UndoHandle:
        """Return the context in which ``prediction_step`` is told the number for the whole batch."""

        def counting(before: Callable[..., Any]) -> Callable[..., Any]:
            def count(batch_samples: Any, device: torch.device) -> Any:
                if not self._is_counted:
                    self.items, self._is_counted = before([self._inputs], device), True
                return self.items

            return count

        # private; prediction_step calls it so in transformers 5.8.1, 5.17.0 and 5.23.0, and no public name is between
        return override_method(self._trainer, "_get_num_items_in_batch", counting)


class _JoinedRows:
    """The outputs of a batch whose rows come in pieces, in one tensor each."""

    def __init__(self, rows: int, padding: int) -> None:
        self.rows = rows
        self.padding = padding
        self.done = 0
        self.losses: list[tuple[int, torch.Tensor]] = []  # with the rows up to which each goes
        self.logits: Any = None
        self.labels: Any = None

    def add(self, output: tuple[Any, Any, Any], stop: int) -> None:
        """Add loss, logits and labels of the rows up to ``stop``; on an error nothing was added."""
        loss, logits, piece_labels = output
        joined_logits = self._place(self.logits, logits, stop)
        self.labels = self._place(self.labels, piece_labels, stop)
        self.logits = joined_logits
        if loss is not None:
            self.losses.append((stop, loss))
        self.done = stop

    def loss(self, weights: list[float] | None) -> torch.Tensor:
        """Return the loss of all rows: the sum over parts, or their mean by the weights of each one's rows."""
        losses = torch.stack([loss for _, loss in self.losses])
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
        """Write a piece's outputs into those of the batch, which its first piece allocates."""
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
                f"an output of the model ({shown}) has not one row for each of {rows} in a piece, so the batch, which "
                "does not fit into memory, cannot be cut; expected outputs of shape (batch, ...). Leave it out: "
                'trainer.evaluate(ignore_keys=["name_of_output"])'
            )
        if whole is None:
            whole = part.new_full((self.rows, *part.shape[1:]), self.padding)
        elif part.dim() > 1 and part.shape[1] > whole.shape[1]:  # generated text
            whole = pad(whole, [0] * (2 * (part.dim() - 2)) + [0, part.shape[1] - whole.shape[1]], value=self.padding)
        index = (slice(self.done, stop), *([slice(part.shape[1])] if part.dim() > 1 else []))
        whole[index] = part
        return whole
