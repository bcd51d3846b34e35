"""The outputs of one evaluation: reduced on the card, moved to the host in time, refused before memory is gone.

All by what stock itself offers: ``preprocess_logits_for_metrics`` sees the outputs of each batch before they are kept,
and ``eval_accumulation_steps`` is read after each batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.devices.memory_reading import read_memory
from hf_memopt.units import format_bytes

__all__ = ["KeptOutputs", "OutputSettings", "Reduce", "tensor_bytes"]

Reduce = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """What the user asked for; see ``EvaluationGuardCallback``."""

    reduce: Reduce | None
    card_budget_bytes: int


class KeptOutputs:
    """What stock keeps of one evaluation, and how much of it there may be."""

    def __init__(self, trainer: Any, settings: OutputSettings, dataloader: Any, description: str) -> None:
        self._trainer, self._settings, self._dataloader = trainer, settings, dataloader
        self._reduce = settings.reduce or trainer.preprocess_logits_for_metrics
        self._are_kept = description == "Prediction" or not trainer.args.batch_eval_metrics
        self._chooses_steps = trainer.args.eval_accumulation_steps is None and trainer.args.device.type != "cpu"
        self._largest_bytes = 0
        self._held_bytes = 0
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's: each on this host keeps what all put out
        self._available_bytes = read_memory("cpu").host_available_bytes // processes
        self._limit_bytes = self._available_bytes // (2 if trainer.args.eval_do_concat_batches else 1)

    def receive(self, logits: Any, labels: Any) -> Any:
        """Reduce the outputs of a batch, and see that there is room for them."""
        outputs = logits if self._reduce is None else self._reduce(logits, labels)
        if not self._are_kept:
            return outputs
        processes = self._trainer.accelerator.num_processes
        on_card_bytes, on_host_bytes = (tensor_bytes(outputs, on_host=is_host) * processes for is_host in (False, True))
        if self._chooses_steps and on_card_bytes > self._largest_bytes:
            self._largest_bytes = on_card_bytes
            self._trainer.args.eval_accumulation_steps = max(1, self._settings.card_budget_bytes // on_card_bytes)
        if self._held_bytes == 0:
            self._check_room(on_host_bytes * self._batches())
        self._held_bytes += on_host_bytes
        self._check_room(self._held_bytes)  # the first batch may have been a short one
        return outputs

    def _batches(self) -> int:
        """Return the number of batches, as far as it is known: 1 of a stream."""
        try:
            return len(self._dataloader)
        except TypeError:
            return 1

    def _check_room(self, needed_bytes: int) -> None:
        if needed_bytes <= self._limit_bytes:
            return
        needed, available, limit = map(format_bytes, (needed_bytes, self._available_bytes, self._limit_bytes))
        half = f"half of the {available} available, because concatenation holds them twice"
        why = half if self._limit_bytes < self._available_bytes else "all that is available"
        raise MemoryError(
            f"evaluation outputs need {needed} of host memory; only {limit} may be used ({why}). Reduce them on "
            "the GPU: EvaluationGuardCallback(reduce='argmax'), or compute metrics batch by batch: "
            "TrainingArguments(..., batch_eval_metrics=True)"
        )


def tensor_bytes(outputs: Any, *, on_host: bool = False) -> int:
    """Return the bytes of all tensors in nested outputs, or of the arrays on the host, where bfloat16 is float32."""
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    if isinstance(outputs, (tuple, list)):
        return sum(tensor_bytes(one, on_host=on_host) for one in outputs)
    if not torch.is_tensor(outputs):
        return 0
    return outputs.numel() * (4 if on_host and outputs.dtype == torch.bfloat16 else outputs.element_size())
