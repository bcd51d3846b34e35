"""Train a model with a tied vocabulary without two more matrices of its size in the backward pass.

The gradients are bit for bit stock's on a CPU; of Llama-3.2-1B in 16 bits the backward pass needs 1002 MiB less
(``benchmarks/large_models.py``). It pays where that is the peak: with gradient release, or where the vocabulary is
large against the layers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.model_changes import sparse_tied_embedding, tied_embeddings
from hf_memopt.binding.undo import UndoHandle
from hf_memopt.changes import Change, add_change, record_changes
from hf_memopt.techniques.technique_callback import ModelCallback
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["TiedEmbeddingCallback", "sparse_tied_embedding", "tied_embeddings"]

logger = logging.getLogger(__name__)


class TiedEmbeddingCallback(ModelCallback):
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
        super().__init__()

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Change the model, and note that in ``trainer.memopt_changes``."""
        handle = super().bind(trainer)
        record_changes(trainer, self.changes)
        return handle

    def change_model(self, model: Any) -> None:
        """Call ``sparse_tied_embedding``."""
        handle = sparse_tied_embedding(model)
        if handle.is_removed:
            return
        self.handle = self._handles.keep(model, handle)
        weight = tied_embeddings(model)[0].weight
        size = format_bytes(weight.nbytes)
        change = Change("gradient of the tied embeddings", "dense", "rows", f"2 x {size} less in the backward pass")
        if add_change(self.changes, change):
            logger.info(f"TiedEmbeddingCallback changed {change}")
