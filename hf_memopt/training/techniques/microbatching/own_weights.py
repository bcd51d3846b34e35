"""The weights of a module with a user's code, whose forward may move some of them: those of a momentum encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_memopt.training.binding.losses import is_listed_module
from hf_memopt.training.binding.trials import norm_of


@contextmanager
def own_weights_put_back(module: nn.Module) -> Iterator[None]:
    """Put back weights that forward passes inside the context have replaced, as ``parameter.data = ...`` does.

    Raises:
        ValueError: one that needs no gradient was changed in place, so that its old values are lost.
    """
    own = any(not is_listed_module(type(part).__module__) for part in module.modules())
    kept = [(name, weight, weight.data, _norm_of(weight)) for name, weight in module.named_parameters() if own]
    try:
        yield
    finally:
        for name, weight, data, norm in kept:
            if address_of(weight) != address_of(data):
                weight.data = data
            elif norm is not None and bool(_norm_of(weight) != norm):
                raise ValueError(
                    f"the forward of {type(module).__name__} changes the weight {name} in place, which a check that its"
                    " rows are independent has done several times; expected a forward that leaves weights alone. "
                    "Change it in compute_loss, or take MicrobatchCallback out of callbacks="
                )


def address_of(weight: torch.Tensor) -> int:
    """Return where the values of a weight are; 0 for a sharded or a quantized one, which only its package replaces."""
    return weight.data_ptr() if type(weight) in (nn.Parameter, torch.Tensor) else 0


def _norm_of(weight: torch.Tensor) -> torch.Tensor | None:
    is_fixed = address_of(weight) and weight.is_floating_point() and not weight.requires_grad
    return norm_of(weight) if is_fixed else None
