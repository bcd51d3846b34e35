"""Where the outputs of one evaluation are kept: reduced on the card, moved to the host in time, or on disk.

All by what stock itself offers: ``preprocess_logits_for_metrics`` sees the outputs of each batch before they are kept,
``eval_accumulation_steps`` is read after each batch, and ``compute_metrics`` gets what was kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memopt.devices.memory_reading import read_memory
from hf_memopt.techniques.evaluation.spilling import SpilledOutputs, check_disk, is_spillable, tensor_bytes
from hf_memopt.units import format_bytes

__all__ = ["KeptOutputs", "OutputSettings", "Reduce"]

logger = logging.getLogger(__name__)

Reduce = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """What the user asked for; see ``EvaluationGuardCallback``."""

    reduce: Reduce | None
    card_budget_bytes: int
    host_budget_bytes: int | None
    spill_folder: str | None


class KeptOutputs:
    """What stock keeps of one evaluation: where it is held, and the way back from the numbers of rows."""

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
        self._is_placed = self._can_spill = False
        self._spilled: SpilledOutputs | None = None

    def receive(self, logits: Any, labels: Any) -> Any:
        """Reduce the outputs of a batch, and put them where there is room."""
        outputs = logits if self._reduce is None else self._reduce(logits, labels)
        if not self._are_kept:
            return outputs
        processes = self._trainer.accelerator.num_processes
        on_card_bytes, on_host_bytes = (tensor_bytes(outputs, on_host=is_host) * processes for is_host in (False, True))
        if self._chooses_steps and on_card_bytes > self._largest_bytes:
            self._largest_bytes = on_card_bytes
            self._trainer.args.eval_accumulation_steps = max(1, self._settings.card_budget_bytes // on_card_bytes)
        if not self._is_placed:
            self._is_placed = True
            self._place(outputs, on_host_bytes)
        if self._spilled is not None:
            return self._spilled.add(outputs)
        self._held_bytes += on_host_bytes
        if self._held_bytes > self._limit_bytes:  # the first batch was a short one
            self._refuse(self._held_bytes)
        return outputs

    def _place(self, outputs: Any, batch_bytes: int) -> None:
        """Decide by the first batch whether the outputs of all stay on the host or go to disk."""
        budget_bytes = self._settings.host_budget_bytes
        if budget_bytes is None:
            budget_bytes = self._limit_bytes // 2
        args = self._trainer.args
        is_stock_form = args.eval_do_concat_batches and not args.batch_eval_metrics
        self._can_spill = is_stock_form and self._trainer.accelerator.num_processes == 1 and is_spillable(outputs)
        expected_bytes = self._expected_bytes(batch_bytes)
        if expected_bytes is not None and expected_bytes <= budget_bytes:
            return
        if self._can_spill:
            folder = Path(self._settings.spill_folder or args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            check_disk(folder, expected_bytes or 0)
            self._spilled = SpilledOutputs(folder)
            size = "of unknown size" if expected_bytes is None else f"of {format_bytes(expected_bytes)}"
            logger.info(f"outputs {size} of this evaluation go to disk, in {str(folder)!r}")
        elif expected_bytes is not None and expected_bytes > self._limit_bytes:
            self._refuse(expected_bytes)

    def _expected_bytes(self, batch_bytes: int) -> int | None:
        try:
            return batch_bytes * len(self._dataloader)
        except TypeError:  # a stream
            return None

    def _refuse(self, needed_bytes: int) -> None:
        needed, available, limit = map(format_bytes, (needed_bytes, self._available_bytes, self._limit_bytes))
        half = ", half of it, since they are concatenated" if self._limit_bytes < self._available_bytes else ""
        raise MemoryError(
            f"the outputs of this evaluation take {needed} on the host, and are not on disk; of {available} available "
            f"expected {limit} or less{half}. {self._fix()}"
        )

    def _fix(self) -> str:
        if self._can_spill:
            return "Send them to disk: EvaluationGuardCallback(host_budget=0)"
        return (
            "Reduce them on the card: EvaluationGuardCallback(reduce='argmax'), or compute metrics batch by batch: "
            "TrainingArguments(..., batch_eval_metrics=True)"
        )

    def handed_to(self, compute_metrics: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compute_metrics`` for what stock kept."""

        def compute(prediction: Any, **kwargs: Any) -> Any:
            if self._spilled is not None:
                prediction = type(prediction)(
                    predictions=self.restore(prediction.predictions),
                    label_ids=prediction.label_ids,
                    inputs=prediction.inputs,
                    losses=prediction.losses,
                )
            return compute_metrics(prediction, **kwargs)

        return compute

    def restore(self, predictions: Any) -> Any:
        """Return the outputs for what stock kept in their place."""
        return predictions if self._spilled is None or predictions is None else self._spilled.restore(predictions)

    def close(self) -> None:
        """Close what was written to, after the last ``restore``."""
        if self._spilled is not None:
            self._spilled.close()
