"""Predict what a Trainer's steps need, from its model, arguments and techniques, beside what was measured of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.conflicts import optimizers_of, techniques_in_use
from hf_memopt.devices.gpus import GPUS
from hf_memopt.memory.estimation import estimate_from_arguments
from hf_memopt.memory.timeline import COMPONENTS, Timeline, phase_spans
from hf_memopt.recipes.measuring.measurement import Figures
from hf_memopt.techniques.checkpointing.policies import CheckpointingCallback
from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_memopt.memory.result import Estimate
    from hf_memopt.recipes.measuring.batches import BatchShape

__all__ = ["estimate_of", "predicted_figures"]

_FLAGS = {
    "gradient release": "gradient_release",
    "fused cross-entropy": "fused_cross_entropy",
    "sparse tied embedding": "sparse_tied_embedding",
}
_KEPT = [COMPONENTS.index(name) for name in ("activations", "logits and loss", "temporaries")]


def estimate_of(trainer: Trainer, shape: BatchShape) -> Estimate:
    """Return the estimate of the trainer's steps with batches of this shape.

    Raises:
        NotEstimableError, ValueError: it cannot be simulated; the message says why.
    """
    model: Any = trainer.model
    args = copy.copy(trainer.args)
    args.per_device_train_batch_size = shape.rows
    is_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    settings = settings_of(trainer)
    if is_decoder and shape.labels_length is not None:
        settings["labels_length"] = shape.labels_length
    return estimate_from_arguments(model, args, shape.seq_len, **settings)


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of ``StepSettings`` that the trainer's callbacks and optimizer decide."""
    used = techniques_in_use(trainer)
    handler = trainer.accelerator.autocast_handler
    found: dict[str, Any] = {field: True for name, field in _FLAGS.items() if name in used}
    found["eval_batch_size"] = None
    found["autocast_cache"] = handler is None or bool(handler.cache_enabled)
    if "16-bit weights" in used:
        found["rounding"] = next(one.rounding for one in optimizers_of(trainer) if hasattr(one, "rounding"))
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, CheckpointingCallback):
            found["checkpointing"] = _checkpointing(callback)
        if isinstance(callback, MicrobatchCallback) and callback.max_examples is not None:
            found["micro_batch_size"] = min(callback.max_examples, trainer.args.train_batch_size)
    return found


def _checkpointing(callback: CheckpointingCallback) -> bool | Mapping[str, Any]:
    kind, _, number = callback.policy.partition("_")
    options: dict[str, Any] = {"every_n_layers": int(number)} if kind == "every" else {}
    return {**options, **({"offload": True} if callback.offload else {})} or True


def predicted_figures(found: Estimate, timed: Estimate | None) -> Figures:
    """Return what an estimate says of what is measured.

    Args:
        found: of the largest batch.
        timed: of the batches that were timed; None where no time is compared.
    """
    timeline = found.timeline
    on_gpu = found.gpu is not None
    workspace = COMPONENTS.index("workspace")
    held = {name: int(timeline.components[:, COMPONENTS.index(name)].max()) for name in COMPONENTS[:3]}
    # a CPU has no workspace of matrix products, nothing reserved and no context
    without = 0 if on_gpu else int(timeline.components[:, workspace].max())
    peaks = {name: size - (0 if name == "load" else without) for name, size in _phase_peaks(timeline).items()}
    time = None if timed is None else timed.step_time
    return Figures(
        allocated_bytes=found.peak_allocated_bytes - without,
        reserved_bytes=found.peak_reserved_bytes if on_gpu else None,
        context_bytes=None if found.gpu is None else GPUS.get(found.gpu.name, found.gpu).context_bytes,
        phases=peaks,
        components={**held, "activations and logits": _kept_by_forward(timeline)},
        seconds=None if time is None else time.seconds,
        low=None if time is None else time.low,
        high=None if time is None else time.high,
    )


def _kept_by_forward(timeline: Timeline) -> int:
    """Return the most that a forward pass leaves for its backward pass."""
    starts = [first for first, name in timeline.phases if name == "backward" and first]
    return max((int(timeline.components[first - 1, _KEPT].sum()) for first in starts), default=0)


def _phase_peaks(timeline: Timeline) -> dict[str, int]:
    """Return the most that is allocated in each phase, what it begins with included."""
    allocated = timeline.components.sum(axis=1)
    peaks: dict[str, int] = {}
    for first, end, name in phase_spans(timeline):
        peaks[name] = max(peaks.get(name, 0), int(allocated[max(first - 1, 0) : end].max()))
    return peaks
