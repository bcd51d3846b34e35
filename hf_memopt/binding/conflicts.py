"""Which techniques and settings are incompatible: one table, which ``attach`` enforces and README prints.

A technique is a callback, a data view or an optimizer class of this package that bears its name as ``technique``; a
setting is what ``TrainingArguments`` or the launcher ask stock for. What is refused would train wrongly, hang or stop
in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_memopt.binding import versions

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

__all__ = [
    "REFUSALS",
    "SETTINGS",
    "TECHNIQUES",
    "Refusal",
    "check_compatibility",
    "check_settings",
    "refusal_of",
    "refusals_of",
    "settings_in_use",
    "steps_in_backward",
    "techniques_in_use",
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
    "FSDP": "sharded weights",
    "DeepSpeed": "its engine in place of backward and step",
}
"""The settings of stock that some technique cannot work with, and what is meant by each."""

RUN_IN_ONE_PROCESS = (
    "bf16",
    "accumulation",
    "norm clipping",
    "NEFTune",
    "reentrant checkpointing",
    "auto_find_batch_size",
)
RUN = (*RUN_IN_ONE_PROCESS, "DDP", "DDP, default flags")
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
        for name in ("DDP", "DDP, default flags", "FSDP", "DeepSpeed")
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
            ("FSDP", "it shards float32 weights, and loses what rounding cut off when it gathers the state"),
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
        for name in ("FSDP", "DeepSpeed")
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
        "FSDP",
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
    *(
        Refusal(
            "gradual unfreezing",
            name,
            "which parameters have gradients is settled when the model is wrapped",
            "Take GradualUnfreezeCallback out of callbacks=, or train in one process",
        )
        for name in ("DDP", "DDP, default flags", "FSDP", "DeepSpeed")
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
        for name in ("FSDP", "DeepSpeed")
    ),
    *(
        Refusal(
            "evaluation guard",
            name,
            "processes wait for each other within a forward pass, and only one would repeat it",
            "Take EvaluationGuardCallback out of callbacks=",
        )
        for name in ("FSDP", "DeepSpeed")
    ),
    Refusal(
        "fused cross-entropy",
        "torch.compile",
        "compiled code computes the logits",
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
        for name in ("FSDP", "DeepSpeed")
    ),
)
"""Every pair that is refused. Symmetric."""


def check_compatibility(trainer: Trainer, *callbacks: TrainerCallback) -> None:
    """Refuse techniques and settings that are incompatible: those of a Trainer, and callbacks it is to get.

    Raises:
        ValueError: naming the first such pair, the reason and the fix.
    """
    for found in refusals_of(trainer, *callbacks):
        raise ValueError(str(found))


def check_settings(technique: str, args: TrainingArguments) -> None:
    """Refuse settings that a technique cannot work with, where there are arguments but no Trainer to ask.

    Raises:
        ValueError: naming the first such setting, the reason and the fix.
    """
    for setting in settings_in_use(args, world_size=args.world_size):
        found = refusal_of(technique, setting)
        if found is not None:
            raise ValueError(str(found))


def refusals_of(trainer: Trainer, *callbacks: TrainerCallback) -> list[Refusal]:
    """Return every pair in use that is refused, of a Trainer and callbacks it is to get."""
    techniques = techniques_in_use(trainer, *callbacks)
    engines = {"FSDP": trainer.is_fsdp_enabled, "DeepSpeed": trainer.is_deepspeed_enabled}
    world_size = 1 if any(engines.values()) else trainer.args.world_size  # the model is not wrapped by DDP then
    used = [*techniques, *settings_in_use(trainer.args, world_size=world_size)]
    used += [name for name, is_used in engines.items() if is_used]
    used += ["TRL"] * any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)
    pairs = ((one, other) for one in techniques for other in used)
    found = dict.fromkeys(refusal_of(one, other) for one, other in pairs)
    return [refusal for refusal in found if refusal is not None]


def refusal_of(one: str, other: str) -> Refusal | None:
    """Return why two techniques, or a technique and a setting, are refused together; None if they are not."""
    return next((found for found in REFUSALS if {found.one, found.other} == {one, other}), None)


def techniques_in_use(trainer: Trainer, *callbacks: TrainerCallback) -> tuple[str, ...]:
    """Return the names of this package's techniques that a Trainer uses, in the order of ``TECHNIQUES``."""
    given = (*trainer.callback_handler.callbacks, *callbacks, trainer.train_dataset, *optimizers_of(trainer))
    names = {name for part in given for name in _names_of(part)}
    return tuple(name for name in TECHNIQUES if name in names)


def _names_of(part: Any) -> set[Any]:
    """Return the names that a part bears: an optimizer class may be one technique around another."""
    kind = part if isinstance(part, type) else type(part)
    return {getattr(part, "technique", None), *(vars(base).get("technique") for base in kind.__mro__)}


def optimizers_of(trainer: Any) -> tuple[Any, ...]:
    """Return the optimizer that a Trainer was given or has built, and the class it is to build one from."""
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's AcceleratedOptimizer
    asked = trainer.optimizer_cls_and_kwargs
    return (inner, None if asked is None else asked[0])


def settings_in_use(args: TrainingArguments, *, world_size: int = 1) -> tuple[str, ...]:
    """Return the names among ``SETTINGS`` that ``TrainingArguments`` ask for."""
    is_checkpointed, options = versions.checkpointing_of(args)
    optim = str(getattr(args.optim, "value", args.optim))
    flags = (args.ddp_broadcast_buffers, args.ddp_find_unused_parameters)
    asked = {
        "bf16": args.bf16,
        "fp16": args.fp16,
        "accumulation": args.gradient_accumulation_steps > 1,
        "norm clipping": (args.max_grad_norm or 0) > 0,
        "NEFTune": args.neftune_noise_alpha is not None,
        "reentrant checkpointing": is_checkpointed and options.get("use_reentrant") is True,
        "layer-wise optimizer": steps_in_backward(optim),
        "auto_find_batch_size": args.auto_find_batch_size,
        "torch.compile": args.torch_compile,
        "Liger kernel": args.use_liger_kernel,
        "DDP": world_size > 1 and flags == (False, False),
        "DDP, default flags": world_size > 1 and flags != (False, False),
    }
    return tuple(name for name in SETTINGS if asked.get(name))


def steps_in_backward(optim: str) -> bool:
    """Return whether stock's optimizer of this name steps each parameter within the backward pass."""
    return optim in ("lomo", "adalomo") or optim.endswith("_layerwise")
