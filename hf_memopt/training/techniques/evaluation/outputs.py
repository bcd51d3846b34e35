"""The outputs of one evaluation: reduced on the GPU, moved to the host in time, refused before memory runs out.

All of it uses what stock offers: ``preprocess_logits_for_metrics`` gets the outputs of each batch before they are kept,
and ``eval_accumulation_steps`` is read after each batch. Where the user's ``compute_metrics`` needs whole predictions
(``metric_check``), they stay whole if they fit.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer

from hf_memopt.notices import notify
from hf_memopt.training.binding.model import tensors_in
from hf_memopt.training.devices.readings import read_memory
from hf_memopt.training.techniques.evaluation.metric_check import Reduce, why_whole
from hf_memopt.units import format_bytes

logger = logging.getLogger(__name__)


class KeptOutputs:
    """The outputs that stock keeps during one evaluation, and how many bytes of them are allowed."""

    def __init__(
        self,
        trainer: Trainer,
        reduce: Reduce | None,
        name: str,  # of the reduction, in messages
        budget_bytes: int,  # on the device, before they are moved
        dataloader: Any,
        description: str,
    ) -> None:
        self._trainer, self._name, self._budget_bytes, self._dataloader = trainer, name, budget_bytes, dataloader
        # why compute_metrics needs them whole, and a remedy; () where it does not, None: not checked yet
        self.why_whole: tuple[str, ...] | None = ()
        self.is_reduced = False  # anything of this evaluation
        # what this evaluation replaces
        self.of_trainer = trainer.preprocess_logits_for_metrics, trainer.args.eval_accumulation_steps
        self._reduce = reduce or trainer.preprocess_logits_for_metrics
        self._are_kept = description == "Prediction" or not trainer.args.batch_eval_metrics
        self._chooses_steps = trainer.args.eval_accumulation_steps is None and trainer.args.device.type != "cpu"
        self._largest_bytes = 0
        self._kept_bytes = 0
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun; each of them keeps the outputs of all
        self._available_bytes = read_memory("cpu").host_available_bytes // processes
        self._limit_bytes = self._available_bytes // (2 if trainer.args.eval_do_concat_batches else 1)

    def reduce_and_check(self, logits: Any, labels: Any) -> Any:
        """Reduce the outputs of a batch, and check that there is enough memory; ``preprocess_logits_for_metrics``."""
        if self.why_whole is None and labels is not None:
            self.why_whole = self._checked(logits, labels)
        outputs = logits if self._reduce is None or self.why_whole else self._reduce(logits, labels)
        self.is_reduced |= outputs is not logits
        if not self._are_kept:
            return outputs
        processes = self._trainer.accelerator.num_processes
        on_device_bytes, on_host_bytes = (
            tensor_bytes(outputs, on_host=is_host) * processes for is_host in (False, True)
        )
        if self._chooses_steps and on_device_bytes > self._largest_bytes:
            self._largest_bytes = on_device_bytes
            self._trainer.args.eval_accumulation_steps = max(1, self._budget_bytes // on_device_bytes)
        if self._kept_bytes == 0:
            self._check_room(on_host_bytes * self._batches())
        self._kept_bytes += on_host_bytes
        self._check_room(self._kept_bytes)  # the first batch may have been a short one
        return outputs

    def _checked(self, logits: Any, labels: Any) -> tuple[str, ...]:
        """Return why predictions stay whole: one answer for all processes, each of which checks its own rows."""
        trainer: Any = self._trainer
        processes, needed_bytes = trainer.accelerator.num_processes, tensor_bytes(logits, on_host=True)
        count = next((len(one) for one in tensors_in(logits) if one.dim()), 1)
        most_bytes = min(self._limit_bytes, self._budget_bytes) // 2  # two copies of them
        rows = max(min(count, count * most_bytes // max(needed_bytes, 1)), 1)
        assert self._reduce is not None  # else nothing is checked
        why = why_whole(trainer, self._reduce, self._name, logits, labels, rows)
        needed_bytes *= processes * self._batches() if self._are_kept else 0
        found = gather_object([(why, needed_bytes <= self._limit_bytes)])
        why = next((one for one, _ in found if one), ())
        if why and not all(fits for _, fits in found):
            raise ValueError(self._in_words(why, needed_bytes))
        if why and trainer.is_local_process_zero():
            size = f"{format_bytes(needed_bytes)} of host memory" if needed_bytes else "one batch at a time"
            notify(logger, f"evaluation: {why[0]} Predictions stay whole, {size}. {why[1]}.")
        return why

    def _in_words(self, why: tuple[str, ...], needed_bytes: int) -> str:
        """Return why predictions that stay whole are refused."""
        needed, limit = format_bytes(needed_bytes), format_bytes(self._limit_bytes)
        return f"{why[0]} Whole predictions need {needed} of host memory; only {limit} may be used. {why[1]}"

    def _batches(self) -> int:
        """Return the number of batches; 1 for a stream, whose length is unknown."""
        try:
            return len(self._dataloader)
        except TypeError:
            return 1

    def _check_room(self, needed_bytes: int) -> None:
        if needed_bytes <= self._limit_bytes:
            return
        if self.why_whole:
            raise ValueError(self._in_words(self.why_whole, needed_bytes))
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
