"""Watch a run for losses and gradients that are not finite, drop such a step before it destroys the weights, find out
where it began, and stop a run that does not recover.

Watching costs one host sync per optimizer step. Stock's ``logging_nan_inf_filter`` costs two per micro-batch, so for
the run it is done on the device instead: a loss that is not finite is logged as the last one that was. The gradient
norm is the one that stock computes at every step.

A dropped step counts like any other: the data, ``global_step`` and the learning-rate schedule go on. Its gradients are
gone before ``optimizer.step()``, which then leaves weights and optimizer state as they were. Under fp16 the gradient
scaler drops steps by itself while it looks for its scale; that is normal and only counted, unless it goes on. In such a
step the schedule waits, as accelerate means it to: with a fused optimizer, stock's default, accelerate does not see it.

Left out: a step within the backward pass (gradient release, LOMO), sharded weights and DeepSpeed, all refused by
``attach``; running statistics that a bad forward pass has spoilt already (batch norm), which the next step reports as
bad weights; a count of steps that an optimizer keeps for a whole group, as schedule-free ones do; an error that torch
raises itself, as for a label out of range; the callback's own counts, which no checkpoint holds. With several processes
one that found nothing of its own drops the step too and reports nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.handles import UndoHandle, override_method
from hf_memopt.changes import Change, add_change
from hf_memopt.devices.random_state import RandomState
from hf_memopt.techniques.microbatching.splitting import row_count
from hf_memopt.techniques.nonfinite.diagnosis import OverflowReport, diagnose, write_reports
from hf_memopt.techniques.nonfinite.example_indices import example_indices
from hf_memopt.techniques.nonfinite.replay import MicroBatch
from hf_memopt.whole_files import warn_unwritten

__all__ = ["OverflowCallback"]

logger = logging.getLogger(__name__)

BFLOAT16_FAMILY = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
"""Model types pretrained with bfloat16 activations (github.com/google-research/text-to-text-transfer-transformer,
issue 539), whose feed-forward outputs exceed float16's 65,504 (github.com/huggingface/transformers, issue 5651)."""

MOST_SKIPS = 10
"""So many steps skipped in a row are no search for a loss scale any more: from its start, 65,536, it has come to 64."""

SMALLEST_SCALE = 1.0
"""Below it a loss is made smaller, not larger, and torch too says that something is likely wrong (``GradScaler``)."""


class OverflowCallback(TrainerCallback):
    """Drop steps that are not finite, tell where it began and in which examples, and stop if it goes on.

    Bind it with ``attach(trainer)``. A finding is logged once per kind and place as a warning, and all stand in
    ``overflow_report.json`` and ``.txt``, written whenever there is a new one. A warning says where that
    fails, once per cause.

    Args:
        max_poisoned_steps: the run stops at so many of them in all.
        max_in_a_row: and at so many without a good step between: weights that are bad never recover.
        report_dir: where the report goes; the Trainer's ``output_dir`` by default.

    Attributes:
        reports: one ``OverflowReport`` for each poisoned step in whose own micro-batches it was found.
        poisoned_steps: steps dropped so far, those found by other processes included.
        skipped_steps: steps that the gradient scaler of fp16 skipped, those among the poisoned ones included.
        changes: what was set differently for the run.
        handle: takes back what was done to the trainer; None before it is bound.

    Raises:
        ValueError: a limit is no whole number of 1 or more.
        RuntimeError: when training starts and it is not bound; when a limit is reached. The weights are then those of
            the last good step.
    """

    technique = "non-finite detection"
    binds_last = True  # outermost, it sees each micro-batch as the Trainer does, not the pieces that another cuts

    def __init__(
        self, max_poisoned_steps: int = 10, *, max_in_a_row: int = 3, report_dir: str | Path | None = None
    ) -> None:
        for name, value in (("max_poisoned_steps", max_poisoned_steps), ("max_in_a_row", max_in_a_row)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{name}={value!r} is no limit; expected a whole number of 1 or more. "
                    f"Write, for example, OverflowCallback({name}=3)."
                )
        self.max_poisoned_steps = max_poisoned_steps
        self.max_in_a_row = max_in_a_row
        self.report_dir = None if report_dir is None else Path(report_dir)
        self.reports: list[OverflowReport] = []
        self.changes: list[Change] = []
        self.poisoned_steps = 0
        self.skipped_steps = 0
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._in_a_row = 0
        self._skips_in_a_row = 0
        self._window: list[MicroBatch] = []
        self._is_loss_bad: list[torch.Tensor] = []
        self._norm: Any = None
        self._last_loss: torch.Tensor | None = None
        self._undo_filter: UndoHandle | None = None
        self._undo_schedule: UndoHandle | None = None
        self._undo_norm: UndoHandle | None = None
        self._unwritten: set[str] = set()  # why the report could not be written, as far as it was warned of

    def __reduce__(self) -> tuple[Any, ...]:
        return _unused, (type(self), self.max_poisoned_steps, self.max_in_a_row, self.report_dir)

    # ---- Binding ----------------------------------------------------------------------------------------------------

    def bind(self, trainer: Any) -> None:
        """Watch this trainer's steps and gradient norms; a second ``attach`` puts it outermost again."""
        if self.binding.trainer is not trainer:
            _warn_of_bfloat16_family(trainer)
        override = override_method(trainer, "training_step", self._watching)
        self.handle = self.binding.to(trainer, override, UndoHandle(self._end_run))

    def _watching(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            args = self.binding.trainer.args
            micro_batch = MicroBatch(inputs, num_items_in_batch, RandomState.capture(args.device))
            loss = before(model, inputs, num_items_in_batch)
            is_bad = ~torch.isfinite(loss)
            self._window.append(micro_batch)
            self._is_loss_bad.append(is_bad)
            return self._logged(loss, is_bad) if self._switch_filter_off(args) else loss

        return training_step

    def _noting_norm(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._norm = before(*args, **kwargs)
            return self._norm

        return clip_grad_norm_

    # ---- Stock's filter, on the device ------------------------------------------------------------------------------

    def _switch_filter_off(self, args: Any) -> bool:
        """Keep stock from looking at this micro-batch's loss, only until the next event: a checkpoint holds the
        arguments, and evaluation reads them.
        """
        if self._undo_filter is None and args.logging_nan_inf_filter:
            args.logging_nan_inf_filter = False
            self._undo_filter = UndoHandle(lambda: setattr(args, "logging_nan_inf_filter", True))
            reason = "it costs two host syncs per micro-batch; the same is done on the device"
            add_change(self.changes, Change("logging_nan_inf_filter", True, False, reason))
        return self._undo_filter is not None

    def _logged(self, loss: torch.Tensor, is_bad: torch.Tensor) -> torch.Tensor:
        last = torch.zeros_like(loss) if self._last_loss is None else self._last_loss
        self._last_loss = torch.where(is_bad, last, loss)
        return self._last_loss

    def _restore_filter(self) -> None:
        if self._undo_filter is not None:
            self._undo_filter.remove()
            self._undo_filter = None

    # ---- Events -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound or beside what it cannot work with; begin to count."""
        trainer = self.binding.serving(self, state)
        check_compatibility(trainer)
        self._end_run()
        # only now: a search for hyperparameters gives each run an accelerator of its own
        self._undo_norm = override_method(trainer.accelerator, "clip_grad_norm_", self._noting_norm)
        self._last_loss = None
        self._in_a_row = self._skips_in_a_row = self.poisoned_steps = self.skipped_steps = 0
        self.reports.clear()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with nothing of a step before, which may have raised."""
        self._end()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give stock its filter back."""
        self._restore_filter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Read how the step went, and drop it if it is poisoned."""
        self._restore_filter()
        trainer = self.binding.trainer
        if not self._window:
            return
        reading = read_step(self._is_loss_bad, self._norm, trainer.accelerator)
        self._skips_in_a_row = self._skips_in_a_row + 1 if reading.is_skipped else 0
        if reading.is_skipped:
            self.skipped_steps += 1
            self._hold_schedule(trainer.lr_scheduler)
        if not is_poisoned(reading, self._skips_in_a_row):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.poisoned_steps += 1
        report = self._report(trainer, reading, optimizer)
        path = None if report is None else self._publish(trainer, report)
        if self._in_a_row >= self.max_in_a_row or self.poisoned_steps >= self.max_poisoned_steps:
            self._end_run()
            raise RuntimeError(self._last_words(state.global_step + 1, report, path))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the batch go, and the schedule go on."""
        self._end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sum up."""
        self._end_run()
        if self.poisoned_steps or self.skipped_steps:
            logger.info(
                f"OverflowCallback dropped {self.poisoned_steps} steps; the loss scale skipped {self.skipped_steps}"
            )

    def _end_run(self) -> None:
        self._end()
        if self._undo_norm is not None:
            self._undo_norm.remove()

    def _end(self) -> None:
        self._restore_filter()
        self._window, self._is_loss_bad, self._norm = [], [], None
        if self._undo_schedule is not None:
            self._undo_schedule.remove()

    def _hold_schedule(self, scheduler: Any) -> None:
        """Keep the learning rate where it is until the step ends."""
        self._undo_schedule = override_method(scheduler, "step", lambda before: lambda *args, **kwargs: None)

    # ---- A poisoned step --------------------------------------------------------------------------------------------

    def _report(self, trainer: Any, reading: StepReading, optimizer: Any) -> OverflowReport | None:
        """Drop the step and find out where it began; None where another process is at fault."""
        drop_gradients(optimizer)  # before the step is repeated, so that it needs no memory for a second set
        if reading.is_any_loss_bad and not any(reading.is_loss_bad):
            return None
        blank = OverflowReport(
            step=trainer.state.global_step + 1,
            case="unknown",
            loss_scale=reading.loss_scale,
            precision=_precision(trainer),
        )
        report = diagnose(trainer, self._window, reading.is_loss_bad, blank)
        if report.case == "unknown" and trainer.accelerator.num_processes > 1 and not any(reading.is_loss_bad):
            return None
        return self._with_examples(trainer, report)

    def _with_examples(self, trainer: Any, report: OverflowReport) -> OverflowReport:
        if report.micro_batch is None:
            return report
        indices = example_indices(trainer, report.micro_batch)
        inputs = self._window[report.micro_batch].inputs
        if indices is not None and report.rows and len(indices) == row_count(inputs):  # else the collator cut or joined
            indices = tuple(indices[row] for row in report.rows)
        return replace(report, examples=indices)

    def _publish(self, trainer: Any, report: OverflowReport) -> Path | None:
        """Log a finding that is new in kind or place, and write all of them down; return where, if it was possible."""
        is_known = any((other.case, other.where) == (report.case, report.where) for other in self.reports)
        self.reports.append(report)
        logger.log(logging.INFO if is_known else logging.WARNING, f"OverflowCallback dropped {report}")
        folder = Path(trainer.args.output_dir) if self.report_dir is None else self.report_dir
        try:
            return write_reports(self.reports, folder, trainer.args.process_index)
        except OSError as error:
            lost = "the report lacks what was found since, and only the log and callback.reports have it"
            warn_unwritten(folder / "overflow_report.json", error, lost, self._unwritten)
            return None

    def _last_words(self, step: int, report: OverflowReport | None, path: Path | None) -> str:
        is_row = self._in_a_row >= self.max_in_a_row
        name, count = ("max_in_a_row", self._in_a_row) if is_row else ("max_poisoned_steps", self.poisoned_steps)
        found = "Another process found it, see its report" if report is None else f"Last, {report}."
        found += "" if path is None else f" Report: {path}"
        return (
            f"{name}={count!r} steps {'in a row ' if is_row else ''}up to step {step} had losses or gradients that are "
            f"not finite, and were dropped; expected finite ones. {found}"
        )


def drop_gradients(optimizer: Any) -> None:
    """Take every gradient away, so that the optimizer's step leaves weights and state as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _unused(
    callback_class: type[OverflowCallback], max_poisoned_steps: int, max_in_a_row: int, report_dir: Path | None
) -> OverflowCallback:
    return callback_class(max_poisoned_steps, max_in_a_row=max_in_a_row, report_dir=report_dir)


def _precision(trainer: Any) -> str:
    """Return what the forward pass computes in."""
    mixed = str(trainer.accelerator.mixed_precision)
    if mixed in ("fp16", "bf16"):
        return mixed
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(next(trainer.model.parameters()).dtype, "fp32")


def _warn_of_bfloat16_family(trainer: Any) -> None:
    family = getattr(getattr(trainer.model, "config", None), "model_type", None)
    if trainer.args.fp16 and family in BFLOAT16_FAMILY:
        warnings.warn(
            f"fp16=True is likely to overflow in {type(trainer.model).__name__}: models of the T5 family were trained "
            "in bfloat16, with values beyond float16's 65,504; expected bf16=True, or neither of the two. "
            "Set: fp16=False, bf16=True",
            stacklevel=4,
        )


# ---- Reading a step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepReading:
    """What the one host sync of an optimizer step brings; the same in all processes but for ``is_loss_bad``.

    Args:
        is_loss_bad: for each micro-batch of this process, whether its loss was not finite.
        is_any_loss_bad: the same for all micro-batches of all processes.
        is_norm_bad: whether the gradient norm was not finite.
        loss_scale: fp16's, with which the step was computed; None without a gradient scaler.
    """

    is_loss_bad: tuple[bool, ...]
    is_any_loss_bad: bool
    is_norm_bad: bool
    loss_scale: float | None

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient scaler skips this step by itself."""
        return self.loss_scale is not None and self.is_norm_bad


def read_step(is_loss_bad: Sequence[torch.Tensor], norm: Any, accelerator: Any) -> StepReading:
    """Read the flags of a step, the gradient norm and the loss scale in one transfer from the device.

    Args:
        is_loss_bad: one 0-dimensional bool tensor per micro-batch, on the device.
        norm: what ``accelerator.clip_grad_norm_`` returned; None where it was not called.
        accelerator: shares the flags with the other processes, on the device, and has the gradient scaler.
    """
    here = torch.stack(list(is_loss_bad)).float()
    is_norm_bad = ~torch.isfinite(torch.as_tensor(0.0 if norm is None else norm, device=here.device))
    shared = torch.stack([here.sum(), is_norm_bad.float()])
    if accelerator.num_processes > 1:
        shared = accelerator.reduce(shared, reduction="sum")
    # the scale itself is not public, and get_scale() would be a second sync
    scale = None if accelerator.scaler is None else accelerator.scaler.scale(torch.ones(1, device=here.device))
    values = torch.cat([shared, here] if scale is None else [shared, here, scale]).tolist()
    flags = values[2 : 2 + len(is_loss_bad)]
    return StepReading(
        tuple(flag > 0 for flag in flags), values[0] > 0, values[1] > 0, None if scale is None else values[-1]
    )


def is_poisoned(reading: StepReading, skips_in_a_row: int) -> bool:
    """Tell whether a step is to be dropped and looked into.

    Every step whose losses or gradients are not finite is; but not one that a gradient scaler skips while it looks for
    its scale, i.e. not before ``MOST_SKIPS`` in a row (this one included) or a scale below ``SMALLEST_SCALE``.

    Example:
        >>> search = StepReading((False,), False, True, 65536.0)
        >>> is_poisoned(search, skips_in_a_row=1), is_poisoned(search, skips_in_a_row=10)
        (False, True)
    """
    if reading.is_any_loss_bad or reading.loss_scale is None:
        return reading.is_any_loss_bad or reading.is_norm_bad
    return reading.is_norm_bad and (skips_in_a_row >= MOST_SKIPS or reading.loss_scale < SMALLEST_SCALE)
