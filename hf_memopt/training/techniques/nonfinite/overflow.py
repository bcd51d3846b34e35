"""Drop steps whose loss or gradients are not finite before they destroy the weights, and report where they began.

How a step is dropped: its gradients are removed before ``optimizer.step()``, which then leaves weights and optimizer
state as they were. The step counts like any other: the data, ``global_step`` and the learning-rate schedule go on.
Steps that fp16's loss scaler skips while it searches for its scale are left to it, unless the scale is below 1.

Detection reads each gradient once and waits for the device once per optimizer step; a step that is not finite is
repeated once. Stock's ``TrainingArguments(debug="underflow_overflow")`` waits at every module, raises, and sees neither
loss nor gradients.

Limitations: a step within the backward pass (gradient release, LOMO) and DeepSpeed, refused by ``attach``; running
statistics that a bad forward pass has changed already (batch norm), which the next step reports as bad weights. A
module that returns infinities on purpose is taken for the cause of a bad loss. With several processes, one that found
nothing of its own drops the step too; under FSDP2, or with a ``compute_loss`` of the user's, none repeats a step.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import Trainer

from hf_memopt.errors import reason
from hf_memopt.notices import notify
from hf_memopt.plain_data import Count, check_value
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.compatibility import check_compatibility
from hf_memopt.training.binding.losses import is_stock
from hf_memopt.training.binding.model import IGNORED_LABEL, tensors_in
from hf_memopt.training.binding.trials import StepState
from hf_memopt.training.binding.undo import RandomState, UndoHandle, override_method
from hf_memopt.training.devices import against_float16
from hf_memopt.training.devices.readings import free_failed_step
from hf_memopt.training.techniques import TechniqueCallback
from hf_memopt.training.techniques.nonfinite.indices import example_indices

logger = logging.getLogger(__name__)

CALMER = "lower learning_rate, lengthen warmup_steps or set max_grad_norm=1.0"
ZERO = f"Under fp16 set bf16=True instead; else look there for sqrt, log or a division of zero: add an eps, or {CALMER}"
CASES = {  # what is found, and what to do
    "weights": ("the weights were not finite before it: {where}", f"Go back to the last good checkpoint, and {CALMER}"),
    "inputs": ("the batch itself is not finite, in column {where}", "Mend these examples or leave them out"),
    "forward": ("the output of {where} is not finite, its inputs are", ZERO),
    "loss": (
        "the loss is not finite, what it is computed from is",
        "Look for log(0), a division by zero or a row without labels: add an eps, or leave them out",
    ),
    "gradient": ("the loss is finite, and gradients are not, from {where} back to the inputs", ZERO),
    "unknown": (
        "loss or gradients were not finite",
        f"If it comes again, {CALMER}, or search with torch.autograd.set_detect_anomaly(True)",
    ),
}


@dataclass(frozen=True, slots=True)
class OverflowReport:
    """One step whose loss or gradients were not finite."""

    step: int  # the optimizer step, counted from 1
    case: str = "unknown"  # what was not finite first: one of `CASES`
    where: str = ""  # the module, weight or column
    examples: tuple[int, ...] | None = None  # the indices of its batch in the training data; None if not known
    detail: str = ""  # a cause that is visible in the batch, or why it was not found

    def __str__(self) -> str:
        found, remedy = CASES[self.case]
        detail = self.detail and f" ({self.detail})"
        examples = self.examples and f"; examples {', '.join(map(str, self.examples))}"
        return f"step {self.step}: {found.format(where=self.where)}{detail}{examples or ''}. {remedy}"


@dataclass(frozen=True, slots=True)
class WindowStep:
    """One accumulation step: the arguments of ``training_step``, the random numbers before it, and what came out."""

    inputs: Mapping[str, Any]
    num_items_in_batch: Any
    random_state: RandomState
    is_loss_bad: torch.Tensor  # 0-dimensional


class OverflowCallback(TechniqueCallback):
    """Drop steps with NaN or infinity, report the module and examples where they began, and stop if they continue.

    It overrides ``training_step`` of its one Trainer. A finding is logged as a warning. It adds no keys to the
    Trainer's logs: in a dropped step ``grad_norm`` is not finite, and ``loss`` is what stock's
    ``logging_nan_inf_filter`` makes of it.

    Args:
        max_nonfinite_steps: the run stops at so many of them in all.
        max_in_a_row: and at so many without a good step in between: weights that are bad never recover.

    Attributes:
        reports: one ``OverflowReport`` for each non-finite step that began in this process.
        nonfinite_steps: steps dropped so far, those found by other processes included.
        handle: takes everything off the trainer again; None until it is bound.

    Raises:
        ValueError: a limit is not an integer of 1 or more; when training begins, a setting or another technique is
            incompatible.
        RuntimeError: training began unbound; a limit is reached. The weights are then those of the last good step.
    """

    technique = "non-finite detection"

    def __init__(self, max_nonfinite_steps: int = 10, *, max_in_a_row: int = 3) -> None:
        check_value("max_nonfinite_steps", max_nonfinite_steps, Count, 10)
        check_value("max_in_a_row", max_in_a_row, Count, 3)
        super().__init__(max_nonfinite_steps, max_in_a_row=max_in_a_row)
        self.max_nonfinite_steps, self.max_in_a_row = max_nonfinite_steps, max_in_a_row
        self.reports: list[OverflowReport] = []
        self.nonfinite_steps = self._in_a_row = 0
        self._window: list[WindowStep] = []  # since the last optimizer step

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Watch this trainer's steps; a second ``attach`` makes it the outermost override again."""
        is_fp16, config = versions.mixed_precision(trainer.args) == "fp16", getattr(trainer.model, "config", None)
        if self.binding.trainer is not trainer and is_fp16 and (problem := against_float16(config=config)):
            warnings.warn(
                f"fp16=True is likely to lose steps: {problem}; expected bf16 where the GPU has it, else float32. "
                "Set: fp16=False",
                stacklevel=3,
            )
        self.binding.end()
        self.handle = self.binding.to(trainer, override_method(trainer, "training_step", self._training_step))
        return self.handle

    def _training_step(
        self, before: Callable[..., Any], model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        random_state = RandomState.capture(self.binding.trainer.args.device)
        loss: torch.Tensor = before(model, inputs, num_items_in_batch)
        self._window.append(WindowStep(inputs, num_items_in_batch, random_state, ~torch.isfinite(loss)))
        return loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to run unbound and with incompatible settings, and begin to count."""
        super().on_train_begin(args, state, control, **kwargs)
        check_compatibility(self.binding.serving(self, state))
        self.nonfinite_steps = self._in_a_row = 0
        self.reports.clear()
        self._window.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Drop the step if it is not finite, and report where that began."""
        window, self._window = self._window, []
        if not window:
            return
        trainer = self.binding.trainer
        is_nonfinite, is_elsewhere, bad_losses = read_flags(trainer, [step.is_loss_bad for step in window])
        self._in_a_row = self._in_a_row + 1 if is_nonfinite else 0
        if not is_nonfinite:
            return
        self.nonfinite_steps += 1
        optimizer.zero_grad()  # before the step is repeated, so that it needs no memory for a second set
        found = "Another process found it, see its log"
        if not is_elsewhere:
            report = diagnose(trainer, OverflowReport(state.global_step + 1), window, bad_losses or range(len(window)))
            self.reports.append(report)
            notify(logger, f"non-finite detection dropped {report}")
            found = f"Last, {report}."
        for name, count in (("max_in_a_row", self._in_a_row), ("max_nonfinite_steps", self.nonfinite_steps)):
            if count >= getattr(self, name):
                raise RuntimeError(
                    f"{name}={count} steps up to step {state.global_step + 1} had losses or gradients that are not "
                    f"finite, and were dropped; expected finite ones. {found}"
                )


def read_flags(trainer: Any, is_loss_bad: list[torch.Tensor]) -> tuple[bool, bool, list[int]]:
    """Return, with one wait for the device, whether to drop the step, whether the bad losses are all of other
    processes, and the numbers of the bad ones of this.
    """
    here = torch.stack(is_loss_bad).float()  # (accumulation steps,)
    norm = torch.nn.utils.get_total_norm([one.grad for one in trainer.model.parameters() if one.grad is not None])
    if hasattr(norm, "full_tensor"):  # under FSDP2 each process has a part of it
        norm = norm.full_tensor()
    shared = torch.stack([here.sum(), (~torch.isfinite(norm)).to(here)])  # (2,)
    if trainer.accelerator.num_processes > 1:
        shared = trainer.accelerator.reduce(shared, reduction="sum")
    scaler = trainer.accelerator.scaler
    scale = here.new_zeros(1) if scaler is None else scaler.scale(here.new_ones(1))  # get_scale() waits once more
    any_loss, any_norm, loss_scale, *flags = torch.cat([shared, scale, here]).tolist()
    is_searching = loss_scale >= 1  # then the scaler skips the step; GradScaler too finds a smaller scale suspicious
    bad_losses = [position for position, flag in enumerate(flags) if flag]
    return bool(any_loss or (any_norm and not is_searching)), bool(any_loss and not bad_losses), bad_losses


# ---- Where a step stopped being finite ------------------------------------------------------------------------------


def diagnose(trainer: Any, report: OverflowReport, window: list[WindowStep], suspects: Iterable[int]) -> OverflowReport:
    """Return the report with what was not finite first: weights, inputs, forward pass, loss or gradient.

    ``suspects`` are the numbers of the accumulation steps with a bad loss, or all.
    """
    values = (*trainer.model.named_parameters(), *trainer.model.named_buffers())
    if bad_weights := [name for name, value in values if is_bad(value)]:
        return replace(report, case="weights", where=", ".join(bad_weights[:3]))
    for position in suspects:
        step = window[position]
        bad_columns = [name for name, value in step.inputs.items() if is_bad(value)]
        found = {"case": "inputs", "where": bad_columns[0]} if bad_columns else repeat(trainer, step)
        report = replace(report, examples=example_indices(trainer, position), **found)
        if report.case != "unknown":
            break
    return report


def repeat(trainer: Any, step: WindowStep) -> dict[str, Any]:
    """Repeat the forward pass of an accumulation step, and of a finite loss the backward pass.

    The model is the unwrapped one, so that no other process waits. What the passes change is put back: random numbers,
    buffers, and what the Trainer and its loss hold; the parameters have no gradients then, and nothing is logged.

    Returns:
        What was found, as fields of a report.
    """
    is_stocks = trainer.compute_loss_func is None and is_stock(trainer, "compute_loss")
    if trainer.is_fsdp_enabled or not (trainer.accelerator.num_processes == 1 or is_stocks):
        return {"detail": "other processes would have to repeat it, too"}
    model, inputs = trainer.model, send_to_device(dict(step.inputs), trainer.args.device)
    state = StepState(trainer, keeps_norms=False, largest_copy_bytes=sys.maxsize)
    try:
        with (
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),  # else each hook would be compiled
            override_method(trainer, "log", lambda before, *args, **kwargs: None),  # a loss may log
        ):
            step.random_state.restore()
            # the hooks end before what checkpointing repeats
            with first_bad_module(model) as found, trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=step.num_items_in_batch).mean()
            if torch.isfinite(loss):
                found = bad_gradient(model, loss)
            elif not found:
                labels = inputs.get("labels")
                is_empty = torch.is_tensor(labels) and bool((labels == IGNORED_LABEL).all())
                found = {"case": "loss", "detail": f"every label is {IGNORED_LABEL}" if is_empty else ""}
    except Exception as error:  # of the model or compute_loss, or for lack of memory: it must not end the run
        found = {"detail": f"it cannot be repeated: {reason(error).partition(chr(10))[0]}"}
    free_failed_step()
    model.zero_grad()
    state.restore()
    return found


@contextmanager
def first_bad_module(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Name the first module whose inputs are finite and whose outputs are not.

    Calls end from the inside outwards, so of nested calls the innermost is noted. Where a module's own code makes bad
    values between two of its children, the second child has bad inputs, so the module itself is noted.
    """
    found: dict[str, Any] = {}

    def look(name: str, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        values = [tensor for tensor in tensors_in(outputs) if tensor.dim()]  # without the loss
        if not found and is_bad(values) and not is_bad((args, kwargs)):
            found.update(case="forward", where=f"{name or 'the model itself'} ({type(module).__name__})")

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, name), with_kwargs=True))
        yield found


def bad_gradient(model: nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    """Run the backward pass, and name the first weight in it whose gradient is not finite: the last one of the forward
    pass.
    """
    names: list[str] = []

    def look(name: str, weight: torch.Tensor) -> None:
        if weight.grad is not None and not torch.nn.utils.get_total_norm([weight.grad]).isfinite():
            names.append(name)

    with ExitStack() as hooks:
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                handle = weight.register_post_accumulate_grad_hook(partial(look, name))  # type: ignore[no-untyped-call]
                hooks.enter_context(handle)
        loss.backward()  # type: ignore[no-untyped-call]
    return {"case": "gradient", "where": names[0]} if names else {"detail": "and are when the step is repeated"}


def is_bad(value: Any) -> bool:
    """Return whether floating point tensors in nested mappings, lists and tuples are not finite.

    Minus infinity counts as finite where no gradient goes through: masks have it.
    """
    return any(_is_bad(tensor) for tensor in tensors_in(value) if tensor.is_floating_point())


def _is_bad(tensor: torch.Tensor) -> bool:
    with torch.no_grad():  # else checkpointing would find other saved tensors in a forward pass with hooks
        values = getattr(tensor, "to_local", lambda: tensor)()  # of a sharded tensor what this process holds
        values = values if values.element_size() > 1 else values.float()  # of 8 bits torch has no isfinite
        finite = torch.isfinite(values)
        return not bool((finite if tensor.requires_grad else finite | torch.isneginf(values)).all())
