"""Estimate the steps of a Trainer as it is: its model, its arguments, and the techniques that it uses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.compatibility import optimizers_of, techniques_in_use
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.training_arguments import estimate_from_arguments
from hf_memopt.technique_list import TECHNIQUES, load

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_memopt.memory.result import Estimate
    from hf_memopt.memory.settings import BatchShape


def estimate_of(trainer: Trainer, shape: BatchShape, **overrides: Any) -> Estimate:
    """Return the estimate of the trainer's steps with batches of this shape.

    Args:
        trainer: not changed.
        shape: of a batch.
        overrides: fields of ``StepSettings`` that differ from the trainer's.

    Raises:
        NotEstimableError, ValueError: it cannot be simulated; the message says why.
    """
    model: Any = trainer.model
    args = copy.copy(trainer.args)
    args.per_device_train_batch_size = shape.rows
    is_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    settings = {**settings_of(trainer), **overrides}
    if is_decoder and shape.labels_length is not None:
        settings["labels_length"] = shape.labels_length
    return estimate_from_arguments(model, args, shape.seq_len, **settings)


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of ``StepSettings`` that the trainer's callbacks and optimizer decide."""
    used = techniques_in_use(trainer)
    handler, has_metric = trainer.accelerator.autocast_handler, trainer.compute_metrics is not None
    own = {item.name: item.default for item in fields(StepSettings)}
    techniques = [TECHNIQUES[name] for name in used]
    found: dict[str, Any] = {field: True for one in techniques for field in one.fields if own.get(field) is False}
    if functions := [load(one.on_model) for one in techniques if one.on_model and not own.keys() & one.fields.keys()]:
        found["prepare"] = tuple(functions)
    found["prediction_loss_only"] = trainer.args.prediction_loss_only or not has_metric  # as stock's evaluate
    found["autocast_cache"] = handler is None or bool(handler.cache_enabled)
    if "16-bit weights" in used:
        found["rounding"] = next(one.rounding for one in optimizers_of(trainer) if hasattr(one, "rounding"))
    callback: Any
    for callback in trainer.callback_handler.callbacks:
        technique = getattr(callback, "technique", None)
        if technique in used:
            found |= {name: getattr(callback, name) for name in TECHNIQUES[technique].arguments}
        if technique == "checkpointing policy":
            found["checkpointing"] = _checkpointing(callback.policy, callback.offload)
        if technique == "micro-batching" and callback.max_examples is not None:
            found["micro_batch_size"] = min(callback.max_examples, trainer.args.train_batch_size)
    return found


def _checkpointing(policy: str, offload: bool | str) -> bool | Mapping[str, Any]:
    kind, _, number = policy.partition("_")
    options: dict[str, Any] = {"every_n_layers": int(number)} if kind == "every" else {}
    return {**options, **({"offload": offload} if offload else {})} or True
