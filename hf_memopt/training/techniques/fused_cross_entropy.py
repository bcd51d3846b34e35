"""Train a language model without its logits: ``fuse_cross_entropy`` for the model of a ``Trainer``.

What it does and what it leaves out is in ``hf_memopt.training.binding.fused_loss.fuse``. ``compute_metrics`` and
``preprocess_logits_for_metrics`` get real logits. An evaluation without them wants the loss alone
(``prediction_loss_only``): it makes none after ``attach(trainer)``, and ``eval_loss`` is stock's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from hf_memopt.plain_data import Count, check_value, shown
from hf_memopt.training.binding.compatibility import check_settings
from hf_memopt.training.binding.fused_loss import FusedHandle, fuse_cross_entropy, loss_alone
from hf_memopt.training.binding.undo import UndoHandle, override_method, undo_all
from hf_memopt.training.techniques.technique_callback import ModelCallback

if TYPE_CHECKING:
    from transformers import Trainer


class FusedCrossEntropyCallback(ModelCallback):
    """Compute the training loss without the logits: call ``fuse_cross_entropy`` for each model of the ``Trainer``.

    It does so when the ``Trainer`` is built, and when ``train()`` starts with a model of ``model_init``. It logs no
    keys. What was fused, and each operation that made real logits in training, is in ``changes``, and in
    ``trainer.memopt_changes`` after ``attach(trainer)``; a first step in which no loss was fused warns.

    Args:
        chunk_bytes: as ``fuse_cross_entropy`` takes it.

    Attributes:
        changes: what was done, one ``Change`` per kind.
        handle: undoes the fusion of the last model; None before the first. Its ``record`` counts.

    Raises:
        ValueError: ``chunk_bytes`` out of range, at once; what ``fuse_cross_entropy`` refuses, when the ``Trainer`` is
            constructed; settings that it is incompatible with (``hf_memopt.training.binding.compatibility``).
        TypeError: the head is not a linear layer, when the ``Trainer`` is constructed.
    """

    technique = "fused cross-entropy"

    handle: FusedHandle | None

    def __init__(self, chunk_bytes: int | None = None) -> None:
        check_value("chunk_bytes", chunk_bytes, Count | None, 64 * 2**20)
        super().__init__(chunk_bytes)
        self.chunk_bytes = chunk_bytes

    def change_model(self, model: Any, args: Any) -> None:
        """Fuse a model that is new."""
        if self._handles.model is not model or self.handle is None or self.handle.is_removed:
            fused = fuse_cross_entropy(model, chunk_bytes=self.chunk_bytes)
            self.handle = FusedHandle(self._handles.keep(model, fused), fused.record)

    def bind(self, trainer: Trainer) -> UndoHandle:
        """Fuse the model, and the loss of evaluations that want nothing else.

        Raises:
            ValueError: there is a metric, and ``prediction_loss_only=True``, with which stock never calls it.
        """
        if trainer.args.prediction_loss_only and trainer.compute_metrics is not None:
            raise ValueError(
                f"compute_metrics={shown(trainer.compute_metrics)} is never called with prediction_loss_only=True; "
                "expected one of them. Pass prediction_loss_only=False, per_device_eval_batch_size=1, "
                "eval_accumulation_steps=1: evaluation keeps logits then"
            )
        bound, override = super().bind(trainer), override_method(trainer, "prediction_step", _without_logits)
        self._handles.keep(trainer.model, override)
        return undo_all(bound, override)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse settings here too, for a Trainer that is not attached; fuse a model that is new."""
        check_settings(self.technique, args)
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what was fused and what made real logits."""
        if self.handle is None:
            return
        record = self.handle.record
        self.note(*record.changes())
        if record.fused == 0 and not record.warned:
            record.warned = True
            found = ", ".join(record.real) or "the head was not called"
            warnings.warn(
                f"FusedCrossEntropyCallback fused no loss in a training step ({found}); expected cross_entropy of the "
                "head's logits. Take it out of callbacks=, or see trainer.memopt_changes for what made real logits",
                stacklevel=2,
            )


def _without_logits(
    before: Callable[..., Any], model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
) -> Any:
    with loss_alone() if prediction_loss_only else nullcontext():
        return before(model, inputs, prediction_loss_only, *args, **kwargs)
