"""Repeat a forward and backward pass and watch every module for the place where values stop being finite.

Random numbers, gradients and buffers are afterwards what they were, and no hook stays.

Limitations: state that a module keeps in plain attributes; a module that returns infinities on purpose, which is taken
for the cause of a bad loss; and losses that call other processes (a contrastive loss that gathers): only the process
where the step was not finite repeats it, so it would wait for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device
from torch import nn

from hf_memopt.binding.model_traits import local_part
from hf_memopt.binding.nested_tensors import tensors_in
from hf_memopt.devices.random_state import RandomState
from hf_memopt.techniques.microbatching.splitting import take_rows

__all__ = ["Extent", "Place", "Replay", "StepInputs", "bad_gradients", "bad_weights", "replay"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arguments of one ``training_step``, and the state of the random number generators before it."""

    inputs: Mapping[str, Any]
    num_items_in_batch: Any
    random_state: RandomState


@dataclass(frozen=True, slots=True)
class Extent:
    """The floating point tensors of one value: whether they are finite, and their largest finite magnitude.

    ``only_scalars``: those that are not finite are all 0-dimensional, as a model's loss among its outputs. Among the
    inputs of a module (``allow_masks``), minus infinity counts as finite where no gradient goes through: masks have it.
    """

    is_finite: bool
    largest: float
    dtype: str
    only_scalars: bool

    @classmethod
    def of(cls, value: Any, *, allow_masks: bool = False) -> Extent | None:
        """Return the extent of all tensors in nested mappings, lists and tuples; None if there are none."""
        tensors = _tensors(value)
        if not tensors:
            return None
        bad = [tensor for tensor in tensors if not _is_finite(tensor, allow_masks)]
        largest, shown = max(((_largest(tensor), tensor) for tensor in bad or tensors), key=lambda pair: pair[0])
        dtype = str(shown.dtype).removeprefix("torch.")
        return cls(not bad, largest, dtype, bool(bad) and all(tensor.dim() == 0 for tensor in bad))


@dataclass(slots=True)
class Place:
    """One call of a module: its inputs and outputs, and the gradients of both."""

    name: str
    module: nn.Module
    inputs: Extent | None = None
    outputs: Extent | None = None
    output_gradients: list[Extent] = field(default_factory=list)
    input_gradients: list[Extent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a repeated forward and backward pass showed.

    ``forward`` and ``backward`` are the innermost calls in which values or gradients stop being finite; None if all are
    finite, or if that happens outside the model.
    """

    is_loss_finite: bool
    forward: Place | None
    backward: Place | None
    bad_gradients: tuple[str, ...]

    def shows(self, is_loss_bad: bool) -> bool:
        """Return whether this is what was seen in training: a bad loss, or a bad gradient under a finite loss."""
        return not self.is_loss_finite if is_loss_bad else self.is_loss_finite and bool(self.bad_gradients)


def replay(
    trainer: Any, step_inputs: StepInputs, rows: Sequence[int] | None = None, *, scale: float | None = None
) -> Replay:
    """Repeat a forward and backward pass, of some rows or of all, and watch every module.

    The model is the unwrapped one, so that no other process waits; autocast works as in training. Random numbers,
    gradients and buffers are put back, also where it raises.
    """
    model, device = trainer.model, trainer.args.device
    # Eager mode, else each hook and each row would be compiled.
    inputs = send_to_device(dict(step_inputs.inputs), device)
    if rows is not None:
        inputs = take_rows(inputs, rows)
    with (
        torch.compiler.set_stance("force_eager"),
        _unchanged(model, device),
        _watched(model) as calls,
        torch.enable_grad(),
    ):
        step_inputs.random_state.restore()
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=step_inputs.num_items_in_batch).mean()
        is_loss_finite = bool(torch.isfinite(loss))
        if is_loss_finite and loss.requires_grad:
            (loss if scale is None else loss * scale).backward()
        gradients = bad_gradients(model)
        backward = _backward_origin(calls, model) if gradients else None
        return Replay(is_loss_finite, _forward_origin(calls), backward, gradients)


def bad_gradients(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient is not finite, in this process's shard of it."""
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not _is_finite(_values(parameter.grad))
    )


def bad_weights(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that are not finite; a buffer may be a mask."""
    parameters = [name for name, value in model.named_parameters() if _is_bad(value, allow_masks=False)]
    return (*parameters, *(name for name, value in model.named_buffers() if _is_bad(value, allow_masks=True)))


# ---- Watching -------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[Place]]:
    """Record every call of a module, in the order in which they end, with the extent of its values and gradients.

    A gradient hook sees the whole gradient of a tensor, added up over all modules that use it. To see the gradient that
    comes through one module alone, the module is given views of its inputs: a view has only this module's gradient.
    """
    calls: list[Place] = []
    running: list[Place] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        place = Place(names[module], module, inputs=Extent.of((args, kwargs), allow_masks=True))
        running.append(place)
        views: dict[int, torch.Tensor] = {}  # by the tensor's id: a tensor that is passed twice stays one

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in views:
                views[id(tensor)] = tensor.view_as(tensor)
                _on_gradient(views[id(tensor)], place.input_gradients)
            return views[id(tensor)]

        return recursively_apply(view, args), recursively_apply(view, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        while running and running[-1].module is not module:  # a call that recomputation under checkpointing broke off
            running.pop()
        if running:
            place = running.pop()
            place.outputs = Extent.of(outputs)
            calls.append(place)
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    _on_gradient(tensor, place.output_gradients)

    names = {module: name for name, module in model.named_modules()}
    hooks = []
    try:
        for module in names:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _on_gradient(tensor: Any, extents: list[Extent]) -> None:
    """Record the extent of a tensor's gradient when it is computed."""

    def record(gradient: torch.Tensor) -> None:
        extent = Extent.of(gradient)
        if extent is not None:
            extents.append(extent)

    tensor.register_hook(record)


def _forward_origin(calls: Sequence[Place]) -> Place | None:
    """Return the first call to end with bad outputs among those with finite inputs.

    Calls end from the inside outwards, so that is the innermost one. Where a module's own code makes bad values between
    two of its children, the second child has bad inputs, so the module itself is returned.
    """
    for place in calls:
        if (
            place.outputs is not None
            and not place.outputs.is_finite
            and (place.inputs is None or place.inputs.is_finite)
        ):
            return place
    return None


def _backward_origin(calls: Sequence[Place], model: nn.Module) -> Place | None:
    """Return the innermost call whose output gradients are finite and whose input or weight gradients are not.

    Every module around the origin is accused too, since its output gradients are finite and its weights' are not: of
    this chain of modules inside each other the deepest is the origin. (The order in which calls end does not show it,
    since a checkpointed layer ends a second time in the backward pass.)
    """
    holders = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    names = set(bad_gradients(model))
    # a tied weight gets gradients from several modules, so it is no evidence against any of them
    bad = {id(one) for name, one in model.named_parameters() if name in names and holders[id(one)] == 1}
    accused = [
        place
        for place in calls
        if place.output_gradients
        and all(extent.is_finite for extent in place.output_gradients)
        and (
            not all(extent.is_finite for extent in place.input_gradients)
            or any(id(parameter) in bad for parameter in place.module.parameters())
        )
    ]
    return max(accused, key=lambda place: _depth(place.name), default=None)


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put gradients, buffers and random numbers back afterwards; inside, the parameters have no gradients."""
    random_state = RandomState.capture(device)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                if module.get_buffer(name) is not buffer:
                    setattr(module, name, buffer)
        random_state.restore()


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating point tensors in nested mappings (a ``ModelOutput`` too), lists and tuples."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)


def _is_bad(value: torch.Tensor, *, allow_masks: bool) -> bool:
    return value.is_floating_point() and not _is_finite(local_part(value), allow_masks)


def _is_finite(tensor: torch.Tensor, allow_masks: bool = False) -> bool:
    finite = torch.isfinite(tensor)
    if allow_masks and not tensor.requires_grad:
        finite |= torch.isneginf(tensor)
    return bool(finite.all())


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude; 0.0 where nothing is finite."""
    magnitudes = tensor.detach().abs()
    magnitudes = magnitudes[torch.isfinite(magnitudes)]
    return float(magnitudes.max()) if magnitudes.numel() else 0.0
