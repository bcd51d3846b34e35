"""The hooks that FSDP2 puts on the outputs of a module, where the output is logits that are never computed.

FSDP2 has to know when the backward pass arrives at a module: it gathers the weights then, and reduces the gradients at
the end. It registers a hook on each output for that, which looks at no gradient and returns it as it is. Of fused
logits there is no gradient, so the hook waits with them, and goes to the loss, whose backward pass is the first that
needs the weights of the head. Any other hook wants the gradient of the logits, so it makes them real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["is_engine_hook", "register_hooks"]

ENGINES = ("torch.distributed.fsdp", "hf_memopt.memory.distributed")
"""Packages whose hooks look at no gradient: FSDP2 (torch 2.6 to 2.13; pinned by a test) and its simulation."""


def is_engine_hook(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call of a tensor's method registers a hook of FSDP2, or of its simulation."""
    is_hook = function is torch.Tensor.register_hook and len(args) == 2
    return is_hook and str(getattr(args[1], "__module__", "")).startswith(ENGINES)


def register_hooks(tensor: torch.Tensor, hooks: Iterable[Callable[[torch.Tensor], Any]]) -> None:
    """Register hooks on a tensor that has a gradient."""
    if tensor.requires_grad:
        for hook in hooks:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
