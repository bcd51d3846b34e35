"""Let a Trainer that is kept train a few steps without a trace: afterwards it is as if it had never trained.

What is trained is copied to the host and put back, so a run of the weights' size needs as much host memory besides.
Optimizer, scheduler, state, control and loaders that the steps make are dropped; callbacks, views and arguments get
their attributes back; random numbers go on where they were. A script's process, which ends after its steps, needs none
of it.

Limitations: what a callback or a collator has written to a file or sent away, and a stream that can be read only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.model import unwrap_optimizer
from hf_memopt.binding.undo import FOREIGN, KeptState, RandomState

if TYPE_CHECKING:
    from transformers import Trainer

_LIBRARIES = tuple(name for name in FOREIGN if name != "hf_memopt")


@contextmanager
def restored(trainer: Trainer) -> Iterator[None]:
    """Put everything back that training inside has changed."""
    model: Any = trainer.model
    handler, accelerator = trainer.callback_handler, trainer.accelerator
    optimizer = unwrap_optimizer(trainer.optimizer)
    random_state = RandomState.capture(trainer.args.device)
    kept = KeptState(_LIBRARIES, what="a measured step")
    of_model = KeptState(_LIBRARIES, largest_copy_bytes=2**62)  # buffers of any size
    objects = [trainer, trainer.args, trainer.control, handler, *handler.callbacks, trainer.train_dataset]
    for one in (*objects, accelerator, accelerator.gradient_state, accelerator.scaler):
        if hasattr(one, "__dict__"):
            kept.look_at(one)
    for one in (*model.modules(), *([] if optimizer is None else [optimizer])):
        of_model.look_at(one)
    for state in () if optimizer is None else optimizer.state.values():  # of any number of weights
        of_model.keep(state, "optimizer.state")
    modes = [(module, module.training) for module in model.modules()]
    weights = [
        (one, one.requires_grad, one.grad, one.data, one.detach().to("cpu", copy=True) if one.requires_grad else None)
        for one in model.parameters()
    ]
    try:
        yield
    finally:
        made = unwrap_optimizer(trainer.optimizer)
        if made is not optimizer and hasattr(made, "handle"):
            made.handle.remove()  # the hooks by which gradients are released
        accelerator.free_memory()
        for parameter, requires_grad, gradient, data, values in weights:
            if values is not None:
                parameter.data = data.copy_(values)
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        of_model.restore()
        kept.restore()
        random_state.restore()
