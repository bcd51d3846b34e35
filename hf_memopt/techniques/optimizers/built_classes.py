"""Optimizer classes that a technique builds from another class, and what it has to know of that one."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch

from hf_memopt.plain_data import shown

__all__ = ["ELEMENTWISE", "BuiltClass", "built_class", "check_is_class", "class_name", "plain_step"]

ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""Classes of ``torch.optim`` whose update of an element depends on that element and scalars only."""


class BuiltClass(type):
    """The class of classes that a function builds from another class; they are pickled as its call."""


copyreg.pickle(BuiltClass, lambda built: vars(built).get("_built_by", built.__qualname__))


def built_class(
    prefix: str, kind: type, plain: Any, built_by: tuple[Callable[..., type], tuple[Any, ...]], **attributes: Any
) -> type:
    """Return a class with the methods of ``kind`` before those of a plain class, pickled as the call ``built_by``.

    Its module is the plain one's: stock registers 32-bit embeddings where it reads "bitsandbytes" in it.
    """
    own = {"__module__": plain.__module__, "_plain_class": plain, "_built_by": built_by}
    return BuiltClass(f"{prefix}{plain.__name__}", (kind, plain), {**own, **attributes})


def check_is_class(optimizer_class: Any, fix: str) -> None:
    """Raise TypeError for what is no class of optimizers."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"optimizer_class={shown(optimizer_class)} is not a class of optimizers; expected a subclass of "
            f"torch.optim.Optimizer. {fix}"
        )


def class_name(optimizer_class: type) -> str:
    """Return the name of a class with its module, for an error."""
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def plain_step(step: Any) -> Any:
    """Return the step of an optimizer class without the wrapper in which torch runs step hooks.

    ``hooked``, its mark, is not a private name but undocumented: seen in torch 2.13.
    """
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
