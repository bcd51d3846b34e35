"""What is incompatible: techniques with each other, with settings of stock, and with the engines of several processes.

A technique is a callback, a data view or an optimizer class of this package that bears its name as ``technique``, and
what it is refused with stands in its entry of ``techniques``; a setting is what ``TrainingArguments`` or the launcher
ask stock for. ``conflicts`` finds out what a ``Trainer`` uses, and enforces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_memopt.technique_list import TECHNIQUES, VARIANTS, Refusal, Technique, asked_by

SETTINGS: Mapping[str, str] = {
    "bf16": "bf16=True",
    "fp16": "fp16=True",
    "accumulation": "gradient_accumulation_steps > 1",
    "norm clipping": "max_grad_norm > 0, which is stock's default",
    "NEFTune": "neftune_noise_alpha is set",
    "reentrant checkpointing": 'activation_checkpointing_kwargs={"use_reentrant": True}',
    "layer-wise optimizer": "LOMO, AdaLOMO and the *_layerwise optimizers, which step within the backward pass",
    "auto_find_batch_size": "auto_find_batch_size=True",
    "torch.compile": "torch_compile=True",
    "Liger kernel": "use_liger_kernel=True",
    "TRL": "a Trainer of trl, such as SFTTrainer",
    "DDP": "several processes with ddp_broadcast_buffers=False and ddp_find_unused_parameters=False",
    "DDP, default flags": "several processes with either of the two left to its default",
    "FSDP2": "weights in shards, by torch's fully_shard as accelerate calls it",
    "other sharding": "FSDP1, tensor parallelism, or weights that are sharded when the model is loaded",
    "DeepSpeed": "its engine in place of backward and step",
    "ZeRO-3": "DeepSpeed with weights in shards; what is refused with DeepSpeed is refused too",
}
"""The settings of stock that some technique cannot work with, and what is meant by each."""


def refusal_of(one: str, other: str) -> Refusal | None:
    """Return why two techniques, or a technique and a setting, are refused together; None if they are not."""
    listed = TECHNIQUES | VARIANTS
    for first, second in ((one, other), (other, one)):
        if first in listed and second in listed[first].refused:
            return Refusal(first, second, *listed[first].refused[second])
    return None


def refused_fields(set_up: Any, setting: str) -> dict[str, tuple[Technique, Refusal]]:
    """Return by field what a set-up, a ``Recipe`` or ``StepSettings``, asks for and is refused with a setting."""
    found = ((one, refusal_of(name, setting)) for name, one in asked_by(set_up).items())
    return {one.field_in(set_up): (one, refusal) for one, refusal in found if refusal is not None}


def refuse_without_adapters(load_in: str | None, lora: Any) -> None:
    """Raise ValueError for quantised weights without adapters beside them."""
    if load_in is not None and lora is None:
        raise ValueError(
            f"load_in={load_in!r}, lora=None leave nothing to train: quantised weights have no gradient, and the "
            "Trainer refuses such a model; expected adapters. Pass lora=16"
        )


def is_of_bitsandbytes(optim: str) -> bool:
    """Return whether stock's optimizer of this name is one of bitsandbytes; those of torchao have "torch" in theirs."""
    return optim.startswith(("paged_", "lion", "ademamix", "rmsprop_bnb")) or (
        optim.endswith("_8bit") and "torch" not in optim
    )


def steps_in_backward(optim: str) -> bool:
    """Return whether stock's optimizer of this name steps each parameter within the backward pass."""
    return optim in ("lomo", "adalomo") or optim.endswith("_layerwise")
