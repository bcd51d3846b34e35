"""Freeze parts of a model by name, and keep what that saves under checkpointing.

A frozen parameter has no gradient and no optimizer state. A frozen *prefix* (the embeddings and the first layers) has
no backward pass either, so none of its activations are saved. Of a BERT (6 layers, hidden 64, batch 8 x 32) whose
embeddings and first 3 layers are frozen, the graph holds 3.08 MiB instead of 6.17; under non-reentrant checkpointing
0.25 MiB, but 0.50 MiB and twice the frozen layers' forward passes while the hooks that stock ``Trainer`` puts on the
embeddings stay there (``tests/techniques/test_freezing.py`` measures it).

Limitations: no unfreezing on a schedule; the forward pass of a frozen layer is as slow as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import Change, add_change
from hf_memopt.training.binding.model_changes import INPUT_GRADIENTS_DROPPED, drop_input_gradients
from hf_memopt.training.binding.parameters import checked_patterns, freeze, trainable_parameters
from hf_memopt.training.binding.undo import UndoHandle, override_method, undo_all
from hf_memopt.training.techniques import ModelCallback

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["FreezeCallback", "freeze", "trainable_parameters"]

logger = logging.getLogger(__name__)


class FreezeCallback(ModelCallback):
    """Freeze parts of the ``Trainer``'s model before the optimizer is built, and again when ``train()`` starts.

    A model of ``model_init`` is frozen as soon as ``train()`` has made it after ``attach(trainer)``, which DDP needs.
    Without, its frozen parameters are in the optimizer's groups already, but get no state. Under checkpointing it also
    calls ``drop_input_gradients``. It logs no keys.

    Args:
        patterns: what to freeze, as ``freeze`` takes it.

    Attributes:
        changes: what was changed, one ``Change`` per kind.
        handle: undoes the changes to the last model; None before the first.

    Raises:
        ValueError: as ``freeze`` does; empty or malformed patterns at once, the others when ``Trainer`` is constructed.
    """

    technique = "freezing"
    only_watches = True  # see ``binding.passed_parts``

    def __init__(self, patterns: str | Iterable[str]) -> None:
        self.patterns = checked_patterns(patterns)
        super().__init__(self.patterns)

    def change_model(self, model: Any, args: Any) -> None:
        """Freeze before the optimizer is built."""
        before = trainable_parameters(model)
        self.handle = self._handles.keep(model, freeze(model, self.patterns))
        after = trainable_parameters(model)
        if after != before:
            reason = f"frozen: {', '.join(self.patterns)}"
            add_change(self.changes, Change("trainable_parameters", before, after, reason))
            total = sum(parameter.numel() for parameter in model.parameters())
            logger.info(f"FreezeCallback trains {after:,} of {total:,} parameters; {reason}")

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Freeze the model, and each that ``model_init`` makes: DDP waits for the gradient of what is trained now."""

        def call_model_init(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            model = before(*args, **kwargs)
            if self.is_in(trainer):
                self.change_model(model, None)
            return model

        is_making = trainer.model_init is not None and self.binding.trainer is not trainer
        bound = super().bind(trainer)
        return undo_all(bound, override_method(trainer, "call_model_init", call_model_init)) if is_making else bound

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Freeze a model that is new, or that was thawed since, and take off the hooks that undo the saving."""
        if model is self._handles.model:
            self.change_model(model, args)
        super().on_train_begin(args, state, control, model, **kwargs)
        dropped = drop_input_gradients(model)
        if not dropped.is_removed:
            self.handle = self._handles.keep(self._handles.model, dropped)
            self.note(INPUT_GRADIENTS_DROPPED, logs=False)
