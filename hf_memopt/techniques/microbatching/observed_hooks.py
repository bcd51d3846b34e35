"""Watch the forward hooks of others while a batch runs in micro-batches: those that change nothing do no harm.

A hook that returns something, or changes a tensor in place, may make rows depend on each other (mixup by a hook), so it
ends the run by whole micro-batches; one that only looks, as those of loggers and profilers do, is let be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_memopt.binding.foreign_code import foreign_hooks

__all__ = ["HookChangesError", "observed_hooks"]


class HookChangesError(Exception):
    """A hook of others changes what passes through a module."""


@contextmanager
def observed_hooks(model: nn.Module) -> Iterator[None]:
    """Raise HookChangesError inside the context from a foreign hook that changes something."""
    with ExitStack() as stack:
        for name, hooks, number in foreign_hooks(model):
            hook = hooks[number]
            hooks[number] = _observed(hook, name)
            stack.callback(hooks.__setitem__, number, hook)
        yield


def _observed(hook: Callable[..., Any], name: str) -> Callable[..., None]:
    def observed(*arguments: Any) -> None:
        versions = [(leaf, leaf._version) for leaf in tree_leaves(arguments[1:]) if torch.is_tensor(leaf)]
        found = hook(*arguments)
        if found is not None or any(tensor._version != version for tensor, version in versions):
            raise HookChangesError(f"{name} changes what passes through")

    return observed
