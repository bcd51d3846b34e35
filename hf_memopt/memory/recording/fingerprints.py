"""What stands for a value, or for the state of a module, in the key of a recorded step.

Equal fingerprints mean equal behaviour. Where that cannot be known (an object with a state of its own, a function that
closes over something, a patched method) there is none, and the step is recorded anew.
Nothing is told apart by its address, which a later object may have: functions and classes are in the key themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["code_of", "module_fingerprint", "value_fingerprint"]

_LIBRARIES = ("accelerate", "bitsandbytes", "hf_memopt", "peft", "torch", "transformers", "trl")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
# What a model carries for generating, loading and saving; the last three names are private, seen in transformers 5.8.1,
# 5.17.0 and 5.23.0.
_NOT_IN_A_STEP = {"generation_config", "hf_quantizer", "_tp_plan", "_ep_plan", "_pp_plan"}


class _UnknownError(Exception):
    """A value whose state cannot be told."""


def value_fingerprint(value: Any) -> Hashable | None:
    """Return what stands for a setting, or None where its state cannot be told.

    Plain values, containers of them, dataclasses by their ``repr``, configurations by their JSON, ``partial`` by what
    it calls with what, functions of a library by themselves. Functions of one's own too, where they close over nothing
    and read nothing but such values from their module.
    """
    try:
        return _of_value(value, set())
    except _UnknownError:
        return None


def module_fingerprint(model: nn.Module) -> Hashable | None:
    """Return what of a module's state can change its step, or None where it holds what cannot be told.

    Tensors by shape, dtype and which of them are shared, attributes as ``value_fingerprint``, hooks.
    """
    order: dict[int, int] = {}
    configs: dict[int, Hashable] = {}
    try:
        return tuple((name, *_of_module(module, order, configs)) for name, module in model.named_modules())
    except _UnknownError:
        return None


def code_of(model: nn.Module) -> Hashable:
    """Return which code a model runs: its classes with their ``forward``, which somebody may have replaced, and the
    kernels of attention and experts, which no configuration's text tells.
    """
    code = dict.fromkeys((type(module), type(module).forward) for module in model.modules())
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return tuple(code), tuple(map(_implementations, configs.values()))


# ---- Modules --------------------------------------------------------------------------------------------------------


def _of_module(module: nn.Module, order: dict[int, int], configs: dict[int, Hashable]) -> Iterator[Any]:
    yield type(module)
    for key, value in vars(module).items():
        if key in _OF_EVERY_MODULE or key in _NOT_IN_A_STEP or isinstance(value, RemovableHandle):
            continue
        if isinstance(value, torch.Tensor):
            yield key, value.shape, value.dtype
        elif hasattr(value, "to_json_string"):
            if id(value) not in configs:  # one configuration is that of hundreds of modules; both live on meanwhile
                configs[id(value)] = _of_value(value, set())
            yield key, configs[id(value)]
        elif callable(value) and callable(getattr(type(module), key, None)):
            raise _UnknownError(key)  # a method of this one module was replaced
        else:
            yield key, _of_value(value, set())
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            number = order.setdefault(id(tensor), len(order))
            yield key, tensor.shape, tensor.dtype, tensor.requires_grad, number
    for key in _HOOKS:
        yield tuple(_of_value(hook, set()) for hook in vars(module)[key].values())


# ---- Values ---------------------------------------------------------------------------------------------------------


def _of_value(value: Any, visited: set[FunctionType]) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal
    if isinstance(value, Mapping):
        return type(value), tuple((_of_value(k, visited), _of_value(v, visited)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_of_value(inner, visited) for inner in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_of_value(inner, visited) for inner in value)
    if isinstance(value, partial):
        return partial, *(_of_value(part, visited) for part in (value.func, value.args, value.keywords))
    if isinstance(value, RemovableHandle):
        return RemovableHandle
    if isinstance(value, (type, ModuleType)):
        return value
    if callable(value):
        return _of_callable(value, visited)
    return _of_object(value)


def _of_object(value: Any) -> Hashable:
    text = repr(value) if is_dataclass(value) else None
    if text is None and hasattr(value, "to_json_string"):
        text = value.to_json_string()
    if text is None or " at 0x" in text:  # an object inside is shown by its address
        raise _UnknownError(type(value).__name__)
    return type(value), text, _implementations(value)


def _implementations(config: Any) -> Hashable:
    """Return the kernels that a configuration names outside of its JSON.

    Both names are private, seen in transformers 5.8.1, 5.17.0 and 5.23.0.
    """
    return tuple(str(getattr(config, name, None)) for name in ("_attn_implementation", "_experts_implementation"))


def _of_callable(function: Callable[..., Any], visited: set[FunctionType]) -> Hashable:
    if isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, (ModuleType, type(None))):
        return function
    if not isinstance(function, FunctionType):
        raise _UnknownError(type(function).__name__)  # a bound method, an object with __call__
    if function in visited or _is_of_a_library(function):
        return function
    if function.__closure__:
        raise _UnknownError(function.__qualname__)
    visited.add(function)
    defaults = _of_value((function.__defaults__, function.__kwdefaults__), visited)
    read = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    return function, defaults, _of_value(read, visited)


def _is_of_a_library(function: FunctionType) -> bool:
    """Tell whether a function stands in a library under its own name: it closes over nothing of the caller's."""
    if function.__module__.partition(".")[0] not in _LIBRARIES:
        return False
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _names(code: CodeType) -> Iterator[str]:
    """Give the names that a function reads, with those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
