"""Repair the scale of gradients under accumulation where the model's loss ignores ``num_items_in_batch``.

Stock transformers 5.x multiplies the gradients of such a head (BERT classification, T5, ...) by accumulation steps
times processes: it leaves the division to a head that never does it. The head itself is asked, with two forward passes
of a few examples, and stock's own division is switched back on where it is needed, only there.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.binding.handles import UndoHandle, is_overridden, override_method, set_attribute, undo_all
from hf_memopt.binding.model_traits import used_columns
from hf_memopt.binding.probing import undisturbed
from hf_memopt.changes import Change, record_changes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["repair_gradient_scale"]

logger = logging.getLogger(__name__)

PROBE_EXAMPLES = 4
# A public attribute, named in stock's docstring and read live at every step (5.8.1, 5.17.0, 5.23.0; pinned by a test).
SWITCH = "model_accepts_loss_kwargs"
PROBES = "gradient scale"  # the purpose of the override that probes at the first step


def repair_gradient_scale(trainer: Any) -> UndoHandle:
    """Switch stock's own division by accumulation steps back on where the head ignores ``num_items_in_batch``."""
    restore = set_attribute(trainer, SWITCH, trainer.model_accepts_loss_kwargs)
    if not trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        return restore  # stock divides already, or the user's own loss counts
    parameters = inspect.signature(trainer.compute_loss).parameters.values()
    if not any(p.name == "num_items_in_batch" or p.kind is p.VAR_KEYWORD for p in parameters):
        return restore  # a subclass that calls its own compute_loss its own way
    dataset = trainer.train_dataset
    if dataset is None:
        return restore
    if _has_no_rows(dataset) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return undo_all(restore, _probe_at_first_step(trainer))
    if len(dataset) > 0:
        _probe(trainer, trainer.model, lambda: _first_batch(trainer), stacklevel=4)
    return restore


def _has_no_rows(dataset: Any) -> bool:
    """Return whether there is no first row: of a stream, and of several data sets by name (sentence-transformers)."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, (IterableDataset, Mapping)) or not hasattr(dataset, "__getitem__")


def _probe_at_first_step(trainer: Any) -> UndoHandle:
    """Probe with the first real batch: reading a stream beforehand could lose examples, and FSDP and DeepSpeed give
    the model its weights only when training begins.
    """
    if is_overridden(trainer, "training_step", PROBES):
        return undo_all()

    def probing(before: Callable[..., Any]) -> Callable[..., Any]:
        def probing_step(model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            handle.remove()
            _probe(trainer, model, lambda: inputs, stacklevel=4)
            return before(model, inputs, *args, **kwargs)

        return probing_step

    handle = override_method(trainer, "training_step", probing, purpose=PROBES)
    return handle


def _probe(trainer: Any, model: nn.Module, read_batch: Callable[[], Any], *, stacklevel: int) -> None:
    """Repair the scale if a few rows show that the head ignores the count; warn if the result is unclear."""
    ignores, finding = False, ""
    with undisturbed(trainer, model):
        try:
            batch = read_batch()
        except Exception as error:
            batch, finding = None, _reading_failure(trainer, error)
        try:
            if not finding:
                rows = _first_rows(batch, _most_rows(trainer))
                ignores, finding = _head_ignores_item_count(trainer, model, rows)
        except Exception as error:  # whatever the user's data, collator, model or compute_loss raise
            finding = f"{type(error).__name__}: {error}"
    if _any_process(trainer, ignores):
        setattr(trainer, SWITCH, False)
        reason = (
            f"the loss of {type(trainer.model).__name__} ignores num_items_in_batch, so stock would multiply its "
            "gradients by accumulation steps x processes"
        )
        change = Change(SWITCH, True, False, reason)
        logger.info("attach changed %s", change)
        record_changes(trainer, (change,))
    elif finding:
        warnings.warn(
            f"attach could not find out whether the loss of {type(trainer.model).__name__} is normalised by "
            f"num_items_in_batch ({finding}); its gradients may be multiplied by the accumulation steps. If the loss "
            "is a mean over the batch, set: trainer.model_accepts_loss_kwargs = False",
            stacklevel=stacklevel,
        )


def _reading_failure(trainer: Any, error: Exception) -> str:
    """Return why no batch could be read; stock's collator without a tokenizer only stacks rows of one length."""
    from transformers import default_data_collator

    cause = f"{type(error).__name__}: {error}"
    stacks = trainer.processing_class is None and trainer.data_collator is default_data_collator
    if not (stacks and isinstance(error, ValueError)):
        return cause
    return (
        f"the collator could not make a batch: {cause}; pass processing_class=tokenizer to the Trainer, so that it pads"
    )


def _any_process(trainer: Any, ignores: bool) -> bool:
    """Give all processes one answer: those that count items wait for each other, so two answers would hang."""
    import torch

    if trainer.args.world_size == 1:
        return ignores
    votes = trainer.accelerator.gather(torch.tensor([int(ignores)], device=trainer.args.device))
    return bool(votes.any())


def _head_ignores_item_count(trainer: Any, model: nn.Module, batch: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the loss stays the same when twice as many items are announced, and what was found if unclear."""
    import torch
    from accelerate.utils import send_to_device

    if not isinstance(batch, Mapping) or not torch.is_tensor(batch.get("labels")):
        return False, ""  # stock counts no items then, and divides by itself
    losses = []
    # under autocast as in training: weights may be of two dtypes
    with torch.no_grad(), trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        for items in (8, 16):
            inputs = send_to_device(dict(batch), trainer.args.device)
            count = torch.tensor(items, device=trainer.args.device)
            losses.append(float(trainer.compute_loss(model, inputs, num_items_in_batch=count)))
    one, half = losses
    if one != 0 and math.isclose(one, half, rel_tol=1e-3):
        return True, ""
    if one != 0 and math.isclose(one, 2 * half, rel_tol=1e-2):  # bfloat16 has 8 bits
        return False, ""
    return False, f"it was {one:.4g} for 8 items and {half:.4g} for 16"


def _most_rows(trainer: Any) -> int:
    """Return how many rows to probe: never more than a training step holds, so the probe needs no more memory."""
    most: int = min(PROBE_EXAMPLES, trainer.args.per_device_train_batch_size)
    return most


def _first_batch(trainer: Any) -> Any:
    """Collate the first examples as the Trainer will, without the columns that it removes."""
    dataset = trainer.train_dataset
    rows = [dataset[0]]
    if isinstance(rows[0], Mapping):  # else it is a whole batch
        rows += [dataset[i] for i in range(1, min(_most_rows(trainer), len(dataset)))]
    known = used_columns(trainer)
    if known is not None:
        rows = [{k: v for k, v in row.items() if k in known} if isinstance(row, Mapping) else row for row in rows]
    return trainer.data_collator(rows)


def _first_rows(inputs: Any, rows: int) -> Any:
    """Return copies of the first rows of all tensors that have as many rows as the labels, and the rest as it is."""
    import torch

    if not isinstance(inputs, Mapping):
        return inputs
    labels = inputs.get("labels")
    batch = labels.shape[0] if torch.is_tensor(labels) and labels.dim() > 0 else None
    return {
        key: value[:rows].clone() if torch.is_tensor(value) and value.shape[:1] == (batch,) else value
        for key, value in inputs.items()
    }
