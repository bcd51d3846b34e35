"""Freeze parts of a model by name, and keep what that saves under checkpointing.

A frozen parameter has no gradient and no optimizer state. A frozen *prefix* (the embeddings and the first layers) has
no backward pass either, so none of its activations are saved. Of a BERT (6 layers, hidden 64, batch 8 x 32) whose
embeddings and first 3 layers are frozen, the graph holds 3.08 MiB instead of 6.17; under non-reentrant checkpointing
0.25 MiB, but 0.50 MiB and twice the frozen layers' forward passes while the hooks that stock ``Trainer`` puts on the
embeddings stay there (``tests/techniques/test_freezing.py`` measures it).

Limitations: no unfreezing on a schedule (``unfreezing``, which needs all parameters in the optimizer); the forward pass
of a frozen layer is as slow as before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.handles import UndoHandle, undo_all
from hf_memopt.changes import Change, add_change
from hf_memopt.techniques.checkpointing.input_gradients import INPUT_GRADIENTS_DROPPED, drop_input_gradients
from hf_memopt.techniques.layer_names import checked_patterns, matching_parameters, shown_patterns
from hf_memopt.techniques.model_handles import ModelHandles

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["FreezeCallback", "freeze", "trainable_parameters"]

logger = logging.getLogger(__name__)


def freeze(model: nn.Module, patterns: str | Iterable[str]) -> UndoHandle:
    """Set ``requires_grad`` to False for every parameter that one of ``patterns`` matches, and drop its gradient.

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
            f"patterns={shown_patterns(names)} would leave {type(model).__name__} nothing to train; expected at least "
            "one parameter that stays trainable. Name less, for example: freeze(model, 'layers:0')."
        )
    changed = [
        (weakref.ref(module), name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in chosen and parameter.requires_grad
    ]
    for parameter in chosen.values():
        parameter.requires_grad_(False)
        parameter.grad = None  # else an optimizer would step once more with it

    def thaw() -> None:
        for reference, name in changed:
            if (module := reference()) is not None:
                module.get_parameter(name).requires_grad_(True)

    return UndoHandle(thaw)


def trainable_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters that require a gradient; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class FreezeCallback(TrainerCallback):
    """Freeze parts of the ``Trainer``'s model before the optimizer is built, and again when ``train()`` starts.

    By then ``model_init`` has rebuilt the model; its frozen parameters are in the optimizer's groups already, but get
    no state. Under checkpointing it also calls ``drop_input_gradients``. It logs no keys.

    Args:
        patterns: what to freeze, as ``freeze`` takes it.

    Attributes:
        changes: what was changed, one ``Change`` per kind.
        handle: undoes the changes to the last model; None before the first.

    Raises:
        ValueError: as ``freeze`` does; empty or malformed patterns at once, the others when ``Trainer`` is constructed.
    """

    technique = "freezing"

    def __init__(self, patterns: str | Iterable[str]) -> None:
        self.patterns = checked_patterns(patterns)
        self.changes: list[Change] = []
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._handles = ModelHandles()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.patterns,)  # a copy starts unused: handles belong to this process and its model

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Freeze before the optimizer is built."""
        self._freeze(model)

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Freeze for a Trainer that was built without this callback; ``attach`` calls it."""
        is_frozen = self._handles.model is trainer.model  # since the Trainer was built
        self._freeze(trainer.model)
        return undo_all(
            self.binding.to(trainer),
            *([] if is_frozen else [self._handles.handle_of(trainer.model)]),
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Freeze a model that is new, and take off the hooks that undo the saving."""
        frozen = self._handles.model
        is_wrapped = model is not frozen and any(module is frozen for module in model.modules())
        if not is_wrapped:  # a wrapper (FSDP1, compile) holds the frozen model under other names
            self._freeze(model)
        dropped = drop_input_gradients(model)
        if not dropped.is_removed:
            self.handle = self._handles.keep(frozen if is_wrapped else model, dropped)
            add_change(self.changes, INPUT_GRADIENTS_DROPPED)

    def _freeze(self, model: Any) -> None:
        before = trainable_parameters(model)
        self.handle = self._handles.keep(model, freeze(model, self.patterns))
        after = trainable_parameters(model)
        if after != before:
            reason = f"frozen: {', '.join(self.patterns)}"
            add_change(self.changes, Change("trainable_parameters", before, after, reason))
            total = sum(parameter.numel() for parameter in model.parameters())
            logger.info(f"FreezeCallback trains {after:,} of {total:,} parameters; {reason}")
