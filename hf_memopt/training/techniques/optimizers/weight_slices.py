"""One slice of a bfloat16 weight: its float32 copy, its part of the optimizer's state, and the rounding back.

bitsandbytes keeps an 8-bit state as ``state1``, ``state2`` of the parameter's shape, with one ``absmax1``, ``absmax2``
per 256 elements in the order of memory, and tables ``qmap1``, ``qmap2``; so a slice that begins at a multiple of 256
has whole blocks, but for the last. Seen in bitsandbytes 0.50.0 and 0.50.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_BLOCK = 256  # elements per absmax value


def is_rounded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is one of those that are updated in slices."""
    return parameter.dtype == torch.bfloat16


def widen_state(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Make float32 what a plain 16-bit run, or Adagrad's constructor, left in the parameter's dtype."""
    for key, value in state.items():
        if torch.is_tensor(value) and value.shape == parameter.shape and value.dtype in (torch.bfloat16, torch.float16):
            state[key] = value.float().contiguous()


def part_of(key: str, value: Any, parameter: torch.Tensor, part: slice) -> Any:
    """Return the part of one entry of a state that belongs to a slice: a view, or a copy of a counter."""
    if not torch.is_tensor(value) or key.startswith("qmap"):  # a table that all parameters share
        return value
    if key.startswith("absmax"):
        return value[part.start // _BLOCK : -(-part.stop // _BLOCK)]
    if value.shape != parameter.shape:
        return value.clone()
    view = value.as_strided((value.numel(),), (1,))[part]  # in the order of memory, as bitsandbytes' kernels go
    if getattr(value, "is_paged", False):  # by this mark bitsandbytes knows managed memory, seen in 0.50.0 and 0.50.2
        view.is_paged = True  # type: ignore[attr-defined]
    return view


def store_part(
    after: Mapping[str, Any], given: Mapping[str, Any], state: dict[str, Any], parameter: torch.Tensor, part: slice
) -> None:
    """Write what the update of a slice left into the parameter's state; ``given`` is what it began with."""
    for key, value in after.items():
        if key.startswith(("qmap", "absmax")):
            continue  # bitsandbytes', updated in place
        if not torch.is_tensor(value) or value.shape != (part.stop - part.start,):
            state[key] = value  # a counter, the same after each slice
        elif key not in given:  # made by the first step
            if value.numel() == parameter.numel():
                state[key] = value.view(parameter.shape)
                continue
            if key not in state:
                state[key] = value.new_empty(parameter.shape)
            state[key].view(-1)[part] = value
        elif value is not given[key]:
            given[key].copy_(value)


def widened(weight: torch.Tensor, lost: torch.Tensor | None) -> torch.Tensor:
    """Return float32 weights; the upper 16 bits of a float32 are a bfloat16, ``lost`` is added to the lower ones."""
    if lost is None:
        return weight.float()
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(lost)
    bits.masked_fill_((weight == 0).logical_and_(lost < 0), 0)  # set to 0 since: no 0 was rounded up
    return bits.view(torch.float32)


def round_weights(
    updated: torch.Tensor, weight: torch.Tensor, lost: torch.Tensor | None, generator: torch.Generator
) -> None:
    """Round float32 weights into 16-bit ones, all of shape (elements,); ``updated`` is overwritten.

    As integers, the numbers of one sign are in order and a step of the lower half is a step of the value. So adding a
    random number of 16 bits and cutting the lower half off rounds up with the probability that makes the expectation
    exact. With ``lost``, the lower half as a signed number is the distance to the nearest bfloat16. The lower half of
    infinity and, once they are all the same, of NaN is 0, so neither changes.
    """
    updated.masked_fill_(updated.isnan(), float("nan"))
    bits = updated.view(torch.int32)
    if lost is None:
        noise = torch.empty(bits.shape, dtype=torch.int16, device=bits.device)
        bits.add_(noise.random_(-(2**15), 2**15, generator=generator)).add_(2**15).bitwise_and_(-(2**16))
    else:
        bits.sub_(lost.copy_(bits))  # the cast to 16 bits keeps the lower half
    weight.copy_(updated)
