"""Tell whose code a model and a Trainer run: that of packages which are listed, or somebody else's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["foreign_code", "full_name", "is_listed"]

# Packages in whose layers, hooks and wrappers the rows of a batch do not meet, unless somebody else says so.
LISTED = {
    "accelerate",
    "bitsandbytes",
    "compressed_tensors",
    "deepspeed",
    "gptqmodel",
    "hf_memopt",
    "hqq",
    "huggingface_hub",
    "optimum",
    "peft",
    "sentence_transformers",
    "torch",
    "torchao",
    "transformers",
    *("abc", "builtins", "contextlib", "functools", "typing"),
}
NEVER = {"neftune_post_forward_hook"}  # noise whose size depends on the width of a batch


def foreign_code(model: nn.Module, also: str = "") -> str | None:
    """Return which class, forward or hook of a model is not from a listed package, or ``also``; None if none is."""
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name}".rstrip()
        for kind in type(module).__mro__:
            if not _is_listed_module(kind.__module__, also):
                return f"{where} is from {kind.__module__}"
        for function in (*_layers(type(module).forward), *_layers(vars(module).get("forward"))):
            if not is_listed(function, also):
                return f"the forward of {where} is {full_name(function)}"
        for hook in _hooks(module):
            if not is_listed(hook, also) or getattr(hook, "__name__", "") in NEVER:
                return f"the hook {full_name(hook)} is on {where}"
    return None


def is_listed(function: Any, also: str = "") -> bool:
    """Return whether a function is written in a listed package, or ``also``."""
    return _is_listed_module(_module_of(function), also)


def full_name(function: Any) -> str:
    """Return where a function is written, and its name there."""
    return f"{_module_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _is_listed_module(name: str, also: str) -> bool:
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


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks on a module; torch's private names, seen in 2.13 and pinned by a test."""
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield from getattr(module, name).values()
