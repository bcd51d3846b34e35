"""Recover from out of memory in evaluation and prediction: run the rows of a batch in parts.

Loss, logits and labels are those of the whole batch, so metrics stay what they were, for any ``compute_metrics``:

- Under stock's ``prediction_step`` and a loss that is known to be a sum or one mean over rows or labels, the batch is
  split by rows, and the outputs are written into one tensor for the batch, so that joining needs the outputs of one
  batch and of one part. A part keeps the batch's columns, since logits would have another shape otherwise.
- Otherwise ``prediction_step`` runs again, with the whole batch, while the backbone runs the rows in parts
  (``microbatching.backbones``), so that a loss that compares rows sees all of them.

Limitations: sharded weights, which a process cannot gather alone, so a batch that does not fit raises; generation that
samples, where other rows get the random numbers then. What cannot be cut raises, and the error says why.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import Trainer

from hf_memopt.notices import notify
from hf_memopt.training.binding.losses import (
    HookChangesError,
    KnownLoss,
    full_name,
    is_stock,
    known_loss,
    observed_hooks,
)
from hf_memopt.training.binding.model import IGNORED_LABEL, unwrap_parallel
from hf_memopt.training.binding.trials import StepState, copied_batch, count_rows, select_rows
from hf_memopt.training.binding.undo import UndoHandle, function_below, override_method, set_attribute, undo_all
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.training.techniques.microbatching import (
    Backbones,
    Size,
    placeholder_reason,
    row_lengths,
    splittable_batch_reason,
    splittable_reason,
)

logger = logging.getLogger(__name__)

PREDICTION_STEPS = (
    "transformers.trainer.Trainer.prediction_step",
    "transformers.trainer_seq2seq.Seq2SeqTrainer.prediction_step",
)
RECOVERING = "_memopt_is_recovering"  # the attribute that a trainer has while a batch is predicted


def recover_predictions(trainer: Trainer, backbones: tuple[str, ...] = ()) -> UndoHandle:
    """Let ``trainer.evaluate`` and ``trainer.predict`` survive out of memory, with the results of the whole batch.

    Overrides ``prediction_step`` on this instance. A batch that does not fit is run by half as many rows, and so on;
    the number of rows that fit is remembered until the evaluation ends. Works with generation
    (``predict_with_generate``) too, and in each of several processes alone, since stock evaluates without waiting for
    the others within a batch.

    Raises:
        torch.OutOfMemoryError: in evaluation, a single row does not fit, or rows depend on each other; the message says
            what to try.
    """
    recovery = _Recovery(trainer, backbones)
    return undo_all(
        override_method(trainer, "prediction_step", recovery.prediction_step),
        override_method(trainer, "evaluation_loop", recovery.evaluation_loop),
    )


class _Recovery:
    """What one evaluation has learned: how many rows fit."""

    def __init__(self, trainer: Trainer, backbones: tuple[str, ...]) -> None:
        self._trainer: Callable[[], Any] = ref(trainer)
        self._rows_that_fit: int | None = None
        self._batches = 0
        self._is_stock = full_name(function_below(trainer.prediction_step)) in PREDICTION_STEPS
        generates = full_name(function_below(trainer.prediction_step)) == PREDICTION_STEPS[1]
        self._generates = generates and bool(getattr(trainer.args, "predict_with_generate", False))
        self._has_stock_loss = is_stock(trainer, "compute_loss") and trainer.compute_loss_func is None
        self._backbones = Backbones(
            backbones, Size(lambda columns: self._rows_that_fit or sys.maxsize, self._part_failed)
        )

    def evaluation_loop(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forget what fits: the next evaluation may have more memory."""
        self._rows_that_fit, self._batches = None, 0
        return before(*args, **kwargs)

    def prediction_step(
        self, before: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a batch that does not fit in parts."""

        def predict(rows: Any) -> Any:  # a copy: a step that takes the labels out is called again
            return before(model, copied_batch(rows), *args, **kwargs)

        trainer = self._trainer()
        if hasattr(trainer, RECOVERING):  # another technique's recovery, around this one
            return predict(inputs)
        self._batches += 1
        with set_attribute(trainer, RECOVERING, True), _counting_once(trainer, inputs):
            loss_only = args[0] if args else kwargs.get("prediction_loss_only")
            return self._predict(model, inputs, predict, generates=self._generates and not loss_only)

    def _predict(self, model: nn.Module, inputs: Any, predict: Callable[..., Any], *, generates: bool) -> Any:
        is_stock = self._is_stock
        # whatever has to be put back before a user's own step or loss runs again
        state = None if is_stock and self._has_stock_loss else StepState(self._trainer())
        if self._rows_that_fit is None or count_rows(inputs) <= self._rows_that_fit:
            output, message = _attempt(predict, inputs)
            if message is None:
                return output
            self._put_back(state, message)
            if count_rows(inputs) > 1:
                self._shrink(inputs, 0, count_rows(inputs), message)
        loss = self._loss_of(inputs, generates=generates) if is_stock else None
        if loss is None:
            return self._predict_in_parts(model, inputs, predict, state)
        padding, filling = _generation_padding(self._trainer())
        joined = _JoinedRows(count_rows(inputs), padding, filling if generates else None)
        try:
            with observed_hooks(self._trainer().model):
                while joined.done < joined.rows:
                    stop = min(joined.rows, joined.done + (self._rows_that_fit or joined.rows))
                    part = select_rows(inputs, slice(joined.done, stop), joined.rows)
                    _, message = _attempt(joined.add, predict, part, stop)
                    if message is not None:
                        free_failed_step()
                        self._shrink(inputs, joined.done, stop, message)
        except HookChangesError:
            return self._predict_in_parts(model, inputs, predict, state)
        value = None if not joined.losses else joined.loss(loss.row_weights(inputs))
        return value, joined.logits, joined.labels

    def _predict_in_parts(
        self, model: nn.Module, inputs: Any, predict: Callable[..., Any], state: StepState | None
    ) -> Any:
        """Predict the whole batch, with the rows of the backbone in parts."""
        while True:
            with self._backbones.cut(unwrap_parallel(model), is_training=False) as seen:
                output, message = _attempt(predict, inputs)
            if message is None:
                return output
            self._put_back(state, message)
            if seen.cut or not seen.fits:
                reason = "; ".join(seen.reasons) or "memory runs out where all rows are needed"
                raise _unsplit_error(self._batches - 1, count_rows(inputs), f"{reason} ({message})")
            largest, _ = seen.largest or (1, None)  # of a nested batch, whose rows only the model sees
            self._shrink(inputs, 0, min(largest, self._rows_that_fit or largest), message)

    def _put_back(self, state: StepState | None, message: str) -> None:
        free_failed_step()
        if state is None:
            return
        if (changed := state.lost()) is not None:
            raise torch.OutOfMemoryError(
                f"memory ran out in batch {self._batches - 1} of this evaluation ({message}), which cannot be run "
                f"again, since {changed}; expected a batch that fits. "
                "Lower it: TrainingArguments(..., per_device_eval_batch_size=1)"
            )
        state.restore()

    def _loss_of(self, inputs: Any, *, generates: bool) -> KnownLoss | None:
        """Return how the loss of a batch is made of its rows'; None if the batch has to stay whole."""
        trainer = self._trainer()
        # once per batch; where stock generates it counts no labels, and the loss is a mean
        items = None if generates else trainer._get_num_items_in_batch([inputs], trainer.args.device)
        found = known_loss(trainer, items)
        if isinstance(found, str) or not isinstance(inputs, Mapping) or (generates and found.over == "sum"):
            return None
        has_loss = any(inputs.get(name) is not None for name in trainer.label_names)
        reason = (found.reason_against(inputs) if has_loss else None) or splittable_reason(trainer.model)
        reason = reason or splittable_batch_reason(inputs) or placeholder_reason(trainer.model, inputs)
        return None if reason else found

    def _part_failed(self, rows: int, columns: int | None, seconds: float) -> None:
        self._rows_that_fit = max(1, rows // 2)

    def _shrink(self, inputs: Any, start: int, stop: int, message: str) -> None:
        """Remember half of the rows that did not fit; raise if there is no half."""
        rows = stop - start
        if self._trainer().is_fsdp_enabled:
            raise _unsplit_error(self._batches - 1, rows, f"the processes gather sharded weights together ({message})")
        if rows == 1:
            lengths = row_lengths(inputs) if isinstance(inputs, Mapping) else None
            length = "" if lengths is None else f", {lengths[start]} tokens long,"
            raise torch.OutOfMemoryError(
                f"row {start} of batch {self._batches - 1} of this evaluation{length} does not fit alone; expected a "
                "row that fits. Try shorter text (truncation=True, max_length=...), bf16_full_eval=True outside "
                f"training, or EvaluationGuardCallback(reduce='argmax'). ({message})"
            )
        self._rows_that_fit = (rows + 1) // 2
        notify(
            logger,
            f"evaluation: out of memory with {rows} rows; it goes on with {self._rows_that_fit} at a time, and joins "
            "the results.",
        )


def _unsplit_error(batch: int, rows: int, reason: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"batch {batch} of this evaluation, of {rows} rows, does not fit into memory and cannot be split: {reason}; "
        f"expected a batch that fits. Lower it: TrainingArguments(..., per_device_eval_batch_size={max(1, rows // 2)})"
    )


def _attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return the result of a call, or the first line of its out-of-memory error; nothing keeps the error alive."""
    try:
        return call(*args), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error).partition("\n")[0]


def _generation_padding(trainer: Any) -> tuple[int, int | None]:
    """Return the token with which ``generate`` fills up the shorter texts of a batch; and beam search, if another.

    Beam search takes a padding of 0 for none. That, and the private ``_gen_kwargs``: transformers 5.8.1 to 5.24.0.
    """
    config = getattr(trainer.model, "generation_config", None)
    padding, end, beams = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id", "num_beams"))
    end = end[0] if isinstance(end, list) else end
    beams = getattr(trainer, "_gen_kwargs", {}).get("num_beams") or beams or 1
    found = end if padding is None else padding  # generate uses the end token, the first of several
    return IGNORED_LABEL if found is None else int(found), end if padding == 0 and beams > 1 else None


def _counting_once(trainer: Any, inputs: Mapping[str, Any]) -> UndoHandle:
    """Let ``prediction_step`` get the count of labels of the whole batch, however often it runs.

    Several processes wait for each other to add up their counts, so a process that counted again for a micro-batch
    would wait for ever.
    """
    counted: list[Any] = []

    def count(before: Callable[..., Any], batch_samples: Any, device: torch.device) -> Any:
        if not counted:
            counted.append(before([inputs], device))
        return counted[0]

    # private; prediction_step calls it so in transformers 5.8.1, 5.17.0 and 5.23.0, and no public name is between
    return override_method(trainer, "_get_num_items_in_batch", count)


class _JoinedRows:
    """The outputs of a batch whose rows come in micro-batches, in one tensor each."""

    def __init__(self, rows: int, padding: int, filling: int | None) -> None:
        self.rows = rows
        self.padding, self.filling = padding, filling
        self.longest = 0  # text so far, to which shorter ones are filled up
        self.done = 0
        self.losses: list[tuple[int, torch.Tensor]] = []  # each with the row at which its micro-batch ends
        self.logits: Any = None
        self.labels: Any = None

    def add(self, predict: Callable[[Any], tuple[Any, Any, Any]], part: Any, stop: int) -> None:
        """Add loss, logits and labels of a part, the rows up to ``stop``; on an error nothing was added."""
        loss, logits, labels = predict(part)
        joined_logits = self._place(self.logits, logits, stop)
        if self.filling is not None:
            length = int((logits.any(0) * torch.arange(1, logits.shape[1] + 1, device=logits.device)).max())
            joined_logits[: self.done, self.longest : length] = self.filling
            joined_logits[self.done : stop, length : self.longest] = self.filling
            self.longest = max(self.longest, length)
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
