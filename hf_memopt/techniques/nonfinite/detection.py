"""Detect steps whose loss or gradients are not finite, drop them before they destroy the weights, and diagnose them.

Use ``detect_nonfinite`` by itself, or ``OverflowCallback`` under the ``Trainer``; see ``overflow`` for when stock's own
``debug="underflow_overflow"`` is enough.

How a step is dropped: its gradients are removed after stock has clipped them and before ``optimizer.step()``, which
then leaves weights and optimizer state as they were. The step counts like any other: the data, ``global_step`` and the
learning-rate schedule go on. Under fp16 the gradient scaler drops steps by itself while it searches for its scale;
these are only counted, unless that goes on. In such a step the schedule waits, as accelerate means it to; with a fused
optimizer, stock's default, accelerate does not notice the skip.

Detection waits for the device once per optimizer step. Stock's ``logging_nan_inf_filter`` waits twice per accumulation
step, so during the run it is replaced by the same filter on the device: a loss that is not finite is logged as the last
one that was. The gradient norm is the one that stock computes at every step anyway.

Under FSDP2 a step is dropped in all processes, and the report says what is seen without repeating it: the accumulation
step and its examples, bad weights and columns, the weights whose gradients were bad.

Limitations: a step within the backward pass (gradient release, LOMO) and DeepSpeed, refused by ``attach``; running
statistics that a bad forward pass has changed already (batch norm), which the next step reports as bad weights; a step
count that an optimizer keeps for a whole group, as schedule-free ones do; an error that torch raises itself, as for a
label out of range; the counts, which are not saved in checkpoints. With several processes, one that found nothing of
its own drops the step too and reports nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.handles import UndoHandle, is_overridden, override_method
from hf_memopt.changes import Change, add_change
from hf_memopt.devices.random_state import RandomState
from hf_memopt.notices import notify
from hf_memopt.plain_data import Count, check_value, checked_path
from hf_memopt.techniques.microbatching.splitting import row_count
from hf_memopt.techniques.nonfinite.diagnosis import OverflowReport, diagnose, diagnose_unrepeated, write_reports
from hf_memopt.techniques.nonfinite.example_indices import example_indices
from hf_memopt.techniques.nonfinite.replay import StepInputs, bad_gradients
from hf_memopt.techniques.nonfinite.step_reading import StepReading, is_nonfinite, read_step
from hf_memopt.whole_files import warn_unwritten

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["NonfiniteRecord", "detect_nonfinite"]

logger = logging.getLogger(__name__)

DETECTS = "non-finite detection"  # the purpose of the override of training_step


class NonfiniteRecord:
    """The limits at which non-finite detection stops a run, and what it has found; see ``OverflowCallback``."""

    def __init__(
        self, max_nonfinite_steps: int = 10, *, max_in_a_row: int = 3, report_dir: str | Path | None = None
    ) -> None:
        check_value("max_nonfinite_steps", max_nonfinite_steps, Count, 10)
        check_value("max_in_a_row", max_in_a_row, Count, 3)
        self.max_nonfinite_steps = max_nonfinite_steps
        self.max_in_a_row = max_in_a_row
        self.report_dir = None if report_dir is None else checked_path("report_dir", report_dir)
        self.reports: list[OverflowReport] = []
        self.changes: list[Change] = []
        self.nonfinite_steps = 0
        self.skipped_steps = 0


def detect_nonfinite(trainer: Trainer, record: NonfiniteRecord | None = None) -> UndoHandle:
    """Let a Trainer drop steps that are not finite, report where they began, and stop if it goes on.

    Overrides ``training_step`` of this one Trainer, within a run also ``clip_grad_norm_`` of its accelerator, and adds
    a private callback that follows the run. Call it after other techniques that override ``training_step``, so that it
    sees each batch as the Trainer does. A finding is logged once per kind and place as a warning, and all are written
    to ``overflow_report.json`` and ``.txt``, whenever there is a new one.

    Args:
        trainer: a Trainer, already built.
        record: the limits, and what gets the findings; by default a new ``NonfiniteRecord()``.

    Returns:
        A handle whose ``remove()`` takes everything off the Trainer again.

    Raises:
        ValueError: the Trainer has it already; when training begins, a setting or another technique is incompatible.
        RuntimeError: in training, when a limit is reached. The weights are then those of the last good step.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> config = BertConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> model = BertForSequenceClassification(config)
        >>> trainer = Trainer(model, TrainingArguments(report_to="none", use_cpu=True))
        >>> record = NonfiniteRecord(max_in_a_row=2)
        >>> handle = detect_nonfinite(trainer, record)
        >>> record.nonfinite_steps
        0
        >>> handle.remove()
    """
    if is_overridden(trainer, "training_step", DETECTS):
        raise ValueError(
            f"trainer=<{type(trainer).__name__}> has non-finite detection already; expected a Trainer without. Keep "
            "one OverflowCallback in callbacks=, or call handle.remove() first"
        )
    detection = _Detection(trainer, NonfiniteRecord() if record is None else record)
    override = override_method(trainer, "training_step", detection.wrap_training_step, purpose=DETECTS)
    trainer.add_callback(detection)
    reference = weakref.ref(trainer)

    def undo() -> None:
        detection.end_run()
        override.remove()
        if (alive := reference()) is not None:
            handler = alive.callback_handler  # a new list: stock may be going through the old one
            handler.callbacks = [callback for callback in handler.callbacks if callback is not detection]

    return UndoHandle(undo)


class _Detection(TrainerCallback):
    """The state of one run, and the events at which it is read."""

    technique = "non-finite detection"

    def __init__(self, trainer: Trainer, record: NonfiniteRecord) -> None:
        self._trainer: Callable[[], Any] = weakref.ref(trainer)
        self._record = record
        self._in_a_row = 0
        self._skips_in_a_row = 0
        self._window: list[StepInputs] = []  # since the last optimizer step
        self._is_loss_bad: list[torch.Tensor] = []  # for each of them, 0-dimensional
        self._norm: torch.Tensor | float | None = None
        self._last_loss: torch.Tensor | None = None
        self._undo_filter: UndoHandle | None = None
        self._undo_schedule: UndoHandle | None = None
        self._undo_norm: UndoHandle | None = None
        self._unwritten: set[str] = set()  # the causes of failed writes that were already warned of

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainerCallback, ()  # in a copy of its trainer, whose overrides are gone, it does nothing

    def wrap_training_step(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Remember the inputs and the loss of each accumulation step."""

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            args = self._trainer().args
            step_inputs = StepInputs(inputs, num_items_in_batch, RandomState.capture(args.device))
            loss: torch.Tensor = before(model, inputs, num_items_in_batch)
            is_bad = ~torch.isfinite(loss)
            self._window.append(step_inputs)
            self._is_loss_bad.append(is_bad)
            return self._filtered(loss, is_bad) if self._switch_filter_off(args) else loss

        return training_step

    def _wrap_clip_grad_norm(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._norm = before(*args, **kwargs)
            return self._norm

        return clip_grad_norm_

    # ---- Stock's filter, on the device ------------------------------------------------------------------------------

    def _switch_filter_off(self, args: TrainingArguments) -> bool:
        """Keep stock from reading this accumulation step's loss, only until the next event: a checkpoint contains the
        arguments, and evaluation reads them.
        """
        if self._undo_filter is None and args.logging_nan_inf_filter:
            args.logging_nan_inf_filter = False
            self._undo_filter = UndoHandle(lambda: setattr(args, "logging_nan_inf_filter", True))
            reason = "it waits for the device twice per accumulation step; the same is done on the device"
            add_change(self._record.changes, Change("logging_nan_inf_filter", True, False, reason))
        return self._undo_filter is not None

    def _filtered(self, loss: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        last = torch.zeros_like(loss) if self._last_loss is None else self._last_loss
        self._last_loss = torch.where(is_bad, last, loss)
        return self._last_loss

    def _restore_filter(self) -> None:
        if self._undo_filter is not None:
            self._undo_filter.remove()
            self._undo_filter = None

    # ---- Events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Refuse incompatible settings, and begin to count."""
        check_compatibility(self._trainer())
        self.end_run()
        # only now: a search for hyperparameters gives each run an accelerator of its own
        self._undo_norm = override_method(self._trainer().accelerator, "clip_grad_norm_", self._wrap_clip_grad_norm)
        self._last_loss = None
        self._in_a_row = self._skips_in_a_row = 0
        self._record.nonfinite_steps = self._record.skipped_steps = 0
        self._record.reports.clear()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Forget the step before, which may have raised."""
        self._end_step()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """Give stock its filter back."""
        self._restore_filter()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Read the flags of the step, and drop it if it is not finite."""
        self._restore_filter()
        if not self._window:
            return
        trainer, record = self._trainer(), self._record
        reading = read_step(self._is_loss_bad, self._norm, trainer.accelerator)
        self._skips_in_a_row = self._skips_in_a_row + 1 if reading.is_skipped else 0
        if reading.is_skipped:
            record.skipped_steps += 1
            # keep the learning rate as it is until the step ends
            hold = override_method(trainer.lr_scheduler, "step", lambda before: lambda *args, **kwargs: None)
            self._undo_schedule = hold
        if not is_nonfinite(reading, self._skips_in_a_row):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        record.nonfinite_steps += 1
        gradients = bad_gradients(trainer.model) if trainer.is_fsdp_enabled else ()
        _drop_gradients(optimizer)  # before the step is repeated, so that it needs no memory for a second set
        report = self._report(trainer, reading, gradients)
        path = None if report is None else self._publish(trainer, report)
        if self._in_a_row >= record.max_in_a_row or record.nonfinite_steps >= record.max_nonfinite_steps:
            self.end_run()
            raise RuntimeError(self._why_stopped(state.global_step + 1, report, path))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Release the batch and the schedule."""
        self._end_step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Log the counts."""
        self.end_run()
        dropped, skipped = self._record.nonfinite_steps, self._record.skipped_steps
        steps = "1 step" if dropped == 1 else f"{dropped} steps"
        counts = f"non-finite detection dropped {steps} of this run; the loss scale skipped {skipped}"
        if dropped:
            notify(logger, counts)
        elif skipped:  # as the scale settles in any run with fp16
            logger.info(counts)

    def end_run(self) -> None:
        """Take off what is needed only within a run."""
        self._end_step()
        if self._undo_norm is not None:
            self._undo_norm.remove()

    def _end_step(self) -> None:
        self._restore_filter()
        self._window, self._is_loss_bad, self._norm = [], [], None
        if self._undo_schedule is not None:
            self._undo_schedule.remove()

    # ---- A non-finite step ------------------------------------------------------------------------------------------

    def _report(self, trainer: Any, reading: StepReading, gradients: Sequence[str]) -> OverflowReport | None:
        """Find out where the step stopped being finite; None if that was in another process."""
        if reading.is_any_loss_bad and not any(reading.is_loss_bad):
            return None
        blank = OverflowReport(
            step=trainer.state.global_step + 1,
            case="unknown",
            loss_scale=reading.loss_scale,
            precision=_precision(trainer),
        )
        if trainer.is_fsdp_enabled:
            report = diagnose_unrepeated(trainer, self._window, reading.is_loss_bad, blank, gradients)
        else:
            report = diagnose(trainer, self._window, reading.is_loss_bad, blank)
        if report.case == "unknown" and trainer.accelerator.num_processes > 1 and not any(reading.is_loss_bad):
            return None
        if report.accumulation_step is None:
            return report
        indices = example_indices(trainer, report.accumulation_step)
        count = row_count(self._window[report.accumulation_step].inputs)
        if indices is not None and report.rows and len(indices) == count:  # else the collator removed or joined rows
            indices = tuple(indices[row] for row in report.rows)
        return replace(report, examples=indices)

    def _publish(self, trainer: Trainer, report: OverflowReport) -> Path | None:
        """Log a finding, and write all of them to the report; return its path if it could be written."""
        record = self._record
        is_known = any((other.case, other.where) == (report.case, report.where) for other in record.reports)
        record.reports.append(report)
        if is_known:
            logger.info("non-finite detection dropped %s", report)
        else:
            notify(logger, f"non-finite detection dropped {report}")
        folder = Path(trainer.args.output_dir or "") if record.report_dir is None else record.report_dir
        try:
            return write_reports(record.reports, folder, trainer.args.process_index)
        except OSError as error:
            lost = "the report lacks what was found since, and only the log and callback.reports have it"
            warn_unwritten(folder / "overflow_report.json", error, lost, self._unwritten)
            return None

    def _why_stopped(self, step: int, report: OverflowReport | None, path: Path | None) -> str:
        is_row = self._in_a_row >= self._record.max_in_a_row
        name, count = "max_nonfinite_steps", self._record.nonfinite_steps
        if is_row:
            name, count = "max_in_a_row", self._in_a_row
        found = "Another process found it, see its report" if report is None else f"Last, {report}."
        found += "" if path is None else f" Report: {path}"
        return (
            f"{name}={count!r} steps {'in a row ' if is_row else ''}up to step {step} had losses or gradients that are "
            f"not finite, and were dropped; expected finite ones. {found}"
        )


def _drop_gradients(optimizer: Any) -> None:
    """Remove every gradient, so that the optimizer's step leaves weights and state as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _precision(trainer: Any) -> str:
    """Return the floating-point format of the forward pass."""
    mixed = str(trainer.accelerator.mixed_precision)
    if mixed in ("fp16", "bf16"):
        return mixed
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(next(trainer.model.parameters()).dtype, "fp32")
