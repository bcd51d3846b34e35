"""Losses beside the training: without dropout, and without a trace in the Trainer, its model and the generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_memopt.training.binding import versions
from hf_memopt.training.binding.losses import foreign_hooks
from hf_memopt.training.binding.trials.step_state import StepState
from hf_memopt.training.binding.undo import KeptState, override_method, set_attribute

TRIAL = "a trial of the loss"  # the purpose of the override that keeps it from logging

DROPOUTS = (
    *("dropout", "attention_dropout", "activation_dropout", "hidden_dropout"),
    *("attn_dropout", "residual_dropout", "layerdrop", "dropout_p", "dropout_prob", "drop_prob", "jitter_noise"),
)
"""Attributes of modules that hold a probability of dropping something, or the width of a noise."""
AUGMENTATIONS = {
    "apply_spec_augment": "SpecAugment",
    **dict.fromkeys(("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"), "moved positions"),  # of DINOv3
}
"""Attributes of configurations of transformers that make a model augment each row in training (5.8.1 to 5.24)."""

_WITH_P = ("torch.nn.modules.dropout", "torchvision.ops.", "peft.", "timm.", "transformers.")
"""In whose classes ``p`` is one of them. In a user's it may be the probability of mixing rows, as in MixStyle."""
OFTEN = 0.9  # so that one of a few passes shows it


@contextmanager
def untraced(trainer: Any, model: nn.Module, largest_copy_bytes: int = 2**20) -> Iterator[StepState]:
    """Run losses without dropout and without a trace in the Trainer, its model and the generators inside the context;
    yields what puts all of them back in between, but for larger tensors.
    """
    with ExitStack() as stack:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # blocks of a trial have other sizes than those of the training; the first to go is that of cuBLAS
            # (private: seen in torch 2.6 to 2.14)
            stack.callback(torch.cuda.empty_cache)
            stack.callback(torch._C._cuda_clearCublasWorkspaces)
        stack.enter_context(trainer.accelerator.no_sync(model))
        stack.callback(torch.clear_autocast_cache)  # of casts that were made without a graph
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # else each length would be compiled
        stack.enter_context(override_method(trainer, "log", lambda *args, **kwargs: None, purpose=TRIAL))
        stack.enter_context(without_dropout(model))
        stack.callback(versions.without_reentrant(model).remove)  # which allows no torch.autograd.grad
        # only now: what it puts back in between drops nothing either
        state = StepState(trainer, keeps_norms=False, largest_copy_bytes=largest_copy_bytes)
        stack.callback(state.restore)
        noted = KeptState(what="a check of the loss", others=model.buffers())
        stack.callback(noted.restore)
        for _, hooks, number in foreign_hooks(model):
            noted.look_into(hooks[number])
        yield state


@contextmanager
def without_dropout(model: nn.Module, *, mixes: bool = False) -> Iterator[None]:
    """Drop and augment nothing inside the context; if it ``mixes``, a user's class does so with ``OFTEN``."""
    with ExitStack() as stack:
        for module in model.modules():
            is_known = isinstance(module, nn.Dropout) or type(module).__module__.startswith(_WITH_P)
            for name in (*DROPOUTS, "p"):
                old = getattr(module, name, None)
                if isinstance(old, float) and (name != "p" or is_known or 0 < old < OFTEN):
                    probability = OFTEN if mixes and name == "p" and not is_known else 0.0
                    stack.callback(set_attribute(module, name, probability).remove)
            own = getattr(getattr(module, "config", None), "__dict__", {})  # no name of another attribute
            for name in (*DROPOUTS, *AUGMENTATIONS):
                if old := own.get(name):
                    off = 0.0 if name in DROPOUTS else False if old is True else None
                    stack.callback(set_attribute(module.config, name, off).remove)
        yield


def is_narrow(trainer: Any, model: nn.Module) -> bool:
    """Return whether a loss is computed in fewer bits than those of float32."""
    try:
        is_tf32 = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # stock's tf32=True sets torch.backends.fp32_precision, after which torch answers no more
        is_tf32 = True
    is_autocast = versions.mixed_precision(trainer.args) != "no"
    return is_tf32 or is_autocast or any(weight.element_size() < 4 for weight in model.parameters())


def names_of_draws(model: nn.Module) -> str:
    """Return what a model draws in training, of which parts draw other numbers: dropout, SpecAugment; "" if nothing."""
    rates = (getattr(module, name, None) for module in model.modules() for name in (*DROPOUTS, "p"))
    names = ["dropout"] if any(isinstance(rate, float) and rate > 0 for rate in rates) else []
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    names += [text for name, text in AUGMENTATIONS.items() if any(getattr(x, name, None) for x in configs.values())]
    return " and ".join(dict.fromkeys(names))
