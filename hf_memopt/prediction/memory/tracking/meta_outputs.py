"""Run operations on the meta device, and remember the shapes that they return.

Many operations find the shape of their result by Python code of torch's, which costs more than all the rest of a
recording; the layers of a model, the passes of a step and the set-ups of a comparison repeat the same ones. What is
remembered is the result of torch's own code for arguments of the same shapes, strides and dtypes and equal options.

An operation is repeated from memory only if its schema says that it changes no argument, and if the results that it
returned the first time were new tensors: none shares its storage with an argument or another result. One that works
in place, and is known to leave the shape as it is, returns its first argument.

What else follows from the arguments alone, such as the cost of the operation, its caller can keep beside the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

HOST_GENERATOR = torch.Generator()
"""What operations on the host draw from, which decide, for example, whether a layer is dropped."""

_CPU = torch.device("cpu")

_MOST_REMEMBERED = 2**15
_PLAIN_TENSORS = {torch.Tensor, nn.Parameter}
_PLAIN_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format}
_STRIDED = torch.strided
_KEEP_THEIR_SHAPE = {"copy_", "addmm_", "scatter_add_"}  # beside what works element by element
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _flops_of_groups(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of a grouped product, in which rows or columns of a 2-d operand are divided into groups."""
    groups = len(one) if one.dim() == other.dim() == 3 else 1
    return 2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1]


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._int_mm: flop_registry[torch.ops.aten.mm],
}
if hasattr(torch.ops.aten, "_grouped_mm"):  # private: of experts in bfloat16, seen in torch 2.8 to 2.13
    _FLOPS[torch.ops.aten._grouped_mm] = _flops_of_groups


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the losses (batch,) and the table over frames and labels with blanks (batch, frames, 2 x labels + 1).

    Source: torch 2.13, ``aten/src/ATen/native/cuda/LossCTC.cu``; the longest target as long as all are on average.
    """
    frames, batch = log_probs.shape[:2]
    states = 2 * (targets.numel() // batch) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, states)


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


_MISSING: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
"""Operations without a kernel for the meta device."""

Beside = dict[Any, Any]
_remembered: dict[Hashable, tuple[Any, int, Beside]] = {}


@contextmanager
def all_nonzero() -> Iterator[None]:
    """Let each element of a meta tensor be nonzero inside: how many are cannot be known.

    The setting is private, pinned by a test, seen in torch 2.6 to 2.14. Its ``patch`` would leave a variable in the
    context of the thread at each use, since 2.13.
    """
    import torch.fx.experimental._config as fx_config

    settings: Any = fx_config
    before = settings.meta_nonzero_assume_all_nonzero
    settings.meta_nonzero_assume_all_nonzero = True
    try:
        yield
    finally:
        settings.meta_nonzero_assume_all_nonzero = before


def run_on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flops: bool = True
) -> tuple[Any, int, Beside | None]:
    """Return what an ATen operator returns, its floating-point operations, and what the caller keeps beside them.

    That is a dict, the same for every call with equal arguments; None for a result that is not remembered.
    """
    way = _way_of(func)
    key: list[Any] = [func, flops]
    # another mode that is on has to see the operation; private: pinned by a test, seen in torch 2.6 to 2.13
    known = way is not None and not torch._C._len_torch_dispatch_stack()
    seen: dict[int, int] = {}
    known = known and _add_to_key(key, args, seen)
    if known and kwargs:
        key += kwargs
        known = _add_to_key(key, kwargs.values(), seen)
    found = _remembered.get(tuple(key)) if known else None
    if found is not None:
        made, operations, beside = found
        if way == "in place":
            return args[0], operations, beside
        if isinstance(made, list):
            return tuple(_empty(facts) if type(facts) is tuple else facts for facts in made), operations, beside
        return _empty(made), operations, beside
    out = _run(func, args, kwargs)
    formula = _FLOPS.get(func._overloadpacket) if flops else None  # private: pinned by a test, torch 2.6 to 2.13
    operations = 0 if formula is None else formula(*args, **kwargs, out_val=out)
    made = () if way == "in place" else _facts(out, (*args, *kwargs.values())) if known else None
    if not known or made is None:
        return out, operations, None
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.clear()
    beside = {}
    _remembered[tuple(key)] = made, operations, beside
    return out, operations, beside


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; what draws on the host draws from ``HOST_GENERATOR``: other threads draw from the process's."""
    device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device") or _CPU
    if func in _MISSING and device.type == "meta":
        return _MISSING[func](*args, **kwargs)
    if torch.Tag.nondeterministic_seeded not in func.tags or device != _CPU or kwargs.get("generator") is not None:
        return func(*args, **kwargs)
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func(*args, **kwargs, generator=HOST_GENERATOR)
    name = {"default": "generator", "low": "low_generator"}.get(func._overloadname, "")
    if name in func.overloadpacket.overloads():
        return getattr(func.overloadpacket, name)(*args, **kwargs, generator=HOST_GENERATOR)
    state = torch.default_generator.get_state()  # rand_like in torch before 2.9, which takes no generator
    torch.default_generator.set_state(HOST_GENERATOR.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        HOST_GENERATOR.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(state)


@cache
def _way_of(func: Any) -> str | None:
    """Return how an operation can be repeated: ``"new"`` results, ``"in place"``, or None, by its schema."""
    schema = func._schema  # private: pinned by a test, seen in torch 2.6 to 2.13
    if not any(item.alias_info is not None for item in (*schema.arguments, *schema.returns)):
        kinds = {str(item.type) for item in schema.returns}  # FlashAttention returns the lengths of its rows too
        return "new" if "Tensor" in kinds <= {"Tensor", "SymInt", "int"} else None
    written = [item.alias_info is not None and item.alias_info.is_write for item in schema.arguments]
    changes_first = bool(written) and written[0] and not any(written[1:]) and len(schema.returns) == 1
    keeps_shape = torch.Tag.pointwise in func.tags or func._overloadpacket.__name__ in _KEEP_THEIR_SHAPE
    return "in place" if changes_first and keeps_shape else None


def _add_to_key(key: list[Any], values: Any, seen: dict[int, int]) -> bool:
    """Add to the key what a result may depend on; return False where that is more than shapes and plain values."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            if not value.is_meta or value.layout is not _STRIDED or value.is_conj() or value.is_neg():
                return False
            which = seen.setdefault(id(value), len(seen))  # one tensor twice is read once
            key += (which, value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN_VALUES:
            key += (kind, value)  # the kind too: True == 1 == 1.0
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _add_to_key(key, value, seen):
                return False
        else:
            return False
    return True


def _facts(out: Any, given: tuple[Any, ...]) -> Any:
    """Return shapes, strides and dtypes of the results, and numbers; None where they are not new meta tensors."""
    many = isinstance(out, tuple)
    results = out if many else (out,)
    tensors = (value for value in tree_leaves(given) if isinstance(value, torch.Tensor))
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    facts: list[_Made | int | None] = []
    for tensor in results:
        if tensor is None or type(tensor) is int:
            facts.append(tensor)
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


def _empty(facts: _Made) -> torch.Tensor:
    size, stride, dtype = facts
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")
