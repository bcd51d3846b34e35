"""``undisturbed``: call ``compute_loss`` on a few rows without any lasting effect on trainer and model.

Subclasses of ``Trainer`` count and log in ``compute_loss`` (TRL keeps a list of readings for each metric), and models
keep statistics in buffers. A probe is not a step, so all of it is as before once the probe is over.

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

from hf_memopt.binding.handles import override_method, set_attribute
from hf_memopt.binding.kept_state import KeptState
from hf_memopt.binding.quantized_weights import REPACKS

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, in this process alone; leave modes, random numbers and what was kept as they were."""
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
        stack.enter_context(override_method(trainer, "log", lambda log: lambda *args, **kwargs: None))
        if trainer.args.world_size > 1:  # another process may not be probing now, and would be waited for
            for name in ("gather", "gather_for_metrics", "reduce"):
                stack.enter_context(override_method(trainer.accelerator, name, lambda collect: _alone))
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


def _alone(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value
