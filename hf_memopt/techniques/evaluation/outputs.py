"""The outputs of one evaluation: reduced on the GPU, moved to the host in time, refused before memory runs out.

All of it uses what stock offers: ``preprocess_logits_for_metrics`` gets the outputs of each batch before they are kept,
and ``eval_accumulation_steps`` is read after each batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_memopt.binding.nested_tensors import tensors_in
from hf_memopt.devices.memory_reading import read_memory
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["KeptOutputs", "OutputSettings", "Reduce", "tensor_bytes"]

Reduce = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """The user's settings; see ``EvaluationGuardCallback``."""

    reduce: Reduce | None
    device_budget_bytes: int


class KeptOutputs:
    """The outputs that stock keeps during one evaluation, and how many bytes of them are allowed."""

    def __init__(self, trainer: Trainer, settings: OutputSettings, dataloader: Any, description: str) -> None:
        self._trainer, self._settings, self._dataloader = trainer, settings, dataloader
        self._reduce = settings.reduce or trainer.preprocess_logits_for_metrics
        self._are_kept = description == "Prediction" or not trainer.args.batch_eval_metrics
        self._chooses_steps = trainer.args.eval_accumulation_steps is None and trainer.args.device.type != "cpu"
        self._largest_bytes = 0
        self._kept_bytes = 0
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun; each of them keeps the outputs of all
        self._available_bytes = read_memory("cpu").host_available_bytes // processes
        self._limit_bytes = self._available_bytes // (2 if trainer.args.eval_do_concat_batches else 1)

    def reduce_and_check(self, logits: Any, labels: Any) -> Any:
        """Reduce the outputs of a batch, and check that there is enough memory; ``preprocess_logits_for_metrics``."""
        outputs = logits if self._reduce is None else self._reduce(logits, labels)
        if not self._are_kept:
            return outputs
        processes = self._trainer.accelerator.num_processes
        on_device_bytes, on_host_bytes = (
            tensor_bytes(outputs, on_host=is_host) * processes for is_host in (False, True)
        )
        if self._chooses_steps and on_device_bytes > self._largest_bytes:
            self._largest_bytes = on_device_bytes
            self._trainer.args.eval_accumulation_steps = max(1, self._settings.device_budget_bytes // on_device_bytes)
        if self._kept_bytes == 0:
            self._check_room(on_host_bytes * self._batches())
        self._kept_bytes += on_host_bytes
        self._check_room(self._kept_bytes)  # the first batch may have been a short one
        return outputs

    def _batches(self) -> int:
        """Return the number of batches; 1 for a stream, whose length is unknown."""
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
    return sum(
        tensor.numel() * (4 if on_host and tensor.dtype == torch.bfloat16 else tensor.element_size())
        for tensor in tensors_in(outputs)
    )
