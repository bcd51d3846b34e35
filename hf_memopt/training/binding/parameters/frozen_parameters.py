"""Freeze the parameters of a model that patterns name, count those that are left to train, and cast parameters.

``FreezeCallback`` does it in a real run, and ``estimate(freeze=...)`` on the model that it simulates.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hf_memopt.training.binding.model import check_model
from hf_memopt.training.binding.parameters.layer_names import checked_patterns, matching_parameters, shown_patterns
from hf_memopt.training.binding.undo import UndoHandle


def freeze(model: nn.Module, patterns: str | Iterable[str]) -> UndoHandle:
    """Freeze every parameter that one of ``patterns`` matches, and drop its gradient.

    A pattern is one of:

    - the name of a parameter or of a module, as ``named_modules`` gives it: ``"bert.pooler"`` (all of its parameters);
    - a glob over those names, in which ``*`` crosses dots: ``"bert.encoder.layer.[0-3].*"``, ``"*.bias"``;
    - ``"embeddings"``: token, position and type embeddings with their norm and projection, outside the repeated layers.
      T5's ``relative_attention_bias`` is in a layer and does not count; DeBERTa-v2's ``rel_embeddings`` does, but not
      the norm after it, ``encoder.LayerNorm``, whose name does not show it: give it as a pattern of its own;
    - ``"base"``: all but the head, i.e. transformers' ``base_model``; of a model wrapped by PEFT the wrapped model's,
      never the adapters;
    - ``"layers:0-11"`` or ``"layers:3"``: layers by index, the last included, in every stack of ``layer_stacks``
      (encoder and decoder alike), adapters in them included. ALBERT's layers share one group: its only index is 0.

    Tied weights are one parameter under several names: to freeze the embedding of a tied model freezes its head.
    Parameters that are frozen already may be named.

    Returns:
        A handle whose ``remove()`` restores exactly those flags that this call changed; it does not keep the model
        alive.

    Raises:
        ValueError: ``patterns`` is empty or not text; a pattern matches nothing; a range of layers is malformed or
            exceeds the model; ``"base"`` for a model without a head; nothing would be left to train. The model is
            unchanged then.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> handle = freeze(model, "0")
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
        >>> handle.remove(); trainable_parameters(model)
        12
    """
    check_model(model)
    names = checked_patterns(patterns)
    chosen = {id(parameter): parameter for name in names for parameter in matching_parameters(model, name)}
    if all(id(parameter) in chosen for parameter in model.parameters() if parameter.requires_grad):
        raise ValueError(
            f"patterns={shown_patterns(names)} would leave {type(model).__name__} nothing to train; expected at least "
            "one parameter that stays trainable. Pass patterns='layers:0'"
        )
    return set_trainable(model, dict.fromkeys(chosen.values(), False))


def set_trainable(model: nn.Module, flags: Mapping[nn.Parameter, bool]) -> UndoHandle:
    """Set ``requires_grad`` of parameters, and drop the gradients of those that are frozen.

    The handle restores exactly those flags that this call changed; it does not keep the model alive.
    """
    changed = [
        (weakref.ref(module), name, parameter.requires_grad)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if flags.get(parameter, parameter.requires_grad) != parameter.requires_grad
    ]
    for parameter, is_trained in flags.items():
        parameter.requires_grad_(is_trained)
        if not is_trained:
            parameter.grad = None  # else an optimizer would step once more with it

    def undo() -> None:
        for reference, name, former in changed:
            if (module := reference()) is not None:
                module.get_parameter(name).requires_grad_(former)

    return UndoHandle(undo)


def cast_parameters(dtypes: Mapping[torch.Tensor, torch.dtype]) -> UndoHandle:
    """Give parameters and buffers another dtype, in place, without their gradients: they stay the same objects, tied.

    The handle gives them their former dtype back, exactly or rounded; it does not keep them alive.
    """
    former = [(weakref.ref(parameter), parameter.dtype) for parameter in dtypes]

    def cast(parameter: torch.Tensor, dtype: torch.dtype) -> None:
        parameter.grad = None  # of the former dtype
        parameter.data = parameter.data.to(dtype)

    def undo() -> None:
        for reference, dtype in former:
            if (parameter := reference()) is not None:
                cast(parameter, dtype)

    for parameter, dtype in dtypes.items():
        cast(parameter, dtype)
    return UndoHandle(undo)


def trainable_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters that require a gradient; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
