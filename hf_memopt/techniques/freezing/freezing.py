"""Freeze parts of a model by name, and keep what that saves under checkpointing.

A frozen parameter has no gradient and no optimizer state. A frozen *prefix* (the embeddings and the first layers) has
no backward pass either, so none of its activations are saved. Of a BERT (6 layers, hidden 64, batch 8 x 32) whose
embeddings and first 3 layers are frozen, the graph holds 3.08 MiB instead of 6.17; under non-reentrant checkpointing
0.25 MiB, but 0.50 MiB and twice the frozen layers' forward passes while the hooks that stock ``Trainer`` puts on the
embeddings stay there (``tests/techniques/test_freezing.py`` measures it).

Left out: unfreezing on a schedule (``unfreezing.py``: it needs all parameters in the optimizer), and the
speed of a frozen layer's forward pass, which is the same.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.handles import UndoHandle, remove_all
from hf_memopt.binding.versions import is_checkpointing
from hf_memopt.changes import Change, add_change
from hf_memopt.errors import did_you_mean

__all__ = [
    "FreezeCallback",
    "checked_patterns",
    "drop_input_gradients",
    "freeze",
    "input_gradient_hooks",
    "layer_stacks",
    "matching_parameters",
    "trainable_parameters",
]

logger = logging.getLogger(__name__)

_LAYERS = re.compile(r"layers:(\d+)(?:-(\d+))?")
_WORDS = ("embeddings", "base", "layers:0")

INPUT_GRADIENTS_DROPPED = Change(
    "input_require_grads",
    True,
    False,
    "non-reentrant checkpointing needs no gradient there, and it would undo what a frozen prefix saves",
)
"""What a callback records where it has called ``drop_input_gradients``."""


def freeze(model: nn.Module, patterns: str | Iterable[str]) -> UndoHandle:
    """Set ``requires_grad`` to False for every parameter that one of ``patterns`` names, and drop its gradient.

    A pattern is one of:

    - the name of a parameter or of a module, as ``named_modules`` gives it: ``"bert.pooler"`` (all of its parameters);
    - a glob over those names, in which ``*`` crosses dots: ``"bert.encoder.layer.[0-3].*"``, ``"*.bias"``;
    - ``"embeddings"``: token, position and type embeddings with their norm and projection, outside the repeated layers.
      T5's ``relative_attention_bias`` sits in a layer and is none; DeBERTa-v2's ``rel_embeddings`` is one, but the norm
      after it (``encoder.LayerNorm``) has no telling name: give it as a pattern of its own;
    - ``"base"``: all but the head, i.e. transformers' ``base_model``; of a model wrapped by PEFT the wrapped model's,
      never the adapters;
    - ``"layers:0-11"`` or ``"layers:3"``: layers by index, the last included, in every stack of ``layer_stacks``
      (encoder and decoder alike), adapters in them included. ALBERT's layers share one group: its only index is 0.

    Tied weights are one parameter under several names: to freeze the embedding of a tied model freezes its head.
    Parameters that are frozen already may be named.

    Returns:
        A handle whose ``remove()`` sets exactly those flags again that this call changed; it keeps no model alive.

    Raises:
        ValueError: ``patterns`` is empty or no text; a pattern matches nothing; a range of layers is malformed or
            exceeds the model; ``"base"`` for a model without a head; nothing would be left to train. The model is
            unchanged then.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> handle = freeze(model, "0")
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
        >>> handle.remove(); trainable_parameters(model)
        12
    """
    names = checked_patterns(patterns)
    chosen = {id(parameter): parameter for name in names for parameter in matching_parameters(model, name)}
    if all(id(parameter) in chosen for parameter in model.parameters() if parameter.requires_grad):
        raise ValueError(
            f"patterns={_shown(names)} would leave {type(model).__name__} nothing to train; expected at least one "
            "parameter that stays trainable. Name less, for example: freeze(model, 'layers:0')."
        )
    changed = [
        (weakref.ref(module), name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in chosen and parameter.requires_grad
    ]
    for parameter in chosen.values():
        parameter.requires_grad_(False)
        parameter.grad = None  # an optimizer would step once more with what is left there

    def thaw() -> None:
        for reference, name in changed:
            if (module := reference()) is not None:
                module.get_parameter(name).requires_grad_(True)

    return UndoHandle(thaw)


def trainable_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters that require a gradient; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def layer_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the model's stacks of repeated layers by name, whatever the architecture calls them.

    A stack is an outermost ``nn.ModuleList`` of transformers' ``GradientCheckpointingLayer``; where some of them attend
    (a class name with "Attention"), only those count: Wav2Vec2's feature extractor is no stack of layers.
    A model without such lists (ALBERT) has one stack: the list of same-class modules with most parameters.

    Example:
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
        attending = {name: stack for name, stack in stacks.items() if _attends(stack)}
        return attending or stacks
    uniform = [name for name, layers in lists.items() if len({type(layer) for layer in layers}) == 1]
    if not uniform:
        return {}
    largest = max(uniform, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return {largest: lists[largest]}


def drop_input_gradients(model: Any) -> UndoHandle | None:
    """Take off the hooks that make the embeddings' output require a gradient, where checkpointing can do without.

    Stock ``Trainer`` puts them on every checkpointed text model. Reentrant checkpointing needs them; adapters are left
    alone too. Non-reentrant checkpointing needs none, and there they undo what a frozen prefix saves.

    Returns:
        A handle that puts the hooks on again, or None where nothing was done: the model is not checkpointed, the
        variant is reentrant or unknown, PEFT adapters are loaded, or there are no such hooks.
    """
    if hasattr(model, "peft_config") or not is_checkpointing(model) or not _is_non_reentrant(model):
        return None
    hooks = input_gradient_hooks(model)
    if not hooks:
        return None
    model.disable_input_require_grads()
    for module, key in hooks:  # it only knows the last set, and enabling twice (by hand, then by Trainer) adds two
        module._forward_hooks.pop(key, None)
    reference = weakref.ref(model)

    def enable() -> None:
        alive = reference()
        if alive is not None and not input_gradient_hooks(alive):
            alive.enable_input_require_grads()

    return UndoHandle(enable)


class FreezeCallback(TrainerCallback):
    """Freeze parts of the ``Trainer``'s model before the optimizer is built, and again when ``train()`` starts.

    By then ``model_init`` has rebuilt the model; its frozen parameters are in the optimizer's groups already, but get
    no state. Under checkpointing it also calls ``drop_input_gradients``.

    Args:
        patterns: what to freeze, as ``freeze`` takes it.

    Attributes:
        changes: what was done, one ``Change`` per kind.
        handle: undoes what was done to the model seen last; None before the first.

    Raises:
        ValueError: as ``freeze`` does; empty or malformed patterns at once, the others when ``Trainer`` is constructed.
    """

    technique = "freezing"

    def __init__(self, patterns: str | Iterable[str]) -> None:
        self.patterns = checked_patterns(patterns)
        self.changes: list[Change] = []
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._undo: list[UndoHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.patterns,)  # a copy starts unused: handles belong to this process and its model

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Freeze before the optimizer is built."""
        self._freeze(model)

    def bind(self, trainer: Any) -> None:
        """Freeze for a Trainer that was built without this callback; ``attach`` calls it."""
        self._freeze(trainer.model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Freeze a model that is new since, and take off the hooks that undo the saving."""
        frozen = self._model()
        is_wrapped = model is not frozen and any(module is frozen for module in model.modules())
        if not is_wrapped:  # a wrapper (FSDP1, compile) holds the frozen model under other names
            self._freeze(model)
        dropped = drop_input_gradients(model)
        if dropped is not None:
            self._undo.append(dropped)
            add_change(self.changes, INPUT_GRADIENTS_DROPPED)

    def _freeze(self, model: nn.Module) -> None:
        if self._model() is not model:
            self._model, self._undo = weakref.ref(model), []
        before = trainable_parameters(model)
        self._undo.append(freeze(model, self.patterns))
        self.handle = UndoHandle(partial(remove_all, self._undo))
        after = trainable_parameters(model)
        if after != before:
            reason = f"frozen: {', '.join(self.patterns)}"
            add_change(self.changes, Change("trainable_parameters", before, after, reason))
            total = sum(parameter.numel() for parameter in model.parameters())
            logger.info(f"FreezeCallback trains {after:,} of {total:,} parameters; {reason}")


def checked_patterns(patterns: Any) -> tuple[str, ...]:
    """Return the patterns as a tuple, or raise for what is no pattern whatever the model."""
    expected = "expected one pattern or several. Write, for example, patterns=['embeddings', 'layers:0-3']."
    if not isinstance(patterns, Iterable) or isinstance(patterns, bytes):
        raise ValueError(f"patterns={patterns!r} is not text; {expected}")
    names = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not names:
        raise ValueError(f"patterns={patterns!r} is empty; {expected}")
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"patterns={list(names)!r} contains {name!r}, which is not text; {expected}")
        if not name.strip():
            raise ValueError(f"patterns={_shown(names)} contains an empty pattern; {expected}")
        if name.startswith("layers:"):
            _layer_range(name)
    return names


def _shown(names: tuple[str, ...]) -> str:
    return repr(names[0] if len(names) == 1 else list(names))


def matching_parameters(model: nn.Module, pattern: str) -> list[nn.Parameter]:
    """Return the parameters that one pattern names; never none."""
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
            "See the names with: print([name for name, _ in model.named_modules()])"
        )
    return matched


def _prefixes(name: str) -> list[str]:
    """Return a parameter's name and those of the modules around it, outermost first."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in outer)


def _attends(stack: nn.ModuleList) -> bool:
    return any("Attention" in type(module).__name__ for module in stack.modules())


def input_gradient_hooks(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the hooks of ``enable_input_require_grads``, each as its module and its key there."""
    return [
        (module, key)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()
        # the name it has in transformers 5.8.1, 5.17.0 and 5.23.0
        if getattr(hook, "__name__", None) == "make_inputs_require_grads"
    ]


def _is_non_reentrant(model: nn.Module) -> bool:
    """Tell whether each checkpointed module of the model is known to use the non-reentrant variant."""
    # a functools.partial of torch's checkpoint, seen in transformers 5.8.1, 5.17.0 and 5.23.0; read here, not in the
    # arguments, since checkpointing may be switched on by hand, and without the option torch itself is reentrant
    functions = [
        getattr(module, "_gradient_checkpointing_func", None)
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    ]
    return all(getattr(function, "keywords", {}).get("use_reentrant") is False for function in functions)


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


def _base_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters of transformers' ``base_model``, without those of PEFT's adapters."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = getattr(inner, "base_model", inner)
    if base is inner:
        raise ValueError(
            f"patterns='base' needs a head apart from the base model, and {type(inner).__name__} has none; expected a "
            "model whose base_model is a part of it. Give layers or names, for example: freeze(model, 'layers:0')."
        )
    adapters = {  # of peft's BaseTunerLayer and AuxiliaryTrainingWrapper, seen in peft 0.21.2
        f"{owner}.{name}"
        for owner, module in base.named_modules()
        for name in getattr(module, "adapter_layer_names", ())
    }
    return [parameter for name, parameter in base.named_parameters() if adapters.isdisjoint(_prefixes(name))]


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
            "layers. Give names instead: print([name for name, _ in model.named_modules()])"
        )
    shortest = min(map(len, stacks.values()))
    if last >= shortest:
        ranges = " and ".join(f"0-{len(stack) - 1} ({name})" for name, stack in stacks.items())
        raise ValueError(
            f"patterns={pattern!r} exceeds the layers of {type(model).__name__}; expected indices within {ranges}. "
            f"Write 'layers:0-{shortest - 1}', or name the layers of one stack."
        )
    return {f"{name}.{index}" for name in stacks for index in range(first, last + 1)}
