"""Drop steps whose loss or gradients are not finite before they destroy the weights, and report where they began.

How a step is dropped: its gradients are removed after stock has clipped them and before ``optimizer.step()``, which
then leaves weights and optimizer state as they were. The step counts like any other: the data, ``global_step`` and the
learning-rate schedule go on. Under fp16 the gradient scaler drops steps by itself while it searches for its scale;
these are only counted, unless that goes on, and the schedule waits, as accelerate means it to.

Detection waits for the device once per optimizer step; the gradient norm is the one that stock computes anyway. Stock's
``TrainingArguments(debug="underflow_overflow")`` waits at every module, raises, and sees neither loss nor gradients.

Limitations: a step within the backward pass (gradient release, LOMO) and DeepSpeed, refused by ``attach``; running
statistics that a bad forward pass has changed already (batch norm), which the next step reports as bad weights; a step
count that an optimizer keeps for a whole group; an error that torch raises itself; the counts, which no checkpoint has.
With several processes, one that found nothing of its own drops the step too and reports nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Trainer

from hf_memopt.binding import versions
from hf_memopt.binding.compatibility import check_compatibility
from hf_memopt.binding.trials import count_rows
from hf_memopt.binding.undo import RandomState, UndoHandle, is_overridden, override_method, remove_all
from hf_memopt.devices import against_float16
from hf_memopt.notices import notify
from hf_memopt.plain_data import Count, check_value
from hf_memopt.techniques import TechniqueCallback
from hf_memopt.techniques.nonfinite.diagnosis import OverflowReport, StepInputs, diagnose
from hf_memopt.techniques.nonfinite.indices import example_indices

logger = logging.getLogger(__name__)

DETECTS = "non-finite detection"  # the purpose of the override of training_step

MOST_SKIPS = 10
"""So many skipped steps in a row are not the usual search for a loss scale, which goes from 65,536 to 64 in them."""

SMALLEST_SCALE = 1.0
"""A smaller loss scale makes the loss smaller, not larger; ``GradScaler`` too says that something is likely wrong."""


class OverflowCallback(TechniqueCallback):
    """Drop steps that are not finite, report where they began and in which examples, and stop if it goes on.

    It overrides ``train`` and ``training_step`` of its one Trainer, and within a run ``clip_grad_norm_`` of its
    accelerator. A finding is logged, once per kind and place as a warning. It adds no keys to the Trainer's logs: in a
    dropped step ``grad_norm`` is not finite, and ``loss`` is what stock's ``logging_nan_inf_filter`` makes of it.

    Args:
        max_nonfinite_steps: the run stops at so many of them in all.
        max_in_a_row: and at so many without a good step in between: weights that are bad never recover.

    Attributes:
        reports: one ``OverflowReport`` for each non-finite step that began in this process.
        nonfinite_steps: steps dropped so far, those found by other processes included.
        skipped_steps: steps that the gradient scaler of fp16 skipped, those among the non-finite ones included.
        handle: takes everything off the trainer again; None until it is bound.

    Raises:
        ValueError: a limit is not an integer of 1 or more; when bound, the Trainer has such a callback already; when
            training begins, a setting or another technique is incompatible.
        RuntimeError: training began unbound; a limit is reached. The weights are then those of the last good step.
    """

    technique = "non-finite detection"

    def __init__(self, max_nonfinite_steps: int = 10, *, max_in_a_row: int = 3) -> None:
        check_value("max_nonfinite_steps", max_nonfinite_steps, Count, 10)
        check_value("max_in_a_row", max_in_a_row, Count, 3)
        self.max_nonfinite_steps = max_nonfinite_steps
        self.max_in_a_row = max_in_a_row
        super().__init__(max_nonfinite_steps, max_in_a_row=max_in_a_row)
        self.reports: list[OverflowReport] = []
        self.nonfinite_steps = 0
        self.skipped_steps = 0
        self._in_a_row = 0
        self._skips_in_a_row = 0
        self._window: list[StepInputs] = []  # since the last optimizer step
        self._is_loss_bad: list[torch.Tensor] = []  # for each of them, 0-dimensional
        self._norm: torch.Tensor | float | None = None
        self._of_step: list[UndoHandle] = []  # what is put back when it ends
        self._of_run: list[UndoHandle] = []

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Watch this trainer's steps; a second ``attach`` makes it the outermost override again."""
        problem = (
            against_float16(config=getattr(trainer.model, "config", None))
            if versions.mixed_precision(trainer.args) == "fp16"
            else ""
        )
        if problem and self.binding.trainer is not trainer:
            warnings.warn(
                f"fp16=True is likely to lose steps: {problem}; expected bf16 where the GPU has it, else float32. "
                "Set: fp16=False",
                stacklevel=3,
            )
        self.binding.end()
        if is_overridden(trainer, "training_step", DETECTS):
            raise ValueError(
                f"trainer=<{type(trainer).__name__}> has non-finite detection already; expected a Trainer without. "
                "Keep one OverflowCallback in callbacks=, or call handle.remove() first"
            )
        override = override_method(trainer, "training_step", self._training_step, purpose=DETECTS)
        self.handle = self.binding.to(
            trainer, UndoHandle(self._end_run), override, override_method(trainer, "train", self._train)
        )
        return self.handle

    def _train(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return before(*args, **kwargs)
        finally:
            self._end_run()  # one that was interrupted too

    def _training_step(
        self, before: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Remember the inputs and the loss of each accumulation step."""
        random_state = RandomState.capture(self.binding.trainer.args.device)
        loss: torch.Tensor = before(model, inputs, num_items_in_batch)
        self._window.append(StepInputs(inputs, num_items_in_batch, random_state))
        self._is_loss_bad.append(~torch.isfinite(loss))
        return loss

    def _clip_grad_norm(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._norm = before(*args, **kwargs)
        return self._norm

    # ---- Events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound and with incompatible settings, and begin to count."""
        super().on_train_begin(args, state, control, **kwargs)
        trainer = self.binding.serving(self, state)
        check_compatibility(trainer)
        self._end_run()
        # only now: a search for hyperparameters gives each run an accelerator of its own
        self._of_run.append(override_method(trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm))
        self._in_a_row = self._skips_in_a_row = 0
        self.nonfinite_steps = self.skipped_steps = 0
        self.reports.clear()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Forget the step before, which may have raised."""
        self._end_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Read the flags of the step, and drop it if it is not finite."""
        if not self._window:
            return
        trainer = self.binding.trainer
        norm = self._norm
        if norm is None:  # of a Trainer that clips by itself
            grads = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        reading = read_step(self._is_loss_bad, norm, trainer.accelerator)
        self._skips_in_a_row = self._skips_in_a_row + 1 if reading.is_skipped else 0
        if reading.is_skipped:
            self.skipped_steps += 1
            # keep the learning rate as it is until the step ends
            hold = override_method(trainer.lr_scheduler, "step", lambda before, *args, **kwargs: None)
            self._of_step.append(hold)
        if not reading.is_nonfinite(self._skips_in_a_row):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.nonfinite_steps += 1
        optimizer.zero_grad()  # before the step is repeated, so that it needs no memory for a second set
        self._report(trainer, reading)
        if self._in_a_row >= self.max_in_a_row or self.nonfinite_steps >= self.max_nonfinite_steps:
            raise RuntimeError(self._why_stopped(state.global_step + 1))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Release the batch and the schedule."""
        self._end_step()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Log the counts."""
        steps = "1 step" if self.nonfinite_steps == 1 else f"{self.nonfinite_steps} steps"
        counts = f"non-finite detection dropped {steps} of this run; the loss scale skipped {self.skipped_steps}"
        if self.nonfinite_steps:
            notify(logger, counts)
        elif self.skipped_steps:  # as the scale settles in any run with fp16
            logger.info(counts)

    def _end_run(self) -> None:
        """Take off what is needed only within a run."""
        self._end_step()
        remove_all(self._of_run)

    def _end_step(self) -> None:
        self._window, self._is_loss_bad, self._norm = [], [], None
        remove_all(self._of_step)

    # ---- A non-finite step ------------------------------------------------------------------------------------------

    def _report(self, trainer: Any, reading: StepReading) -> None:
        """Find out where the step stopped being finite, unless that was in another process, and log it."""
        is_here = any(reading.is_loss_bad)
        if reading.is_any_loss_bad and not is_here:
            return
        window = {at: step for at, step in enumerate(self._window) if reading.is_loss_bad[at] or not is_here}
        blank = OverflowReport(trainer.state.global_step + 1, "unknown")
        how = {"is_loss_bad": is_here, "is_scaled": reading.loss_scale is not None}
        report, position = diagnose(trainer, window, blank, **how)
        if report.case == "unknown" and not is_here and trainer.accelerator.num_processes > 1:
            return
        if position is not None:
            report = replace(report, examples=self._examples(trainer, report, position))
        is_known = any((other.case, other.where) == (report.case, report.where) for other in self.reports)
        self.reports.append(report)
        if is_known:
            logger.info("non-finite detection dropped %s", report)
        else:
            notify(logger, f"non-finite detection dropped {report}")

    def _examples(self, trainer: Any, report: OverflowReport, position: int) -> tuple[int, ...] | None:
        """Return the indices in the training data of the bad rows, or of all rows of their accumulation step."""
        indices = example_indices(trainer, position)
        if indices is None or not report.rows or len(indices) != count_rows(self._window[position].inputs):
            return indices  # of rows that the collator removed or joined all
        return tuple(indices[row] for row in report.rows)

    def _why_stopped(self, step: int) -> str:
        is_row = self._in_a_row >= self.max_in_a_row
        name, count = ("max_in_a_row", self._in_a_row) if is_row else ("max_nonfinite_steps", self.nonfinite_steps)
        is_here = bool(self.reports) and self.reports[-1].step == step
        found = f"Last, {self.reports[-1]}." if is_here else "Another process found it, see its log"
        return (
            f"{name}={count!r} steps {'in a row ' if is_row else ''}up to step {step} had losses or gradients that are "
            f"not finite, and were dropped; expected finite ones. {found}"
        )


@dataclass(frozen=True, slots=True)
class StepReading:
    """The flags of an optimizer step; the same in all processes except for ``is_loss_bad``."""

    is_loss_bad: tuple[bool, ...]  # for each accumulation step of this process, whether its loss was not finite
    is_any_loss_bad: bool  # whether any loss of any process was not finite
    is_norm_bad: bool  # whether the gradient norm was not finite
    loss_scale: float | None  # of fp16, with which the step was computed; None without a gradient scaler

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient scaler skips this step by itself."""
        return self.loss_scale is not None and self.is_norm_bad

    def is_nonfinite(self, skips_in_a_row: int) -> bool:
        """Return whether the step has to be dropped and examined.

        That is every step whose losses or gradients are not finite, except for one that a gradient scaler skips while
        it searches for its scale: up to ``MOST_SKIPS`` - 1 in a row, as long as it is not below ``SMALLEST_SCALE``.
        """
        if self.is_any_loss_bad or self.loss_scale is None:
            return self.is_any_loss_bad or self.is_norm_bad
        return self.is_norm_bad and (skips_in_a_row >= MOST_SKIPS or self.loss_scale < SMALLEST_SCALE)


def read_step(is_loss_bad: Sequence[torch.Tensor], norm: torch.Tensor | float, accelerator: Any) -> StepReading:
    """Read the flags of a step, the gradient norm and the loss scale in one transfer from the device."""
    here = torch.stack(list(is_loss_bad)).float()  # (accumulation steps,)
    if hasattr(norm, "full_tensor"):  # under FSDP2 each process has a part of it
        norm = norm.full_tensor()
    is_norm_bad = ~torch.isfinite(torch.as_tensor(norm, device=here.device))
    shared = torch.stack([here.sum(), is_norm_bad.float()])  # (2,)
    if accelerator.num_processes > 1:
        shared = accelerator.reduce(shared, reduction="sum")
    # the scale itself is not public, and get_scale() would be a second wait for the device
    scale = None if accelerator.scaler is None else accelerator.scaler.scale(torch.ones(1, device=here.device))
    any_loss, any_norm, *flags = torch.cat([shared, here] if scale is None else [shared, here, scale]).tolist()
    loss_scale = None if scale is None else flags.pop()
    return StepReading(tuple(flag > 0 for flag in flags), any_loss > 0, any_norm > 0, loss_scale)
