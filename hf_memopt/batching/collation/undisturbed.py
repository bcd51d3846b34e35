"""``undisturbed``: call a model on a few rows without any lasting effect on it, or on its trainer.

Models keep statistics in buffers and hooks on their layers, and hooks of others write readings down. A probe is not a
step, so all of it is as before once the probe is over.

Limitations: those of ``KeptState``; a buffer above ``LARGEST_COPY_BYTES`` is watched but not copied, and a warning
names it if it has changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_memopt.binding.model_changes import REPACKS
from hf_memopt.binding.undo import KeptState, set_attribute

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode; leave modes, random numbers and what the model's modules keep as they were."""
    modes = {module: module.training for module in model.modules()}
    kept = KeptState()
    kept.look_at(trainer)
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # they move weights in and out of attributes
        for module in modes:
            kept.look_at(module)
    device = trainer.args.device
    states = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.callback(kept.restore)
        # This process's own GPU: forking the generators of all visible ones would start CUDA on each.
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        for module in modes:
            module.training = False  # not eval(), which a user's module may use to rewrite its weights
            if getattr(module, REPACKS, False):
                stack.callback(set_attribute(module, REPACKS, False).remove)
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(states[0])
            np.random.set_state(states[1])
