"""Find where a step stopped being finite: its accumulation steps are repeated, with hooks on every module.

Cases are ruled out in this order, as each can only be blamed once those before it are known to be finite: weights,
inputs, forward, loss, gradient, loss scale (gradients are finite, but not times that of fp16); "unknown" is a step that
is finite when it is repeated.

An accumulation step is repeated as it was, with its random numbers. The rows are those of the first values that are not
finite; a loss has no rows, so of one whose inputs are finite only rows without labels are told.

Only the process where a step was not finite repeats it. With several, a step under FSDP2 or under a ``compute_loss``
that is not stock's (TRL's gathers metrics from all) is therefore told by what is seen without a forward pass.

Limitations: a module that returns infinities on purpose, which is taken for the cause of a bad loss; and models whose
forward pass calls other processes (a contrastive loss that gathers), which would wait for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_memopt.binding.losses import is_stock
from hf_memopt.binding.model import IGNORED_LABEL, tensors_in
from hf_memopt.binding.trials import StepState, count_rows, row_count
from hf_memopt.binding.undo import RandomState, override_method
from hf_memopt.devices.readings import free_failed_step
from hf_memopt.techniques.nonfinite.report import OverflowReport

MOST_NAMES = 3  # of weights in a report
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arguments of one ``training_step``, and the state of the random number generators before it."""

    inputs: Mapping[str, Any]
    num_items_in_batch: Any
    random_state: RandomState


def diagnose(
    trainer: Any,
    window: Sequence[StepInputs],
    is_loss_bad: Sequence[bool],
    report: OverflowReport,
    gradients: Sequence[str] = (),
) -> OverflowReport:
    """Return ``report`` completed with what a repetition of the step, its accumulation steps in ``window``, shows.

    Where a forward pass may need all processes, only what is seen without one is told; ``gradients`` are the parameters
    there whose gradients were not finite.
    """
    failures: list[str] = []
    if weights := _attempted(partial(_bad_weights, trainer.model), failures):
        return replace(report, case="weights", where=weights[0], parameters=weights[:MOST_NAMES])
    suspects = [position for position, is_bad in enumerate(is_loss_bad) if is_bad] or list(range(len(window)))
    for position in suspects:
        if (found := _bad_column(window[position].inputs, replace(report, accumulation_step=position))) is not None:
            return found
    others = needs_others(trainer)
    if others and any(is_loss_bad):
        return replace(report, accumulation_step=suspects[0], detail=others)
    if others and report.loss_scale is not None:  # gradients may be finite but for it
        return replace(report, detail=others)
    if others:
        return replace(report, case="gradient", parameters=tuple(gradients[:MOST_NAMES]))
    for scale in (None,) if report.loss_scale is None else (None, report.loss_scale):
        for position in suspects:
            here = replace(report, accumulation_step=position)
            repeat = partial(_repeated, trainer, window[position], is_loss_bad[position], here, scale)
            if (found := _attempted(repeat, failures)) is not None:
                return found if scale is None else replace(found, case="loss scale")
    return replace(report, detail=failures[-1] if failures else "")


def needs_others(trainer: Any) -> str:
    """Return why a forward pass may need all processes; "" where one repeats it alone."""
    if trainer.is_fsdp_enabled:
        return "sharded weights, which all processes gather together"
    is_stocks = trainer.compute_loss_func is None and is_stock(trainer, "compute_loss")
    if trainer.accelerator.num_processes == 1 or is_stocks:
        return ""
    return "a loss of its own, which may gather from all processes"


def _attempted(attempt: Callable[[], Found], failures: list[str]) -> Found | None:
    """Return the result of an attempt; None if it fails, for lack of memory say, which must not end the run."""
    try:
        return attempt()
    except Exception as error:  # anything that the user's model or compute_loss raises
        failures.append(f"{type(error).__name__}: {error}")
    free_failed_step()
    return None


def _bad_column(inputs: Mapping[str, Any], report: OverflowReport) -> OverflowReport | None:
    """Report the first column of a batch that is not finite."""
    for column, value in inputs.items():
        if bad := bad_tensors(value, allow_masks=True):
            rows = _bad_rows(bad, row_count(inputs), allow_masks=True)
            report = replace(report, case="inputs", where=column, rows=rows, dtype=_dtype(bad))
            return replace(report, largest_value=_largest(bad))
    return None


def _repeated(
    trainer: Any, step_inputs: StepInputs, is_loss_bad: bool, report: OverflowReport, scale: float | None
) -> OverflowReport | None:
    """Repeat an accumulation step, and complete the report; None if that does not show what was seen in training: a bad
    loss, or a bad gradient under a finite loss.
    """
    watch = replay(trainer, step_inputs, scale)
    if is_loss_bad is watch.is_loss_finite or not (is_loss_bad or watch.bad_gradients):
        return None
    if watch.is_loss_finite:
        return replace(report, case="gradient", parameters=watch.bad_gradients[:MOST_NAMES], **watch.backward)
    if watch.forward:
        return replace(report, case="forward", **watch.forward)
    labels = step_inputs.inputs.get("labels")
    if torch.is_tensor(labels) and labels.dim() > 0 and bool((labels == IGNORED_LABEL).all()):
        detail = f"every label there is {IGNORED_LABEL}, so none counts"
        return replace(report, case="loss", detail=detail, rows=tuple(range(len(labels))))
    return replace(report, case="loss")


# ---- Repetition -----------------------------------------------------------------------------------------------------


def replay(trainer: Any, step_inputs: StepInputs, scale: float | None = None) -> Watch:
    """Repeat the forward and backward pass of an accumulation step, and watch every module.

    The model is the unwrapped one, so that no other process waits; autocast works as in training. Random numbers,
    buffers and what the Trainer and its loss hold are put back, also where it raises; the parameters have no gradients
    afterwards, and nothing is logged.
    """
    model, device = trainer.model, trainer.args.device
    inputs = send_to_device(dict(step_inputs.inputs), device)
    watch = Watch(model, count_rows(inputs))
    with (
        torch.compiler.set_stance("force_eager"),  # else each hook would be compiled
        _unchanged(trainer),
        override_method(trainer, "log", lambda before, *args, **kwargs: None),  # a loss may log
        watch.hooks(),
        torch.enable_grad(),
    ):
        step_inputs.random_state.restore()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=step_inputs.num_items_in_batch).mean()
        watch.is_loss_finite = bool(torch.isfinite(loss))
        if watch.is_loss_finite and loss.requires_grad:
            (loss if scale is None else loss * scale).backward()
        watch.bad_gradients = bad_gradients(model)
    return watch


class Watch:
    """Hooks that note the call of a module in which values, and then gradients, first stop being finite.

    Calls end from the inside outwards, so of nested calls the innermost is noted. Where a module's own code makes bad
    values between two of its children, the second child has bad inputs, so the module itself is noted.

    A gradient hook sees the whole gradient of a tensor, added up over all modules that use it. To see the gradient that
    comes through one module alone, the module is given views of its inputs: a view has only this module's gradient. If
    the first bad gradient is that of a module's output, it comes from the code of the module around.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.is_loss_finite = True
        self.bad_gradients: tuple[str, ...] = ()  # the weights whose gradients are not finite
        self.forward: dict[
            str, Any
        ] = {}  # where values stop being finite, as fields of a report; none outside the model
        self.backward: dict[str, Any] = {}  # the same of gradients
        self._rows = rows
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[tuple[nn.Module, bool]] = []  # each with whether its inputs were finite
        self._is_backward_bad = False
        self._around: nn.Module | None = None  # the module that was noted for the gradient of an output within it

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch every module and every weight."""
        holders = Counter(parameter for module in self._names for parameter in module.parameters(recurse=False))
        hooks = []
        try:
            for module in self._names:
                hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                hooks.append(module.register_forward_hook(self._after, with_kwargs=True))
                for weight in module.parameters(recurse=False):
                    # a tied weight gets gradients from several modules, so it is no evidence against any of them
                    if weight.requires_grad and holders[weight] == 1:
                        hooks.append(_hook(weight, partial(self._on_gradient, module, rows=0)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._running.append((module, not bad_tensors((args, kwargs), allow_masks=True)))
        views: dict[int, torch.Tensor] = {}  # by the tensor's id: a tensor that is passed twice stays one

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in views:
                views[id(tensor)] = tensor.view_as(tensor)
                _hook(views[id(tensor)], partial(self._on_gradient, module, rows=self._rows))
            return views[id(tensor)]

        return recursively_apply(view, args), recursively_apply(view, kwargs)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        while self._running and self._running[-1][0] is not module:  # recomputation under checkpointing broke off
            self._running.pop()
        if not self._running:
            return
        _, was_fed_well = self._running.pop()
        around = self._running[-1][0] if self._running else None
        if bad := bad_tensors(outputs):
            is_loss = all(tensor.dim() == 0 for tensor in bad)  # among the outputs of the model
            if not self.forward and was_fed_well and not is_loss:
                self.forward = self._noted(module, bad)
                self.forward |= {"largest_value": _largest(bad), "largest_input": _largest((args, kwargs))}
            if self.forward:  # some modules (experts) get the tokens of all rows in one dimension: later ones tell
                self.forward["rows"] = self.forward["rows"] or _bad_rows(bad, self._rows)
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                _hook(tensor, partial(self._on_gradient, around, rows=self._rows, output_of=module))

    def _on_gradient(
        self, module: nn.Module | None, gradient: torch.Tensor, *, rows: int, output_of: nn.Module | None = None
    ) -> None:
        """Note the module to blame if this gradient is the first that is not finite; None: code outside the model."""
        if not (bad := bad_tensors(gradient)):
            return
        # the output of a module may also be that of the module around it
        if not self._is_backward_bad or (output_of is not None and output_of is self._around):
            self._is_backward_bad = True
            self._around = None if output_of is None else module
            self.backward = {"rows": ()} if module is None else self._noted(module, bad)
        self.backward["rows"] = self.backward["rows"] or _bad_rows(bad, rows)

    def _noted(self, module: nn.Module, bad: list[torch.Tensor]) -> dict[str, Any]:
        name = type(module).__name__
        return {"where": self._names[module], "module_class": name, "dtype": _dtype(bad), "rows": ()}


def _hook(tensor: Any, on_gradient: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(on_gradient)
    return handle


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Put back what a step changes, buffers of any size too; the parameters have no gradients before and after."""
    model = trainer.model
    state = StepState(trainer, others=model.buffers())
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for name, value in buffers.items():
                model.get_buffer(name).copy_(value)
        state.restore()


# ---- Values ---------------------------------------------------------------------------------------------------------


def bad_gradients(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient is not finite, in this process's shard of it."""
    return tuple(name for name, parameter in model.named_parameters() if bad_tensors(parameter.grad))


def _bad_weights(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that are not finite; a buffer may be a mask."""
    parameters = [name for name, value in model.named_parameters() if bad_tensors(value)]
    return (*parameters, *(name for name, value in model.named_buffers() if bad_tensors(value, allow_masks=True)))


def bad_tensors(value: Any, *, allow_masks: bool = False) -> list[torch.Tensor]:
    """Return the floating point tensors in nested mappings, lists and tuples that are not finite.

    Minus infinity counts as finite where no gradient goes through, if ``allow_masks``: masks have it.
    """
    floating = [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
    return [tensor for tensor in floating if not _finite(tensor, allow_masks).all()]


def _finite(tensor: torch.Tensor, allow_masks: bool) -> torch.Tensor:
    # of a sharded tensor (DTensor) what this process holds
    values = tensor.coalesce().values() if tensor.is_sparse else getattr(tensor, "to_local", lambda: tensor)()
    finite = torch.isfinite(values)
    return finite | torch.isneginf(values) if allow_masks and not tensor.requires_grad else finite


def _bad_rows(bad: list[torch.Tensor], rows: int, *, allow_masks: bool = False) -> tuple[int, ...]:
    """Return the rows, of so many, in which tensors of shape (rows, ...) are not finite."""
    of_rows = [_finite(tensor, allow_masks).reshape(rows, -1).all(1) for tensor in bad if tensor.shape[:1] == (rows,)]
    return tuple(torch.stack(of_rows).all(0).logical_not().nonzero().flatten().tolist()) if of_rows else ()


def _dtype(tensors: list[torch.Tensor]) -> str:
    return str(tensors[0].dtype).removeprefix("torch.")


def _largest(value: Any) -> float | None:
    """Return the largest finite magnitude of floating point tensors, 0.0 where nothing is finite; None without any."""
    floating = [tensor.detach().abs() for tensor in tensors_in(value) if tensor.is_floating_point()]
    return max((float(torch.where(one.isfinite(), one, 0).max()) for one in floating if one.numel()), default=None)
