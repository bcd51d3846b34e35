"""Name parts of a model by one word, whatever the architecture calls them: embeddings, base, layers by index.

Shared by freezing and checkpointing policies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import items_of, shown
from hf_memopt.training.binding.model import unwrap_model

_LAYERS = re.compile(r"layers:(\d+)(?:-(\d+))?")
_WORDS = ("embeddings", "base", "layers:0")


def layer_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the model's stacks of repeated layers by name, whatever the architecture calls them.

    A stack is an outermost ``nn.ModuleList`` of transformers' ``GradientCheckpointingLayer``; where some of them attend
    (a class name with "Attention"), only those count: Wav2Vec2's feature extractor is not a stack of layers.
    A model without such lists (ALBERT) has one stack: the list of same-class modules with most parameters.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=3)
        >>> {name: len(stack) for name, stack in layer_stacks(LlamaForCausalLM(config)).items()}
        {'model.layers': 3}
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    stacks = {
        name: stack
        for name, stack in lists.items()
        if all(isinstance(layer, GradientCheckpointingLayer) for layer in stack)
    }
    if stacks:
        stacks = {name: stack for name, stack in stacks.items() if not _is_inside(name, stacks.keys() - {name})}
        attending = {
            name: stack
            for name, stack in stacks.items()
            if any("Attention" in type(module).__name__ for module in stack.modules())
        }
        return attending or stacks
    uniform = [name for name, layers in lists.items() if len({type(layer) for layer in layers}) == 1]
    if not uniform:
        return {}
    largest = max(uniform, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return {largest: lists[largest]}


def checked_patterns(patterns: Any) -> tuple[str, ...]:
    """Return the patterns as a tuple; raise ValueError for what is not a pattern for any model."""
    names = (patterns,) if isinstance(patterns, str) else items_of(patterns)
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(
            f"patterns={shown(patterns)} is invalid; expected one pattern or several. "
            "Write, for example, patterns=['embeddings', 'layers:0-3']."
        )
    for name in names:
        if name.startswith("layers:"):
            _layer_range(name)
    return names


def shown_patterns(names: tuple[str, ...]) -> str:
    return repr(names[0] if len(names) == 1 else list(names))


def matching_parameters(model: nn.Module, pattern: str) -> list[nn.Parameter]:
    """Return the parameters that one pattern matches; raise ValueError if there are none."""
    if pattern == "base":
        return _base_parameters(model)
    everything = [(_prefixes(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    known = dict.fromkeys(prefix for prefixes, _ in everything for prefix in prefixes)
    if pattern.startswith("layers:"):
        named = _layer_names(model, pattern)
    elif pattern == "embeddings":
        named = _embedding_names(model)
    else:
        named = {name for name in known if fnmatchcase(name, pattern)}
    matched = [parameter for prefixes, parameter in everything if not named.isdisjoint(prefixes)]
    if not matched:
        hint = did_you_mean(pattern, [name for name in (*known, *_WORDS) if name != pattern])
        raise ValueError(
            f"patterns={pattern!r} matches no parameter of {type(model).__name__}; expected a module or parameter "
            f"name, a glob, 'embeddings', 'base' or 'layers:first-last'.{hint} "
            f"Pass patterns='layers:0', or one of its parts: {', '.join(name for name in known if '.' not in name)}"
        )
    return matched


def _prefixes(name: str) -> list[str]:
    """Return a parameter's name and those of the modules around it, outermost first."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in outer)


def _embedding_names(model: nn.Module) -> set[str]:
    """Return the names of the input embeddings, their norms and projections: all outside the stacks of layers."""
    stacks = layer_stacks(model)
    found = set()
    for name, module in model.named_modules():
        own_name = name.rpartition(".")[2]
        is_norm = "norm" in type(module).__name__.lower() and "emb" in own_name.lower()
        is_embedding = isinstance(module, nn.Embedding) or own_name.startswith("embedding") or is_norm
        if is_embedding and not _is_inside(name, stacks):
            found.add(name)
    return found


def _base_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of transformers' ``base_model``, without those of PEFT's adapters."""
    inner = unwrap_model(model)
    base = getattr(inner, "base_model", inner)
    if base is inner:
        raise ValueError(
            f"patterns='base' needs a head apart from the base model, and {type(inner).__name__} has none; expected a "
            "model whose base_model is a part of it. Pass patterns='layers:0'"
        )
    return parameters_outside_adapters(base)


def parameters_outside_adapters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model but those of PEFT's adapters, and of the copies that it trains of modules."""
    adapters = {  # of peft's BaseTunerLayer and AuxiliaryTrainingWrapper, seen in peft 0.21.2
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules()
        for name in getattr(module, "adapter_layer_names", ())
    }
    return [parameter for name, parameter in model.named_parameters() if adapters.isdisjoint(_prefixes(name))]


def _layer_range(pattern: str) -> tuple[int, int]:
    match = _LAYERS.fullmatch(pattern)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if first > last:
        raise ValueError(
            f"patterns={pattern!r} is not a range of layers; expected 'layers:first-last' or 'layers:index', counted "
            "from 0, the last included. Write, for example, 'layers:0-3'."
        )
    return first, last


def _layer_names(model: nn.Module, pattern: str) -> set[str]:
    first, last = _layer_range(pattern)
    stacks = layer_stacks(model)
    if not stacks:
        raise ValueError(
            f"patterns={pattern!r} finds no layers in {type(model).__name__}; expected an nn.ModuleList of repeated "
            f"layers. Pass patterns={next(iter(model.named_children()), ('embeddings', None))[0]!r}"
        )
    shortest = min(map(len, stacks.values()))
    if last >= shortest:
        ranges = " and ".join(f"0-{len(stack) - 1} ({name})" for name, stack in stacks.items())
        raise ValueError(
            f"patterns={pattern!r} exceeds the layers of {type(model).__name__}; expected indices within {ranges}. "
            f"Write 'layers:0-{shortest - 1}', or name the layers of one stack."
        )
    return {f"{name}.{index}" for name in stacks for index in range(first, last + 1)}
