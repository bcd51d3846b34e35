"""The table of what is incompatible: techniques, settings of stock, and the engines of several processes.

A technique is a callback, a data view or an optimizer class of this package that bears its name as ``technique``; a
setting is what ``TrainingArguments`` or the launcher ask stock for. What is refused would train wrongly, hang or stop
in the middle of a run. ``conflicts`` finds out what a ``Trainer`` uses, and enforces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ENGINES",
    "LATE_LOSS",
    "NO_LIMIT",
    "PARTS",
    "REFUSALS",
    "RUN",
    "RUN_IN_ONE_PROCESS",
    "SETTINGS",
    "TECHNIQUES",
    "Refusal",
    "refusal_of",
    "refuse_without_adapters",
]

TECHNIQUES = (
    "length buckets",
    "freezing",
    "gradual unfreezing",
    "32-bit embeddings",
    "gradient release",
    "sparse tied embedding",
    "16-bit weights",
    "checkpointing policy",
    "micro-batching",
    "non-finite detection",
    "precision",
    "evaluation guard",
    "memory report",
    "sharded checkpoints",
    "fused cross-entropy",
)
"""The techniques, by the name that each bears as ``technique``."""

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

ENGINES = ("DDP", "DDP, default flags", "FSDP2", "other sharding", "DeepSpeed")
"""The settings that train in several processes."""

PARTS: Mapping[str, str] = {
    "exact_loss": "compute_loss_func=exact_loss(model)",
    "gradient-scale repair": "what attach does for a head that ignores num_items_in_batch",
    "LoRA": "adapters of peft",
    "bitsandbytes optimizer": "its optimizers in 8 and 32 bits, paged or not",
}
"""What is not a technique with a name of its own, but can be incompatible with an engine all the same."""

RUN_IN_ONE_PROCESS = (
    "bf16",
    "accumulation",
    "norm clipping",
    "NEFTune",
    "reentrant checkpointing",
    "auto_find_batch_size",
)
RUN = (*RUN_IN_ONE_PROCESS, "DDP", "DDP, default flags", "FSDP2")
"""The settings with which the tests run every technique that is not refused, in one process or in two."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two things that cannot be used together, why, and what to do instead."""

    one: str
    other: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.one} and {self.other} are incompatible: {self.reason}; expected only one of them. {self.fix}"


NO_LIMIT = "micro-batching without a limit"  # MicrobatchCallback() with neither max_tokens nor max_examples
LATE_LOSS = "fused cross-entropy with compute_loss_func"  # the loss is computed after the forward pass of the wrapper
SHARDED = ("FSDP2", "other sharding", "DeepSpeed")

DROP_RELEASE = "Train with the plain optimizer class"
DROP_FUSED = "Take FusedCrossEntropyCallback out of callbacks="
DROP_MICROBATCH = "Take MicrobatchCallback out of callbacks="

REFUSALS = (
    Refusal(
        "gradient release",
        "norm clipping",
        "the global norm is known only when the first gradients are gone",
        "Set max_grad_norm=0 (or max_grad_norm=0 and gradient_release(..., max_tensor_norm=1.0))",
    ),
    Refusal(
        "gradient release",
        "fp16",
        "the gradient scaler looks at all gradients at once",
        "Set bf16=True, or neither of them",
    ),
    Refusal(
        "gradient release",
        "accumulation",
        "gradients have to stay until the last micro-batch of a step",
        "Set gradient_accumulation_steps=1",
    ),
    Refusal(
        "gradient release",
        "micro-batching",
        "gradients have to stay until the last micro-batch, and a weight that has stepped cannot be taken back",
        DROP_MICROBATCH,
    ),
    Refusal(
        "gradient release",
        "non-finite detection",
        "a step that is not finite is dropped before the optimizer steps, and here it steps within the backward pass",
        "Take OverflowCallback out of callbacks=",
    ),
    Refusal(
        "gradient release",
        "reentrant checkpointing",
        "a parameter that two checkpointed segments share would step twice",
        'Pass "use_reentrant": False',
    ),
    Refusal(
        "gradient release",
        "layer-wise optimizer",
        "its optimizer steps within the backward pass already",
        "Choose another optim",
    ),
    Refusal(
        "gradient release",
        "auto_find_batch_size",
        "weights that have stepped when memory runs out cannot be taken back",
        "Leave auto_find_batch_size out",
    ),
    *(
        Refusal("gradient release", name, "weights would step before the processes have shared gradients", DROP_RELEASE)
        for name in ENGINES
    ),
    Refusal(
        "16-bit weights",
        "fp16",
        "the gradient scaler needs float32 weights",
        "Set bf16=True, or neither of them",
    ),
    Refusal(
        "16-bit weights",
        "layer-wise optimizer",
        "it has a step of its own within the backward pass, which is not one element by element",
        "Choose another optim, with released_optimizer(args, model, rounding=...)",
    ),
    *(
        Refusal("16-bit weights", name, reason, "Train with the plain optimizer class")
        for name, reason in (
            ("FSDP2", "it updates slices of a weight in place, and a slice of a sharded weight is a copy"),
            ("other sharding", "it shards float32 weights, and loses what rounding cut off when it gathers the state"),
            ("DeepSpeed", "its engine updates float32 weights of its own in place of the optimizer"),
        )
    ),
    Refusal(
        "micro-batching",
        "DDP, default flags",
        "a forward pass that is run again would wait for the buffers of processes that do not run it",
        "Set ddp_broadcast_buffers=False, ddp_find_unused_parameters=False",
    ),
    *(
        Refusal(
            "micro-batching",
            name,
            "processes wait for each other within a step, and only one would repeat it",
            DROP_MICROBATCH,
        )
        for name in ("other sharding", "DeepSpeed")
    ),
    Refusal(
        NO_LIMIT,
        "FSDP2",
        "processes wait for each other within a step, and only one would repeat it",
        "Pass a limit: MicrobatchCallback(max_tokens=4096)",
    ),
    Refusal(
        "micro-batching",
        "layer-wise optimizer",
        "weights step within the backward pass, so an interrupted step cannot be repeated",
        "Choose another optim",
    ),
    Refusal(
        "micro-batching",
        "NEFTune",
        "its noise is scaled by the padded length, which is another one in a part of a batch",
        "Leave neftune_noise_alpha out",
    ),
    Refusal(
        "micro-batching",
        "auto_find_batch_size",
        "both recover from out of memory, and stock's restarts the run with a smaller batch",
        "Leave auto_find_batch_size out",
    ),
    Refusal(
        "length buckets",
        "auto_find_batch_size",
        "it would shrink the batches that the buckets are made for",
        "Leave auto_find_batch_size out",
    ),
    Refusal(
        "non-finite detection",
        "layer-wise optimizer",
        "weights step within the backward pass, so a step that is not finite cannot be dropped",
        "Choose another optim",
    ),
    Refusal(
        "non-finite detection",
        "other sharding",
        "the diagnosis runs rows in one process, and sharded weights need all of them",
        "Take OverflowCallback out of callbacks=",
    ),
    Refusal(
        "non-finite detection",
        "DeepSpeed",
        "its engine steps by itself, so a step that is not finite cannot be dropped",
        "Take OverflowCallback out of callbacks=",
    ),
    Refusal(
        "checkpointing policy",
        "reentrant checkpointing",
        "policies need the non-reentrant variant",
        'Leave activation_checkpointing_kwargs={"use_reentrant": True} out',
    ),
    Refusal(
        "checkpointing policy",
        "ZeRO-3",
        "a layer that is recomputed does not gather its weights by the operations that a policy has kept",
        "Set activation_checkpointing=True (gradient_checkpointing=True before transformers 5.23) in its place",
    ),
    *(
        Refusal(
            "gradual unfreezing",
            name,
            "which parameters have gradients is settled when the model is wrapped",
            "Take GradualUnfreezeCallback out of callbacks=, or train in one process",
        )
        for name in ENGINES
    ),
    *(
        Refusal(
            part,
            name,
            "bitsandbytes has no operators for sharded weights",
            "Set optim='adamw_torch_fused', without EmbeddingBitsCallback in callbacks=",
        )
        for part in ("bitsandbytes optimizer", "32-bit embeddings")
        for name in ("FSDP2", "other sharding")
    ),
    Refusal(
        "sparse tied embedding",
        "torch.compile",
        "compiled code makes the whole gradient of the embeddings, so nothing would be saved",
        "Leave torch_compile out",
    ),
    *(
        Refusal(
            "sparse tied embedding",
            name,
            "which rows of the weight this process holds, and where its gradient arrives, is decided by the sharding",
            "Take TiedEmbeddingCallback out of callbacks=",
        )
        for name in SHARDED
    ),
    *(
        Refusal(
            "evaluation guard",
            name,
            "processes wait for each other within a forward pass, and only one would repeat it",
            "Take EvaluationGuardCallback out of callbacks=",
        )
        for name in ("other sharding", "DeepSpeed")
    ),
    Refusal(
        LATE_LOSS,
        "DDP, default flags",
        "DDP looks for unused parameters from the logits back, and those of a fused loss lead to none",
        "Set ddp_broadcast_buffers=False, ddp_find_unused_parameters=False",
    ),
    Refusal(
        "fused cross-entropy",
        "torch.compile",
        "the logits are a tensor without storage, which breaks the compiled graph",
        "Leave torch_compile out",
    ),
    Refusal(
        "fused cross-entropy",
        "Liger kernel",
        "Liger's own fused loss does not call the head, so nothing would be fused",
        DROP_FUSED,
    ),
    Refusal(
        "fused cross-entropy",
        "TRL",
        "its trainers compute the loss from the head's weights, in tiles of their own, and do not call the head",
        DROP_FUSED,
    ),
    *(
        Refusal("fused cross-entropy", name, "the weights of the head are sharded when the loss needs them", DROP_FUSED)
        for name in ("other sharding", "DeepSpeed")
    ),
)
"""Every pair that is refused. Symmetric."""


def refusal_of(one: str, other: str) -> Refusal | None:
    """Return why two techniques, or a technique and a setting, are refused together; None if they are not."""
    return next((found for found in REFUSALS if {found.one, found.other} == {one, other}), None)


def refuse_without_adapters(load_in: str | None, lora: Any) -> None:
    """Raise ValueError for quantised weights without adapters beside them."""
    if load_in is not None and lora is None:
        raise ValueError(
            f"load_in={load_in!r}, lora=None leave nothing to train: quantised weights have no gradient, and the "
            "Trainer refuses such a model; expected adapters. Pass lora=16"
        )
