"""One accumulation step, and its loss computed beside the training: what the checks of losses and of padding compare.

Nothing of such a loss stays in the Trainer, its model or the generators. Where processes train one model, all of them
have to compute it, or none (``largest_of_all``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding import versions
from hf_memopt.binding.losses import foreign_hooks
from hf_memopt.binding.undo import KeptState, override_method
from hf_memopt.techniques.microbatching.row_check import without_dropout
from hf_memopt.techniques.microbatching.splitting import copied_batch
from hf_memopt.techniques.microbatching.step_state import StepState
from hf_memopt.techniques.tiling.tiles import without_reentrant

LARGEST_ERROR_16_BITS = 5e-2
SMALLEST = 1e-2  # of the unit of a loss: a smaller loss is a difference of larger numbers

Items = torch.Tensor | int | None
"""``num_items_in_batch``, as ``training_step`` gets it."""


class AccumulationStep(NamedTuple):
    """One call of ``training_step``: what it runs, its arguments, and what stock divided its loss by at that time and
    said of whether gradients are complete with it.
    """

    run: Callable[..., torch.Tensor]
    model: nn.Module
    inputs: Any
    num_items_in_batch: Items
    accumulation_steps: int
    syncs: bool

    def call(self, trainer: Any, rows: Any) -> torch.Tensor:
        """Train on these rows of the batch."""
        # An epoch that ended early leaves accumulation steps, and their gradients, to the next epoch's first step.
        trainer.current_gradient_accumulation_steps = self.accumulation_steps
        accelerator, now = trainer.accelerator, trainer.accelerator.sync_gradients
        accelerator.sync_gradients = self.syncs
        try:
            return self.run(self.model, copied_batch(rows), self.num_items_in_batch)  # a subclass may pop columns of it
        finally:
            accelerator.sync_gradients = now


@contextmanager
def untraced(trainer: Any, model: nn.Module) -> Iterator[StepState]:
    """Run losses without dropout and without a trace in the Trainer, its model and the generators inside the context;
    yields what puts all of them back in between.
    """
    with ExitStack() as stack:
        stack.enter_context(trainer.accelerator.no_sync(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # else each length would be compiled
        stack.enter_context(override_method(trainer, "log", lambda before, *args, **kwargs: None))
        stack.enter_context(without_dropout(model))
        stack.callback(without_reentrant(model).remove)  # which allows no torch.autograd.grad
        # only now: what it puts back in between drops nothing either
        state = StepState(trainer, keeps_norms=False)
        stack.callback(state.restore)
        noted = KeptState(what="a check of the loss", others=model.buffers())
        stack.callback(noted.restore)
        for _, hooks, number in foreign_hooks(model):
            noted.look_into(hooks[number])
        yield state


def loss_of(trainer: Any, step: AccumulationStep, rows: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of these rows as the Trainer computes it."""
    with trainer.compute_loss_context_manager():
        given = send_to_device(copied_batch(dict(rows)), trainer.args.device)
        loss: torch.Tensor = trainer.compute_loss(step.model, given, num_items_in_batch=step.num_items_in_batch)
    return loss


def is_narrow(trainer: Any, model: nn.Module) -> bool:
    """Return whether a loss is computed in fewer bits than those of float32."""
    try:
        is_tf32 = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # stock's tf32=True sets torch.backends.fp32_precision, after which torch answers no more
        is_tf32 = True
    is_autocast = versions.mixed_precision(trainer.args) != "no"
    return is_tf32 or is_autocast or any(weight.element_size() < 4 for weight in model.parameters())


def largest_of_all(trainer: Any, number: int) -> int:
    """Return the largest of the numbers of all processes."""
    numbers: torch.Tensor = trainer.accelerator.gather(torch.tensor([number], device=trainer.args.device))
    return int(numbers.max())
