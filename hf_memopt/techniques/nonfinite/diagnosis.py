"""Find where a step stopped being finite: it is repeated once, with hooks on every module in its forward pass.

Cases are ruled out in this order, as each can only be blamed once those before it are known to be finite: weights,
inputs, forward, loss, gradient; "unknown" is a step that is finite when it is repeated, or that cannot be.

Limitations: a module that returns infinities on purpose is taken for the cause of a bad loss. The rows of a bad
gradient are all of its accumulation step; the weight that is named is the last one of the forward pass with such a
gradient. Under FSDP2, or with several processes under a ``compute_loss`` that is not stock's, nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding.losses import is_stock
from hf_memopt.binding.model import IGNORED_LABEL, tensors_in
from hf_memopt.binding.trials import StepState, count_rows
from hf_memopt.binding.undo import RandomState, override_method
from hf_memopt.devices.readings import free_failed_step
from hf_memopt.errors import reason

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
    case: str  # what was not finite first: one of `CASES`
    where: str = ""  # the module, weight or column; empty if it is outside the model or not known
    rows: tuple[int, ...] = ()  # the rows of its accumulation step that show it; empty if no single rows do
    examples: tuple[int, ...] | None = None  # their indices in the training data, or of all rows; None if not known
    detail: str = ""  # a cause that is visible in the batch, or why it was not found

    def __str__(self) -> str:
        found, remedy = CASES[self.case]
        detail = self.detail and f" ({self.detail})"
        numbers = (("rows", self.rows), ("examples", self.examples or ()))
        rows = "".join(
            f"; {name} {', '.join(map(str, of[:10]))}{' ...' * (len(of) > 10)}" for name, of in numbers if of
        )
        return f"step {self.step}: {found.format(where=self.where or 'the loss')}{detail}{rows}. {remedy}"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arguments of one ``training_step``, and the state of the random number generators before it."""

    inputs: Mapping[str, Any]
    num_items_in_batch: Any
    random_state: RandomState


def diagnose(
    trainer: Any, window: Mapping[int, StepInputs], report: OverflowReport, *, is_loss_bad: bool, is_scaled: bool
) -> tuple[OverflowReport, int | None]:
    """Return ``report`` completed, and the accumulation step in ``window`` that shows it; None where none does.

    ``window`` has the accumulation steps with a bad loss, or all, by their numbers; under a loss scale (``is_scaled``)
    gradients may be finite without it.
    """
    model = trainer.model
    weights = [name for name, value in model.named_parameters() if bad_tensors(value)]
    weights += [name for name, value in model.named_buffers() if bad_tensors(value, allow_masks=True)]
    if weights:
        return replace(report, case="weights", where=", ".join(weights[:3])), None
    for position, step in window.items():
        for column, value in step.inputs.items():
            if bad := bad_tensors(value, allow_masks=True):
                rows = _bad_rows(bad, count_rows(step.inputs), allow_masks=True)
                return replace(report, case="inputs", where=column, rows=rows), position
    if others := _needs_others(trainer):
        is_gradient = not (is_loss_bad or is_scaled)
        found = replace(report, case="gradient" if is_gradient else "unknown", detail=others)
        return found, next(iter(window)) if is_loss_bad else None
    detail = "and are when the step is repeated"
    for position, step in window.items():
        watch = _repeated(trainer, step)
        detail = watch.problem or detail
        if is_loss_bad and not (watch.is_loss_finite or watch.problem):
            labels = step.inputs.get("labels")
            is_empty = torch.is_tensor(labels) and labels.dim() > 0 and bool((labels == IGNORED_LABEL).all())
            of_loss = {"case": "loss", "detail": f"every label is {IGNORED_LABEL}" if is_empty else ""}
            return replace(report, **(watch.found or of_loss)), position
        if not is_loss_bad and watch.gradients:
            return replace(report, case="gradient", where=max(watch.gradients, key=watch.place_of)), position
    return replace(report, detail=detail), next(iter(window)) if is_loss_bad else None


def _needs_others(trainer: Any) -> str:
    """Return why a forward pass may need all processes; "" where one repeats it alone."""
    if trainer.is_fsdp_enabled:
        return "its sharded weights are gathered by all processes together"
    is_stocks = trainer.compute_loss_func is None and is_stock(trainer, "compute_loss")
    is_alone = trainer.accelerator.num_processes == 1 or is_stocks
    return "" if is_alone else "its compute_loss may gather from all processes"


def _repeated(trainer: Any, step: StepInputs) -> Watch:
    """Repeat the forward pass of an accumulation step with its random numbers, and of a finite loss the backward pass.

    The model is the unwrapped one, so that no other process waits. What the passes change is put back: random numbers,
    buffers, and what the Trainer and its loss hold; the parameters have no gradients then, and nothing is logged.
    """
    model, inputs = trainer.model, send_to_device(dict(step.inputs), trainer.args.device)
    state = StepState(trainer, others=model.buffers())
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    watch = Watch(model, count_rows(inputs))
    try:
        with (
            torch.enable_grad(),
            torch.compiler.set_stance("force_eager"),  # else each hook would be compiled
            override_method(trainer, "log", lambda before, *args, **kwargs: None),  # a loss may log
        ):
            step.random_state.restore()
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs, num_items_in_batch=step.num_items_in_batch).mean()
            watch.end()  # before what checkpointing repeats
            watch.is_loss_finite = bool(torch.isfinite(loss))
            if watch.is_loss_finite and loss.requires_grad:
                loss.backward()
            watch.gradients = [name for name, weight in model.named_parameters() if bad_tensors(weight.grad)]
    except Exception as error:  # of the model or compute_loss, or for lack of memory: it must not end the run
        watch.problem = f"it cannot be repeated: {reason(error).partition(chr(10))[0]}"
    watch.end()
    free_failed_step()
    model.zero_grad()
    with torch.no_grad():
        for name, value in buffers.items():
            model.get_buffer(name).copy_(value)
    state.restore()
    return watch


class Watch:
    """Hooks that note the call of a module in which values first stop being finite.

    Calls end from the inside outwards, so of nested calls the innermost is noted. Where a module's own code makes bad
    values between two of its children, the second child has bad inputs, so the module itself is noted.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.found: dict[str, Any] = {}  # where values stop being finite, as fields of a report
        self.is_loss_finite, self.problem = False, ""  # what kept the passes from being repeated
        self.gradients: list[str] = []  # the parameters whose gradients are not finite
        self._rows, self._ended = rows, [*dict(model.named_parameters())]
        self._names = {module: name for name, module in model.named_modules()}
        self._were_fed_well: list[bool] = []  # of the modules that run, from the outside inwards
        self._hooks = [one.register_forward_pre_hook(self._before, with_kwargs=True) for one in self._names]
        self._hooks += [one.register_forward_hook(self._after) for one in self._names]

    def place_of(self, parameter: str) -> int:
        """Return how late in the forward pass the module of a parameter ended."""
        module = parameter.rpartition(".")[0]
        return max((at for at, name in enumerate(self._ended) if name == module), default=-1)

    def end(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._were_fed_well.append(not bad_tensors((args, kwargs), allow_masks=True))

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> None:
        was_fed_well, bad = self._were_fed_well.pop(), bad_tensors(outputs)
        self._ended.append(self._names[module])
        is_loss = all(tensor.dim() == 0 for tensor in bad)  # among the outputs of the model
        if bad and not is_loss and was_fed_well and not self.found:
            named = f"{self._names[module] or 'the model itself'} ({type(module).__name__})"
            self.found = {"case": "forward", "where": named, "rows": ()}
        if bad and self.found:  # some modules (experts) get the tokens of all rows in one dimension: later ones tell
            self.found["rows"] = self.found["rows"] or _bad_rows(bad, self._rows)


# ---- Values ---------------------------------------------------------------------------------------------------------


def bad_tensors(value: Any, *, allow_masks: bool = False) -> list[torch.Tensor]:
    """Return the floating point tensors in nested mappings, lists and tuples that are not finite.

    Minus infinity counts as finite where no gradient goes through, if ``allow_masks``: masks have it.
    """
    floating = [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
    return [tensor for tensor in floating if not _finite(tensor, allow_masks).all()]


def _finite(tensor: torch.Tensor, allow_masks: bool) -> torch.Tensor:
    # of a sharded tensor (DTensor) what this process holds
    values = tensor.coalesce().values() if tensor.is_sparse else getattr(tensor, "to_local", lambda: tensor)()
    with torch.no_grad():  # else checkpointing would find other saved tensors in a forward pass with hooks
        values = values if values.element_size() > 1 else values.float()  # of 8 bits torch has no isfinite
        finite = torch.isfinite(values)
        return finite | torch.isneginf(values) if allow_masks and not tensor.requires_grad else finite


def _bad_rows(bad: list[torch.Tensor], rows: int, *, allow_masks: bool = False) -> tuple[int, ...]:
    """Return the rows, of so many, in which tensors of shape (rows, ...) are not finite."""
    of_rows = [_finite(tensor, allow_masks).reshape(rows, -1).all(1) for tensor in bad if tensor.shape[:1] == (rows,)]
    return tuple(torch.stack(of_rows).all(0).logical_not().nonzero().flatten().tolist()) if of_rows else ()
