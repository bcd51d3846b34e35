"""How the losses of a batch's pieces add up to the loss of the batch: found by asking the loss itself.

A loss is either a sum (over a count that was passed in, ``num_items_in_batch``), so that the losses of pieces simply
add up, or a mean over labels or rows, so that each piece weighs as much as it holds of them. Which one it is follows
from no attribute that could be trusted: BERT's heads accept the count and ignore it. Two or three rows of a real batch
tell, at once and each alone; a loss that none of the rules gives (in-batch negatives, a penalty over the whole batch)
cannot be split at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_memopt.binding import undisturbed
from hf_memopt.techniques.out_of_memory import is_out_of_memory
from hf_memopt.techniques.pieces import IGNORED, row_count, row_lengths, take_rows

__all__ = ["RULES", "NotSplittableError", "default_rule", "find_rule", "row_items", "uncounted_labels_reason"]

RULES = ("sum", "shifted labels", "labels", "rows")
"""A sum; or a mean over: labels that count, the first of each row left out; labels that count; rows."""

PROBE_ROWS = 3
TOLERANCE = 1e-4  # float32 sums in another order, of shorter rows
TOLERANCE_AUTOCAST = 3e-3  # logits of 16 bits, losses of 32
TOLERANCE_16_BITS = 3e-2  # losses of bfloat16, which has 8 bits
LEAST_LOSS = 1e-6  # below, what float32 makes of a loss is noise


class NotSplittableError(ValueError):
    """The batches of a model cannot be trained in pieces, for this reason."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        super().__init__(
            f"model={type(model).__name__} cannot be trained in pieces of a batch: {reason}; expected rows that do not "
            "depend on each other. Take MicrobatchCallback out of callbacks= and lower per_device_train_batch_size."
        )


def row_items(inputs: Mapping[str, Any], rule: str) -> list[int]:
    """Return how many items each row contributes to the mean of this rule, shape (rows,)."""
    labels = _integer_labels(inputs)
    if labels is None or rule in ("sum", "rows"):
        return [1] * row_count(inputs)
    if rule == "shifted labels":
        labels = inputs["shift_labels"] if "shift_labels" in inputs else labels[..., 1:] if labels.dim() > 1 else labels
    counts: list[int] = (
        (labels != IGNORED).flatten(1).sum(1).tolist() if labels.dim() > 1 else ((labels != IGNORED).int().tolist())
    )
    return counts


def find_rule(trainer: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> str | None:
    """Return which of ``RULES`` this trainer's loss follows, found with a few rows of this batch without gradients.

    Short rows are taken, of different labels where there are, in evaluation mode; random numbers stay as they are.
    Where labels are one per token, some of the first row's are left out, so that a mean over labels and one over rows
    differ.

    Returns:
        A rule; None where this batch cannot tell: fewer than two rows with labels, a loss that is zero or not finite.

    Raises:
        NotSplittableError: no rule gives the loss of the rows at once, or so few rows have none; labels per token have
            another name than ``labels``.
    """
    reason = uncounted_labels_reason(trainer, inputs)
    if reason is not None:
        raise NotSplittableError(trainer.model, reason)
    rows = _probe_rows(inputs)
    if len(rows) < 2:
        return None
    probe = _with_uneven_labels(take_rows(inputs, rows))
    batches = [probe, *(take_rows(probe, [row]) for row in range(len(rows)))]
    try:
        with undisturbed(trainer, model):
            losses = [_loss(trainer, model, batch, num_items_in_batch) for batch in batches]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"the loss of {len(rows)} rows and of each alone fails ({type(error).__name__}: {error})"
        raise NotSplittableError(trainer.model, reason) from error
    whole, *parts = map(float, losses)
    scale = abs(whole)
    if scale < LEAST_LOSS or not math.isfinite(whole):
        return None
    errors = {rule: abs(_sum_by(rule, probe, parts) - whole) for rule in _preferred(trainer.model)}
    least = min(errors.values())
    if not least <= scale * _tolerance(trainer, losses[0]):  # a part may be NaN
        shown = " + ".join(f"{part:.4g}" for part in parts)
        raise NotSplittableError(
            trainer.model,
            f"the loss of {len(rows)} rows at once is {whole:.4g}, which no weighting of their own losses ({shown}) "
            "gives, as with in-batch negatives, weights of classes or a penalty over the whole batch",
        )
    noise = scale * max(1e-6, 2 * torch.finfo(losses[0].dtype).eps)
    return next(rule for rule, error in errors.items() if error <= 4 * least + noise)


def uncounted_labels_reason(trainer: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return why the labels of this batch cannot be counted; None if they can, or if there is one for each row."""
    for name in trainer.label_names:
        if name != "labels" and torch.is_tensor(inputs.get(name)) and inputs[name].dim() > 1:
            return f"its loss may be a mean over {name}, and only those of 'labels' are counted"
    return None


def default_rule(trainer: Any, num_items_in_batch: Any) -> str:
    """Return the rule that stock assumes, for batches that cannot tell."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return "sum" if counts and num_items_in_batch is not None else "labels"


def _loss(trainer: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any) -> torch.Tensor:
    from accelerate.utils import send_to_device

    on_device = send_to_device(dict(inputs), trainer.args.device)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        loss: torch.Tensor = trainer.compute_loss(model, on_device, num_items_in_batch=num_items_in_batch)
        return loss


def _probe_rows(inputs: Mapping[str, Any]) -> list[int]:
    """Return the shortest rows that have labels, one of each label before others; the longest of them first."""
    counts = row_items(inputs, "shifted labels")
    lengths = row_lengths(inputs) or [1] * len(counts)
    rows = sorted((row for row, count in enumerate(counts) if count), key=lambda row: lengths[row])
    labels = _integer_labels(inputs)
    if labels is not None:  # weights of classes do not show in rows of one class
        largest = labels.reshape(len(labels), -1).amax(1).tolist()
        first_of_label = {largest[row]: row for row in reversed(rows)}
        rows.sort(key=lambda row: first_of_label[largest[row]] != row)
    return sorted(rows[:PROBE_ROWS], key=lambda row: -lengths[row])


def _with_uneven_labels(probe: dict[str, Any]) -> dict[str, Any]:
    """Leave out the later half of the first row's labels, where it has a sequence of them; two stay at least."""
    labels = _integer_labels(probe)
    if labels is None or labels.dim() != 2 or "shift_labels" in probe:
        return probe
    counted = (labels[0] != IGNORED).nonzero().flatten()
    fewer = labels.clone()
    fewer[0, counted[max(2, len(counted) // 2) :]] = IGNORED
    return {**probe, "labels": fewer}


def _sum_by(rule: str, probe: Mapping[str, Any], parts: Sequence[float]) -> float:
    if rule == "sum":
        return sum(parts)
    items = row_items(probe, rule)
    total = max(sum(items), 1)
    return sum(part * count / total for part, count in zip(parts, items, strict=True))


def _preferred(model: Any) -> tuple[str, ...]:
    """Return the rules, the likelier first where two give the same: heads for causal language shift their labels."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return RULES if is_causal else ("sum", "labels", "rows", "shifted labels")


def _integer_labels(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    labels = inputs.get("labels")
    is_counted = torch.is_tensor(labels) and labels.dim() > 0 and not labels.is_floating_point()
    return labels if is_counted else None


def _tolerance(trainer: Any, loss: torch.Tensor) -> float:
    if loss.dtype in (torch.float16, torch.bfloat16):
        return TOLERANCE_16_BITS
    is_narrow = trainer.args.bf16 or trainer.args.fp16 or any(p.element_size() < 4 for p in trainer.model.parameters())
    return TOLERANCE_AUTOCAST if is_narrow else TOLERANCE
