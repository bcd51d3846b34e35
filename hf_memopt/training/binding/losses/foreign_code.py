"""Tell whose code a model and a Trainer run: that of packages which are listed, or somebody else's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# Packages in whose layers, hooks and wrappers the rows of a batch do not meet, unless somebody else says so.
LISTED = {
    *("accelerate", "bitsandbytes", "compressed_tensors", "deepspeed", "gptqmodel", "hf_memopt", "hqq"),
    *("huggingface_hub", "optimum", "peft", "sentence_transformers", "torch", "torchao", "transformers"),
    *("abc", "builtins", "contextlib", "functools", "typing"),
}
NEVER = {"neftune_post_forward_hook"}  # noise whose size depends on the width of a batch


def foreign_code(model: nn.Module, also: str = "") -> str | None:
    """Return which class, forward or hook on a gradient is not from a listed package, or ``also``; None if none is.

    A class of somebody else's is let be if it defines nothing that the forward below it reads. Hooks on modules are
    left to ``foreign_hooks``, since most only look.
    """
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name}".rstrip()
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)  # None where it is not Python's
        used = {"__call__", "__getattr__", "__getattribute__", *(() if code is None else code.co_names)}
        for kind in type(module).__mro__:
            if not is_listed_module(kind.__module__, also) and used & vars(kind).keys():
                return f"{where} is from {kind.__module__}"
        for function in (*_layers(type(module).forward), *_layers(vars(module).get("forward"))):
            if not is_listed(function, also):
                return f"the forward of {where} is {full_name(function)}"
    for name, parameter in model.named_parameters():
        # private, seen in torch 2.6 to 2.13 and pinned by a test; hooks see the gradient of each part
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            for hook in (hooks or {}).values():
                if not is_listed(hook, also):
                    return f"the hook {full_name(hook)} is on the gradient of {name}"
    return None


def foreign_hooks(model: nn.Module) -> Iterator[tuple[str, dict[int, Any], int]]:
    """Yield each hook on a module that no listed package defines: what it is called, its dict and its key."""
    for name, module in model.named_modules():
        # private, seen in torch 2.6 to 2.13 and pinned by a test
        for of_kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            hooks = getattr(module, of_kind)
            for number, hook in hooks.items():
                if not is_listed(hook, "trl") or getattr(hook, "__name__", "") in NEVER:
                    yield f"the hook {full_name(hook)} on {name or type(module).__name__}", hooks, number


def is_listed(function: Any, also: str = "") -> bool:
    """Return whether a function is written in a listed package, or ``also``."""
    return is_listed_module(_module_of(function), also)


def full_name(function: Any) -> str:
    """Return where a function is written, and its name there."""
    return f"{_module_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def is_listed_module(name: str, also: str = "") -> bool:
    """Return whether a module is of a listed package, or of ``also``."""
    package = name.partition(".")[0]
    return package in LISTED or package == also


def _module_of(function: Any) -> str:
    """Return the module in which a function is written, which ``functools.wraps`` does not change."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    written_in = getattr(function, "__globals__", None)
    return str(type(function).__module__ if written_in is None else written_in["__name__"])


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and those inside it, as decorators, partial functions and overrides have them."""
    while function is not None:
        yield function
        inner = getattr(function, "__func__", None) or getattr(function, "func", None)
        function = inner or getattr(function, "__wrapped__", None)


# ---- Hooks that only look -------------------------------------------------------------------------------------------


class HookChangesError(Exception):
    """A hook of others returns something, or changes a tensor in place, as one does that mixes rows."""


@contextmanager
def observed_hooks(model: nn.Module) -> Iterator[None]:
    """Raise HookChangesError inside the context from a foreign hook that changes something, or from one that it sets on
    a gradient.
    """
    with ExitStack() as stack:
        for name, hooks, number in foreign_hooks(model):
            hook = hooks[number]
            hooks[number] = _observed(hook, name)
            stack.callback(hooks.__setitem__, number, hook)
        yield


def _observed(hook: Callable[..., Any], name: str) -> Callable[..., None]:
    def observed(*arguments: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]
        before = [(tensor._version, set(tensor._backward_hooks or ())) for tensor in tensors]
        found = hook(*arguments)
        if found is not None or any(one._version != version for one, (version, _) in zip(tensors, before, strict=True)):
            raise HookChangesError(f"{name} changes what passes through")
        for tensor, (_, known) in zip(tensors, before, strict=True):  # of its gradient
            hooks = tensor._backward_hooks or {}
            hooks.update({number: _observed(hooks[number], name) for number in hooks.keys() - known})

    return observed
