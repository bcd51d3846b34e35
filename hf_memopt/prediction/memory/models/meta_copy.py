"""Copy a module to the meta device: the same structure, tensors with shapes but no memory.

``copy.deepcopy`` does it. Its memo gets a meta copy of every parameter and a stand-in for every quantised module, and a
function mode replaces the copy of every other tensor. No weight is read: copying a module of 400 MB takes less than 20
MB (``tests/memory/test_models.py`` measures it).
"""

from __future__ import annotations

import copy
from functools import update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_memopt.prediction.memory.settings import NotEstimableError


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy with every tensor on meta.

    What several modules share stays shared; views of one storage do not, as in ``model.to(device)``. Hooks of modules
    are copied; gradients and hooks on parameters, which would step a real optimizer, are not.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    _refuse_compiled(model)
    memo = _stand_ins(model)
    _add_parameters(model, memo)
    try:
        with _MetaCopies():
            copied = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:  # a hook or an attribute that holds a lock, a file, a process group
        raise NotEstimableError(
            f"not estimable: model=<{type(model).__name__}> holds an object that cannot be copied ({error}); expected "
            "a module that copy.deepcopy takes. Pass model.config"
        ) from error
    for wrapped in copied.modules():  # accelerate's prepare wraps forward in autocast; seen in 1.15
        if "_original_forward" in vars(wrapped):
            vars(wrapped)["forward"] = vars(wrapped).pop("_original_forward")
        vars(wrapped).update({name: _of_the_copy(value, memo) for name, value in vars(wrapped).items()})
    return copied


def _of_the_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a function or a method with copied modules in its closure, such as TRL's ``forward``; else the value."""
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(_of_the_copy(value.__func__, memo), _of_the_copy(value.__self__, memo))
    held = [cell.cell_contents for cell in value.__closure__ or ()] if isinstance(value, FunctionType) else []
    if not any(isinstance(one, MethodType | nn.Module) for one in held):
        return value
    cells = (CellType(_of_the_copy(one, memo) if isinstance(one, MethodType | nn.Module) else one) for one in held)
    found = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    found.__kwdefaults__ = value.__kwdefaults__
    return update_wrapper(found, value)


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse modules compiled by ``torch.compile`` or ``module.compile()``, anywhere in a model.

    ``_orig_mod`` and ``_compiled_call_impl`` are private, seen in torch 2.6 to 2.13.
    """
    for name, module in model.named_modules():
        place = f" ({name})" if name else ""
        if "_orig_mod" in module._modules:
            fix = "Pass model._orig_mod" if not name else f"Put {name}._orig_mod in its place"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            fix = "Pass the model before it calls compile()"
        else:
            continue
        raise NotEstimableError(
            f"not estimable: model=<{type(model).__name__}> is compiled{place}: what the compiler fuses and saves is "
            f"decided on the GPU; expected a module that runs as it is written. {fix}"
        )


class _MetaCopies(TorchFunctionMode):
    """Let ``copy.deepcopy`` return meta tensors for all tensors, wherever they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad))


def _stand_ins(model: nn.Module) -> dict[int, Any]:
    """Return the stand-ins of bitsandbytes' linears, by identity."""
    classes = {base for module in model.modules() for base in type(module).__mro__}
    if not any(base.__module__.startswith("bitsandbytes.") for base in classes):
        return {}
    from hf_memopt.prediction.memory.quantized import stand_in  # imports bitsandbytes, which takes a second

    found = {id(module): stand_in(module) for module in model.modules()}
    return {number: copied for number, copied in found.items() if copied is not None}


def _add_parameters(module: nn.Module, memo: dict[int, Any]) -> None:
    """Put a meta copy of every parameter into ``memo``, except below modules that are in it already."""
    if id(module) in memo:
        return
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter and parameter.is_meta:
            continue  # of a stand-in, which copies itself
        if type(parameter) is not nn.Parameter:
            raise NotEstimableError(
                f"not estimable: {type(module).__name__}.{name} is a {type(parameter).__name__}, which has no form on "
                "the meta device; expected plain parameters or bitsandbytes' linears. Pass model.config"
            )
        if id(parameter) not in memo:
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for child in module.children():
        _add_parameters(child, memo)
