"""Why a batch is not cut, and what to do about it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_memopt.training.binding.losses import foreign_hooks
from hf_memopt.training.binding.model import unwrap_model
from hf_memopt.training.binding.trials import row_count
from hf_memopt.training.binding.undo import is_overridden
from hf_memopt.training.devices.readings import read_memory
from hf_memopt.training.techniques.microbatching.splitting import tensors_by_name
from hf_memopt.units import format_bytes

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FUSED = "fused cross entropy"  # the purpose of the override that never makes logits
LOSS_OF_ALL_ROWS = "it returns the loss of all rows"  # why a call stays whole, and what is inside it is tried
DROP = "MicrobatchCallback out of callbacks= and lower per_device_train_batch_size."


class NotSplittableError(ValueError):
    """The batches of a model cannot be trained in micro-batches, for this reason."""

    def __init__(self, model: nn.Module, reason: str, *, where: str = "", remedy: str | None = None) -> None:
        super().__init__(
            f"model={type(model).__name__} cannot be trained in micro-batches{where}: {reason}; expected rows that do "
            f"not depend on each other. {remedy or f'Take {DROP}'}"
        )
        self.reason = reason


PLACEHOLDERS = tuple(f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index"))


def splittable_reason(model: nn.Module) -> str | None:
    """Return why the loss of a model is not a sum over rows, so that micro-batches would train something else.

    None if nothing was found. Looked for are batch norms in training mode, contrastive models (CLIP), whose loss
    compares the rows of a batch (their ``forward`` takes ``return_loss``), and BigBird's sparse attention.
    """
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.training:
            return f"{type(module).__name__} {name} takes its statistics over the rows of a batch"
        own = vars(module)  # in each step, and a module is slow to say that it has no such attribute
        kinds = own.get("rope_type")
        if "dynamic" in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
            return f"the frequencies of the dynamic RoPE {name} follow the longest row of a batch"
    inside = unwrap_model(model)
    if "return_loss" in inspect.signature(inside.forward).parameters:
        return f"the loss of {type(inside).__name__} compares the rows of a batch with each other"
    if getattr(getattr(inside, "config", None), "attention_type", None) == "block_sparse":
        return f"the sparse attention of {type(inside).__name__} becomes full, for good, once all rows are short"
    if getattr(getattr(inside, "config", None), "axial_pos_embds", False):
        return f"the axial positions of {type(inside).__name__} need batches of one length"
    return None


def splittable_batch_reason(inputs: Mapping[str, Any]) -> str | None:
    """Return why a batch cannot be split into rows; None if it can.

    Looked for are sequences packed into one row, and tensors that do not have one entry per row, such as the image
    patches of Qwen2-VL. Waits for the device where a batch of one row has ``position_ids``.
    """
    rows = row_count(inputs)
    packed = [name for name in inputs if name.startswith("cu_seq")]
    if rows == 1:
        packed += [name for name in ("seq_idx", "position_ids") if _restarts(inputs.get(name))]
    if packed:
        return f"its examples are packed into one row, as {packed[0]} shows"
    for name, value in tensors_by_name(inputs):
        is_elsewhere = name == "position_ids" and value.dim() == 3  # (3, batch, seq), for text, height and width
        if is_elsewhere or (value.dim() > 0 and value.shape[0] not in (1, rows)):
            return f"{name} of shape {tuple(value.shape)} does not have one entry for each of the {rows} rows"
    return None


def placeholder_reason(model: nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """Return why images or sounds do not belong to the rows one by one: a row without any leaves another with two.

    Where there are as many of them as rows, and every row has one, each has its own. Waits for the device.
    """
    config = getattr(unwrap_model(model), "config", None)
    ids: Any = inputs.get("input_ids")
    if not torch.is_tensor(ids):
        return None
    for token in {one for name in PLACEHOLDERS if (one := getattr(config, name, None)) is not None}:
        has_some = ids.eq(token).flatten(1).any(1)
        if bool(has_some.any()) and not bool(has_some.all()):
            return f"some of its rows have no token {token} that stands for an image or a sound, so others may have two"
    return None


def _restarts(numbers: Any) -> bool:
    """Return whether positions begin again within a row, or the index of the sequence changes."""
    if not torch.is_tensor(numbers) or numbers.dim() == 0:
        return False
    steps = numbers.diff()
    return bool((steps < 0).any()) or bool((steps == 0).any() and (steps != 0).any())


# ---- Logits ---------------------------------------------------------------------------------------------------------


def check_logits(trainer: Any, inputs: Any) -> None:
    """Refuse a step before it runs whose logits, which exist for all rows, cannot fit."""
    needed = _logits_bytes(trainer.model, inputs)
    if needed < 2**28:  # far below any device; asking costs more
        return
    reading = read_memory(trainer.args.device)
    room = reading.host_available_bytes
    if reading.device_total_bytes is not None:
        room = reading.device_total_bytes - (reading.allocated_bytes or 0)
    if needed > room:
        raise NotSplittableError(
            trainer.model,
            f"its loss needs the logits of all rows{logits_text(trainer, inputs)}, and {format_bytes(room)} are free",
            where=batch_text(trainer, inputs),
            remedy="Add FusedCrossEntropyCallback(), or lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps.",
        )


def logits_text(trainer: Any, inputs: Any) -> str:
    """Return how large the logits of a batch are; nothing without a language model's head."""
    needed = _logits_bytes(trainer.model, inputs)
    return f" (its logits and their gradient take {format_bytes(needed)} at least)" if needed else ""


def _logits_bytes(model: nn.Module, inputs: Any) -> int:
    """Return the bytes of a batch's logits in float32 and of their gradient."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    ask = getattr(unwrap_model(model), "get_output_embeddings", None)
    head = None if ask is None or not torch.is_tensor(ids) else ask()
    if ids is None or not hasattr(head, "weight") or is_overridden(head, "forward", FUSED):
        return 0
    labels = inputs.get("labels")
    tokens: torch.Tensor = labels if torch.is_tensor(labels) and labels.dim() == ids.dim() else ids
    return 2 * 4 * tokens.numel() * len(head.weight)  # type: ignore[union-attr]


# ---- Words ----------------------------------------------------------------------------------------------------------


def batch_text(trainer: Any, inputs: Any) -> str:
    """Return which step and what kind of batch this is."""
    names = f"a batch of {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else type(inputs).__name__
    return f" at step {trainer.state.global_step + 1} ({names})"


def remedy_of(reason: str, model: nn.Module) -> str:
    """Return what to do, as code, where rows cannot run apart for this reason."""
    name = _other_part(model, reason)
    text = f"Name a part whose rows are independent: MicrobatchCallback(backbone={name!r}), or take "
    text = text if name and "create_graph" not in reason and "changed between" not in reason else "Take "
    if "would see parts" in reason:
        text = f"Take the hook off, or {text[0].lower()}{text[1:]}"
    if reason.endswith(LOSS_OF_ALL_ROWS):
        text = "Set a smaller per_device_train_batch_size with more gradient_accumulation_steps, or take "
    return text + DROP


def _other_part(model: nn.Module, reason: str) -> str:
    """Return the name of a part with most weights against which nothing is known: not tried, no batch norm, no hook."""
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_modules()}
    for name, part in model.named_modules():
        tried = (text.partition(": ")[0] for text in reason.split("; "))  # names inside of these are without theirs
        is_known = any(f" {name.removeprefix(f'{one}.')}" in f" {reason}" for one in tried)
        is_known |= any(isinstance(one, (PreTrainedModel, *BATCH_NORMS)) for one in part.modules())
        is_known |= any(foreign_hooks(part)) or type(part).forward is nn.Module.forward  # as of a list
        if name and 2 * sizes[name] > sizes[""] and not is_known:
            return name  # type: ignore[no-any-return]
    return ""
