"""Train a model with a tied vocabulary without two more matrices of its size in the backward pass.

The gradients are bit for bit stock's on a CPU; of Llama-3.2-1B in 16 bits the backward pass needs 1002 MiB less
(``benchmarks/large_models.py``). It pays where that is the peak: with gradient release, or where the vocabulary is
large against the layers.
"""

from __future__ import annotations

from typing import Any

from hf_memopt.changes import Change
from hf_memopt.training.binding.model_changes import sparse_tied_embedding, tied_embeddings
from hf_memopt.training.techniques.technique_callback import ModelCallback
from hf_memopt.units import format_bytes

__all__ = ["TiedEmbeddingCallback", "sparse_tied_embedding", "tied_embeddings"]


class TiedEmbeddingCallback(ModelCallback):
    """Keep one gradient of tied embeddings: call ``sparse_tied_embedding`` for each model of the ``Trainer``.

    It logs no keys.

    Attributes:
        changes: what was changed, one ``Change``.
        handle: undoes the change to the last model; None before the first.

    Raises:
        ValueError: as ``sparse_tied_embedding`` does, when the ``Trainer`` is constructed or attached.
    """

    technique = "sparse tied embedding"

    def __init__(self) -> None:  # scripts are written by the parameters
        super().__init__()

    def change_model(self, model: Any, args: Any) -> None:
        """Call ``sparse_tied_embedding``."""
        handle = sparse_tied_embedding(model)
        if handle.is_removed:
            return
        self.handle = self._handles.keep(model, handle)
        reason = f"2 x {format_bytes(tied_embeddings(model)[0].weight.nbytes)} less in the backward pass"
        self.note(Change("gradient of the tied embeddings", "dense", "rows", reason))
