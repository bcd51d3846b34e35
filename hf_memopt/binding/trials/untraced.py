"""Losses beside the training: without dropout, and without a trace in the Trainer, its model and the generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_memopt.binding import versions
from hf_memopt.binding.losses import foreign_hooks
from hf_memopt.binding.trials.step_state import StepState
from hf_memopt.binding.undo import KeptState, UndoHandle, override_method, set_attribute, undo_all

DROPOUTS = (
    *("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"),
    *("attn_dropout", "residual_dropout", "layerdrop", "dropout_p", "dropout_prob", "drop_prob", "jitter_noise"),
)
"""Attributes of modules that hold a probability of dropping something, or the width of a noise."""

_WITH_P = ("torch.nn.modules.dropout", "torchvision.ops.", "peft.", "timm.", "transformers.")
"""In whose classes ``p`` is one of them. In a user's it may be the probability of mixing rows, as in MixStyle."""
OFTEN = 0.9  # so that one of a few passes shows it


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


@contextmanager
def without_dropout(model: nn.Module, *, mixes: bool = False) -> Iterator[None]:
    """Drop nothing inside the context; if it ``mixes``, a user's class does so with probability ``OFTEN``."""
    with ExitStack() as stack:
        for module in model.modules():
            is_known = isinstance(module, nn.Dropout) or type(module).__module__.startswith(_WITH_P)
            for name in (*DROPOUTS, "p"):
                old = getattr(module, name, None)
                if isinstance(old, float) and (name != "p" or is_known or 0 < old < OFTEN):
                    probability = OFTEN if mixes and name == "p" and not is_known else 0.0
                    stack.callback(set_attribute(module, name, probability).remove)
        yield


def is_narrow(trainer: Any, model: nn.Module) -> bool:
    """Return whether a loss is computed in fewer bits than those of float32."""
    try:
        is_tf32 = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # stock's tf32=True sets torch.backends.fp32_precision, after which torch answers no more
        is_tf32 = True
    is_autocast = versions.mixed_precision(trainer.args) != "no"
    return is_tf32 or is_autocast or any(weight.element_size() < 4 for weight in model.parameters())


def without_reentrant(model: nn.Module) -> UndoHandle:
    """Make the checkpointing that is on in a model non-reentrant; return what undoes it."""
    name, handles = "_gradient_checkpointing_func", []  # transformers 5.8.1, 5.17.0 and 5.23.0
    for module in model.modules():
        function = vars(module).get(name)
        if isinstance(function, partial) and function.keywords.get("use_reentrant") is not False:
            handles.append(set_attribute(module, name, partial(function, use_reentrant=False)))
    return undo_all(*handles)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module drops values: memory may run out before it draws, and parts draw other numbers."""
    rates = (getattr(module, name, None) for module in model.modules() for name in (*DROPOUTS, "p"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
