"""Train a few steps without a trace: afterwards the Trainer is as if it had never trained.

What is trained is copied to the host and put back, so a run of the weights' size needs as much host memory besides.
Optimizer, scheduler, state, control and loaders that the steps make are dropped; callbacks, views and arguments get
their attributes back; random numbers go on where they were.

Limitations: what a callback or a collator has written to a file or sent away, and a stream that can be read only once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback

from hf_memopt.binding.handles import override_method, set_attribute
from hf_memopt.binding.kept_state import FOREIGN, KeptState
from hf_memopt.binding.model_traits import unwrap_optimizer
from hf_memopt.devices.random_state import RandomState
from hf_memopt.memory.report import MemoryReportCallback

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["restored"]

_LIBRARIES = tuple(name for name in FOREIGN if name != "hf_memopt")
_REPORTING = (ProgressCallback, PrinterCallback, MemoryReportCallback)
_SINKS = "transformers.integrations"  # the module of W&B's, TensorBoard's and other callbacks; seen in 5.8.1 to 5.23.0


@contextmanager
def restored(trainer: Trainer) -> Iterator[None]:
    """Let the trainer train inside without logs, checkpoints, evaluation and reports; put everything back afterwards.

    Callbacks of ``report_to``, progress bars and memory reports are set aside; all others run.
    """
    model: Any = trainer.model
    handler, accelerator = trainer.callback_handler, trainer.accelerator
    kept = KeptState(_LIBRARIES, what="a measured step")
    objects = [trainer, trainer.args, trainer.control, handler, *handler.callbacks, trainer.train_dataset]
    for one in (*objects, accelerator, accelerator.gradient_state):
        if hasattr(one, "__dict__"):
            kept.look_at(one)
    of_model = KeptState(_LIBRARIES, largest_copy_bytes=2**62)  # buffers of any size
    for module in model.modules():
        of_model.look_at(module)
    with ExitStack() as stack:
        random_state = RandomState.capture(trainer.args.device)
        stack.callback(random_state.restore)
        before = unwrap_optimizer(trainer.optimizer)
        restoring = (_modes(model), _weights(model), _optimizer(before), _scaler(accelerator.scaler))
        for restore in (kept.restore, of_model.restore, *restoring):
            stack.callback(restore)
        handler.callbacks[:] = [one for one in handler.callbacks if not _reports(one)]
        stack.enter_context(override_method(trainer, "log", lambda before: lambda *args, **kwargs: None))
        for name in ("eval_on_start", "load_best_model_at_end", "auto_find_batch_size", "push_to_hub"):
            stack.callback(set_attribute(trainer.args, name, False).remove)
        try:
            yield
        finally:
            if (made := unwrap_optimizer(trainer.optimizer)) is not before and hasattr(made, "handle"):
                made.handle.remove()  # the hooks by which gradients are released
            accelerator.free_memory()


def _reports(callback: Any) -> bool:
    return isinstance(callback, _REPORTING) or type(callback).__module__.startswith(_SINKS)


def _modes(model: nn.Module) -> Callable[[], None]:
    """Return what gives every module its mode back."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


def _weights(model: nn.Module) -> Callable[[], None]:
    """Return what gives trainable parameters their values, gradients and flags back; frozen ones their flags."""
    before = [
        (one, one.requires_grad, one.grad, one.data, _on_host(one.data) if one.requires_grad else None)
        for one in model.parameters()
    ]

    def restore() -> None:
        for parameter, requires_grad, gradient, data, values in before:
            if values is not None:
                parameter.data = data.copy_(values)
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient

    return restore


def _optimizer(optimizer: Any) -> Callable[[], None]:
    """Return what gives an optimizer that the Trainer has already its state and options back."""
    if optimizer is None:
        return lambda: None
    groups = [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups]
    states = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
    own = dict(vars(optimizer))

    def restore() -> None:
        for group, options in groups:
            group.clear()
            group.update(options)
        for parameter in [one for one in optimizer.state if one not in states]:
            del optimizer.state[parameter]
        for parameter, values in states.items():
            _put_back(optimizer.state[parameter], values)
        vars(optimizer).clear()  # a scheduler wraps its step
        vars(optimizer).update(own)

    return restore


def _copied(state: Any) -> dict[Any, tuple[Any, Any]]:
    return {
        name: (value, _on_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value))
        for name, value in state.items()
    }


def _put_back(state: Any, values: dict[Any, tuple[Any, Any]]) -> None:
    state.clear()
    for name, (held, value) in values.items():
        state[name] = held.copy_(value) if isinstance(held, torch.Tensor) else value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _scaler(scaler: Any) -> Callable[[], None]:
    """Return what gives fp16's gradient scaler its scale back."""
    if scaler is None:
        return lambda: None
    before = scaler.state_dict()
    return lambda: scaler.load_state_dict(before) if before else None
