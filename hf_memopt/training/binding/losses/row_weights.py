"""How the loss of a batch is made of the losses of its rows: one mean over rows or labels, or a plain sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.training.binding.model import IGNORED_LABEL

CLASSES = "targets by problem type"
POSITIONS = "positions of answers"


@dataclass(frozen=True, slots=True)
class KnownLoss:
    """How the loss of a batch is made of the losses of its rows."""

    # what one mean is over: "rows", "labels", "shifted labels" (without the first of each row), `CLASSES` (as the
    # problem type of the config says), `POSITIONS`; "sum" if losses of parts add up
    over: str
    source: str  # where this is written
    divides: bool = False  # whether class labels are a sum that `num_items_in_batch` divides; for `CLASSES` alone
    config: Any = None  # of the model, for `CLASSES` alone

    def row_weights(self, inputs: Mapping[str, Any]) -> list[float] | None:
        """Return the weight of each row's own loss in the loss of this batch, shape (rows,); they sum to 1.

        Rows weigh the same where none has a label that counts: stock's loss is 0 / 0 then. Waits for the device.

        Returns:
            None if the losses of parts add up.
        """
        counts = self._counts(inputs)
        if counts is None:
            return None
        found: list[float] = counts.cpu().double().tolist()
        total = sum(found)
        return [count / total for count in found] if total else [1 / len(found)] * len(found)

    def reason_against(self, inputs: Mapping[str, Any]) -> str | None:
        """Return why this one batch does not follow the rule; None if it does. Waits for the device."""
        given = [name for name in ("ignore_index", "output_router_logits") if inputs.get(name) is not None]
        if given:
            return f"its {given[0]} changes the loss"
        if self.over == "labels" and inputs.get("shift_labels") is not None:
            return "its shift_labels stand for its labels"
        if self.over == POSITIONS:
            return self._reason_against_positions(inputs)
        if self.over in ("labels", "shifted labels", CLASSES):
            labels = inputs.get("labels")
            if not torch.is_tensor(labels) or labels.dim() == 0:
                return "it has no tensor of labels"
            if self.over == CLASSES:
                return self._reason_against_classes(inputs, labels)
        return None

    def _counts(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return what each row weighs, shape (rows,)."""
        labels = inputs.get("labels")
        over = self.over
        if over == CLASSES:
            over = "rows" if self.problem_type(labels) != "single_label_classification" else "labels"
            over = "sum" if over == "labels" and self.divides else over
        if over == "sum":
            return None
        if over in ("labels", "shifted labels"):
            if over == "shifted labels":
                shifted = inputs.get("shift_labels")
                labels = labels[..., 1:] if shifted is None else shifted  # type: ignore[index]
            return _per_row(labels != IGNORED_LABEL)
        return torch.ones(_rows(inputs))

    def problem_type(self, labels: Any) -> str:
        """Return what a classification head takes labels for, by the rule of ``ForSequenceClassificationLoss``."""
        if self.config.problem_type is not None:
            return str(self.config.problem_type)
        if self.config.num_labels == 1:
            return "regression"
        is_class = labels.dtype in (torch.long, torch.int)
        return "single_label_classification" if is_class else "multi_label_classification"

    def _reason_against_classes(self, inputs: Mapping[str, Any], labels: torch.Tensor) -> str | None:
        if inputs.get("inputs_embeds") is not None and inputs.get("input_ids") is None:
            return "its rows have no ids by which a head would find their last token"
        rows, wanted = len(labels), self.config.num_labels
        if self.problem_type(labels) == "single_label_classification":
            is_negative = (labels < 0) & (labels != IGNORED_LABEL)
            return "it has labels below 0" if bool(is_negative.any()) else None
        if labels.numel() != rows * wanted:
            return f"its labels of shape {tuple(labels.shape)} are not {wanted} for each of {rows} rows"
        return None

    def _reason_against_positions(self, inputs: Mapping[str, Any]) -> str | None:
        text = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
        both = [inputs.get(name) for name in ("start_positions", "end_positions")]
        if text is None or any(not torch.is_tensor(positions) for positions in both):
            return "it has no text with positions of answers"
        if any(bool((positions >= text.shape[1]).any()) for positions in both):
            return "answers lie beyond its texts, and do not count"
        return None


def _rows(inputs: Mapping[str, Any]) -> int:
    names = ("labels", "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", *inputs)
    found = (inputs[name] for name in names if torch.is_tensor(inputs.get(name)) and inputs[name].dim() > 0)
    return len(next(found))


def _per_row(values: Any) -> torch.Tensor:
    summed: torch.Tensor = values.reshape(len(values), -1).sum(1)
    return summed
