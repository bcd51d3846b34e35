"""What loading a quantised model allocates and frees, in order, so that the steps start with the allocator's own gaps.

``from_pretrained`` quantises on the GPU, weight by weight; a model without quantised weights is loaded on the host and
moved as it is. In order:

1. one block for all weights, freed at once, from which they are then cut;
2. the weights by the natural order of their names: a quantised one is first there as it was published, 16 bits a number
   (of 8 bits twice), and what quantises it works beside it;
3. where PEFT's ``prepare_model_for_kbit_training`` was called, each other weight in float32 beside the 16-bit one;
4. PEFT empties the cache; adapters follow.

Source: transformers 5.23, modeling_utils.py, ``caching_allocator_warmup``, ``get_total_byte_count``;
core_model_loading.py, ``convert_and_load_state_dict_in_model``, ``dot_natural_key``; integrations/bitsandbytes.py.
bitsandbytes 0.50, nn/modules.py, ``Params4bit._quantize``, ``Int8Params._quantize``; functional.py, ``quantize_4bit``.
peft 0.21, utils/other.py.

Experts in 4 bits come last, one at a time (``ExpertsConfig``).

Limitations: the block is not cut to the GPU's memory less 1.2 GiB; weights that a checkpoint stores in parts, as those
of experts, are loaded whole. transformers 5.0 loads in threads that run ahead of what quantises; 5.8 one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import dot_natural_key

from hf_memopt.prediction.memory.quantized.stand_ins import Linear4bitStandIn, Linear8bitStandIn
from hf_memopt.training.binding.parameters import parameters_outside_adapters

Event = tuple[Any, int]
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Weight:
    """A weight of the base model: what holds it in the end, and with how many bytes it is read."""

    parameter: nn.Parameter
    linear: Linear4bitStandIn | Linear8bitStandIn | None  # whose quantised weight it is; None for a plain one
    is_cast: bool  # whether it is float32 in the end and was read in 16 bits
    read_bytes: int  # in the block of all weights


def load_events(model: nn.Module, number: Callable[[Tensor], int]) -> tuple[tuple[Event, ...], ...]:
    """Return (key, +bytes) for what loading allocates and (key, -bytes) for what it frees.

    ``number`` is that of a tensor's storage, the key of what stays; temporaries have keys of their own. Where the cache
    is emptied in between there are two stretches. Adapters are not in them, nor buffers that no checkpoint has. None
    of weights that are cut, as a function of ``prepare`` may do.
    """
    weights = _weights(model)
    stacks: list[Any] = [one for one in model.modules() if type(one).__name__ == "ExpertStack"]
    if all(one.linear is None for one in weights) or any(_is_cut(one.parameter) for one in weights):
        return ()
    events = (*_warm_up(weights, stacks), *_read(weights, number), *_experts(stacks, number), *_casts(weights, number))
    return (events, ()) if any(one.is_cast for one in weights) else (events,)


def _is_cut(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() != parameter.nbytes


def _weights(model: nn.Module) -> list[Weight]:
    """Return the weights of the base model, by the natural order of their names."""
    linears = {id(one.weight): one for one in model.modules() if isinstance(one, Linear4bitStandIn | Linear8bitStandIn)}
    base = {id(parameter) for parameter in parameters_outside_adapters(model)}
    named = {name.replace(".base_layer.", "."): one for name, one in model.named_parameters() if id(one) in base}
    plain_dtypes = {one.dtype for one in named.values() if id(one) not in linears}
    read_dtype = next((one.weight_dtype for one in linears.values()), None)
    was_cast = read_dtype in _SIXTEEN_BITS and not plain_dtypes.intersection(_SIXTEEN_BITS)
    found = []
    for name in sorted(named, key=dot_natural_key):
        parameter, linear = named[name], linears.get(id(named[name]))
        is_cast = was_cast and linear is None and parameter.dtype == torch.float32
        found.append(Weight(parameter, linear, is_cast, parameter.nbytes // 2 if is_cast else parameter.nbytes))
    return found


def _warm_up(weights: list[Weight], stacks: list[Any]) -> Iterator[Event]:
    """Yield the block of all weights, in which statistics are not counted."""
    block_bytes = sum(one.read_bytes for one in weights) + sum(math.prod(stack.shape) // 2 for stack in stacks)
    yield "warm-up", block_bytes
    yield "warm-up", -block_bytes


def _read(weights: list[Weight], number: Callable[[Tensor], int]) -> Iterator[Event]:
    for one in weights:
        if one.linear is not None:
            yield from _quantising(one.linear, number)
        else:
            yield ("loaded", id(one)) if one.is_cast else number(one.parameter), one.read_bytes


def _experts(stacks: list[Any], number: Callable[[Tensor], int]) -> Iterator[Event]:
    for stack in stacks:
        yield from ((number(one), one.nbytes) for one in stack.buffers())
        expert_bytes = math.prod(stack.shape[1:]) * stack.dtype.itemsize
        yield ("load", "expert"), expert_bytes
        yield ("load", "expert"), -expert_bytes


def _casts(weights: list[Weight], number: Callable[[Tensor], int]) -> Iterator[Event]:
    """Yield PEFT's casts to float32, each beside what was read."""
    for one in weights:
        if one.is_cast:
            yield number(one.parameter), one.parameter.nbytes
            yield ("loaded", id(one)), -one.read_bytes


def _quantising(linear: Linear4bitStandIn | Linear8bitStandIn, number: Callable[[Tensor], int]) -> Iterator[Event]:
    """Return the events of one weight, in the order of bitsandbytes."""
    elements, packed = linear.in_features * linear.out_features, linear.weight.data
    published = (("load", "published"), elements * linear.weight_dtype.itemsize)
    made: list[Event | Tensor]
    if isinstance(linear, Linear8bitStandIn):
        made = [published, (("load", "float16"), 2 * elements), linear.scales, packed]
    elif linear.compress_statistics:
        largest, centred = ((("load", name), 4 * linear.absmax.numel()) for name in ("largest", "centred"))
        made = [published, largest, packed, linear.code, linear.offset, centred]
        made += [linear.nested_absmax, linear.absmax, linear.nested_code]
    else:
        made = [published, linear.absmax, packed, linear.code]
    yield from ((number(one), one.nbytes) if isinstance(one, Tensor) else one for one in made)
    yield from ((one[0], -one[1]) for one in reversed(made) if not isinstance(one, Tensor))
