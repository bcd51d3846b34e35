"""Train a model with a tied vocabulary without two more matrices of its size in the backward pass.

The gradients are bit for bit stock's on a CPU; of Llama-3.2-1B in 16 bits the backward pass needs 1002 MiB less
(``benchmarks/large_models.py``). It pays where that is the peak: with gradient release, or where the vocabulary is
large against the layers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding
from hf_memopt.binding.handles import UndoHandle, undo_all
from hf_memopt.binding.tied_embedding import sparse_tied_embedding, tied_embeddings
from hf_memopt.changes import Change, add_change, record_changes
from hf_memopt.techniques.model_handles import ModelHandles
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["TiedEmbeddingCallback", "sparse_tied_embedding", "tied_embeddings"]

logger = logging.getLogger(__name__)


class TiedEmbeddingCallback(TrainerCallback):
    """Call ``sparse_tied_embedding`` for the ``Trainer``'s model, and again when ``train()`` starts with a new one.

    It logs no keys.

    Attributes:
        changes: what was changed, one ``Change``.
        handle: undoes the change to the last model; None before the first.

    Raises:
        ValueError: as ``sparse_tied_embedding`` does, when the ``Trainer`` is constructed or attached.
    """

    technique = "sparse tied embedding"

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._handles = ModelHandles()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy starts unused: handles belong to this process and its model

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Change the model."""
        self._change(model)

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Change the model of a Trainer that was built without this callback; ``attach`` calls it."""
        is_changed = self._handles.model is trainer.model  # since the Trainer was built
        self._change(trainer.model)
        record_changes(trainer, self.changes)
        return undo_all(self.binding.to(trainer), *([] if is_changed else [self._handles.handle_of(trainer.model)]))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Change a model that is new: ``model_init`` gives one to each run."""
        changed = self._handles.model
        if not any(module is changed for module in model.modules()):  # a wrapper holds the changed model
            self._change(model)

    def _change(self, model: Any) -> None:
        handle = sparse_tied_embedding(model)
        if handle.is_removed:
            return
        self.handle = self._handles.keep(model, handle)
        weight = tied_embeddings(model)[0].weight
        size = format_bytes(weight.nbytes)
        change = Change("gradient of the tied embeddings", "dense", "rows", f"2 x {size} less in the backward pass")
        if add_change(self.changes, change):
            logger.info(f"TiedEmbeddingCallback changed {change}")
