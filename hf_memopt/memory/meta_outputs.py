"""Run operations on the meta device, and remember the shapes that they return.

Many operations find the shape of their result by Python code of torch's, which costs more than all the rest of a
recording; the layers of a model, the passes of a step and the set-ups of a comparison repeat the same ones. What is
remembered is the result of torch's own code for arguments of the same shapes, strides and dtypes and equal options.

An operation is repeated from memory only if its schema says that it changes no argument, and if the results that it
returned the first time were new tensors: none shares its storage with an argument or another result. One that works
element by element in place returns its first argument, whose shape it cannot change.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

__all__ = ["forget_outputs", "run_on_meta"]

_MOST_REMEMBERED = 2**15
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_PLAIN_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_FLOPS = {**flop_registry, torch.ops.aten._int_mm: flop_registry[torch.ops.aten.mm]}

_remembered: dict[Hashable, tuple[Any, int]] = {}


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: bool = True) -> tuple[Any, int]:
    """Return what ``func(*args, **kwargs)`` returns, and its floating-point operations, 0 unless they are asked for.

    Of meta tensors both come from memory where that is possible.
    """
    key: list[Any] = [func, flops]
    # another mode that is on has to see the operation; private: pinned by a test, seen in torch 2.6 to 2.13
    in_place = _works_in_place(func)
    known = not torch._C._len_torch_dispatch_stack() and (in_place or _makes_new_tensors(func))
    known = known and _add_to_key(key, args) and (not kwargs or _add_options(key, kwargs))
    found = _remembered.get(tuple(key)) if known else None
    if found is not None:
        made, operations = found
        if in_place:
            return args[0], operations
        if isinstance(made, list):
            return tuple(None if facts is None else _empty(facts) for facts in made), operations
        return _empty(made), operations
    out = func(*args, **kwargs)
    formula = _FLOPS.get(func._overloadpacket) if flops else None  # private: pinned by a test, torch 2.6 to 2.13
    operations = 0 if formula is None else formula(*args, **kwargs, out_val=out)
    made = () if in_place else _facts(out, (*args, *kwargs.values())) if known else None
    if known and made is not None:
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[tuple(key)] = made, operations
    return out, operations


def forget_outputs() -> None:
    """Forget all shapes."""
    _remembered.clear()


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Return whether an operation changes nothing and returns tensors, by its schema."""
    schema = func._schema  # private: pinned by a test, seen in torch 2.6 to 2.13
    aliases = any(item.alias_info is not None for item in (*schema.arguments, *schema.returns))
    return not aliases and bool(schema.returns) and all(str(item.type) == "Tensor" for item in schema.returns)


@cache
def _works_in_place(func: Any) -> bool:
    """Return whether an operation changes the elements of its first argument, and nothing else."""
    schema = func._schema
    written = [item.alias_info is not None and item.alias_info.is_write for item in schema.arguments]
    is_first = bool(written) and written[0] and not any(written[1:]) and len(schema.returns) == 1
    return is_first and torch.Tag.pointwise in func.tags


def _add_to_key(key: list[Any], values: Any) -> bool:
    """Add to the key what a result may depend on; return False where that is more than shapes and plain values."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            if not value.is_meta or value.layout is not torch.strided or value.is_conj() or value.is_neg():
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif kind in _PLAIN_VALUES:
            key += (kind, value)  # the kind too: True == 1 == 1.0
        elif kind in (list, tuple):
            key += (kind, len(value))
            if not _add_to_key(key, value):
                return False
        else:
            return False
    return True


def _add_options(key: list[Any], kwargs: dict[str, Any]) -> bool:
    key += kwargs
    return _add_to_key(key, kwargs.values())


def _facts(out: Any, given: tuple[Any, ...]) -> Any:
    """Return shapes, strides and dtypes of the results; None where they are not new meta tensors."""
    many = isinstance(out, tuple)
    results = out if many else (out,)
    storages = {tensor.untyped_storage()._cdata for tensor in _tensors(given)}
    facts: list[_Made | None] = []
    for tensor in results:
        if tensor is None:
            facts.append(None)
            continue
        if type(tensor) is not torch.Tensor or not tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        made = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if storage._cdata in storages or storage.nbytes() != _empty(made).untyped_storage().nbytes():
            return None
        storages.add(storage._cdata)
        facts.append(made)
    return facts if many else facts[0]


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _empty(facts: _Made) -> torch.Tensor:
    size, stride, dtype = facts
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
