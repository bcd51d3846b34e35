"""The list of techniques: what the rest of the package knows of each, in one descriptor.

A technique is one file in ``techniques/``, with its function and the callback under it, and one entry here. ``attach``,
the estimate, recipes, the planner, the script and the table of docs read the entries; none of them names a technique.
They stand in a file that imports nothing, since settings and options are checked without torch.

What is refused would train wrongly, hang or stop in the middle of a run; ``refusals`` says what the settings are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

__all__ = ["ENGINES", "LATE_LOSS", "NO_LIMIT", "TECHNIQUES", "VARIANTS", "Refusal", "Technique", "asked_by", "load"]

SHARDED = ("FSDP2", "other sharding", "DeepSpeed")
ENGINES = ("DDP", "DDP, default flags", *SHARDED)
"""The settings that train in several processes."""

NO_LIMIT = "micro-batching without a limit"  # MicrobatchCallback() with neither max_tokens nor max_examples
LATE_LOSS = "fused cross-entropy with compute_loss_func"  # the loss is computed after the forward pass of the wrapper


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two things that cannot be used together, why, and what to do instead."""

    one: str
    other: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.one} and {self.other} are incompatible: {self.reason}; expected only one of them. {self.fix}"


@dataclass(frozen=True, eq=False)
class Technique:
    """A technique, as all but its own file see it.

    Attributes:
        name: which its callback, data view or optimizer class bears as ``technique``.
        kind: what it changes: nothing but the order of sums, the rounding of weights, or the training itself.
        consent: the word of ``plan(allow=...)`` that it needs; "" for none.
        fields: of ``StepSettings`` and of ``Recipe`` that ask for it, each with the value that does not.
        callback: the callback without arguments that a recipe uses where its field asks for it, as "module:class".
        on_model: what it does to a model before the first step, as "module:function"; "" for nothing.
        optimizer: makes the optimizer's class from the arguments, the model and the recipe's rounding; "" for none.
        title: its name in the table of plans that ask for consent; "" where no plan does.
        sets: the fields of a ``Recipe`` that a plan sets for it.
        pays_for: the fact of a model for which every plan uses it, an attribute of ``ModelFacts``; "" for none.
        why: the reason that a plan gives.
        refused: reason and fix by the name of what it cannot be used with, a technique or a setting. Symmetric.
    """

    name: str
    kind: Literal["exact", "rounding", "training"] = "exact"
    consent: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    callback: str = ""
    on_model: str = ""
    optimizer: str = ""
    title: str = ""
    sets: Mapping[str, Any] = field(default_factory=dict)
    pays_for: str = ""
    why: str = ""
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def refusals(self) -> Iterator[Refusal]:
        """Yield what it cannot be used with."""
        return (Refusal(self.name, other, *why) for other, why in self.refused.items())

    def field_in(self, set_up: Any) -> str:
        """Return the field by which a set-up asks for it; "" where it does not."""
        return next((name for name, off in self.fields.items() if getattr(set_up, name, off) != off), "")


def load(path: str) -> Any:
    """Return what stands at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _listed(*techniques: Technique) -> dict[str, Technique]:
    return {one.name: one for one in techniques}


_STEPS_WITHIN_BACKWARD = "weights step within the backward pass, so"
_WAITS_WITHIN_STEP = "processes wait for each other within a step, and only one would repeat it"
_DROP_RELEASE = "Train with the plain optimizer class"
_DROP_FUSED = "Take FusedCrossEntropyCallback out of callbacks="
_DROP_MICROBATCH = "Take MicrobatchCallback out of callbacks="
_DROP_OVERFLOW = "Take OverflowCallback out of callbacks="
_DROP_AUTO_BATCH = "Leave auto_find_batch_size out"
_DROP_COMPILE = "Leave torch_compile out"
_OTHER_OPTIM = "Choose another optim"
_BF16_OR_NEITHER = "Set bf16=True, or neither of them"
_WHOLE_DDP = "Set ddp_broadcast_buffers=False, ddp_find_unused_parameters=False"
_PLAIN_OPTIMIZER = "Set optim='adamw_torch_fused', without EmbeddingBitsCallback in callbacks="
_NO_SHARDED_OPERATORS = ("bitsandbytes has no operators for sharded weights", _PLAIN_OPTIMIZER)

TECHNIQUES = _listed(
    Technique(
        "length buckets",
        refused={
            "auto_find_batch_size": ("it would shrink the batches that the buckets are made for", _DROP_AUTO_BATCH)
        },
    ),
    Technique("freezing", "training", consent="freeze", fields={"freeze": ()}),
    Technique(
        "gradual unfreezing",
        "training",
        refused=dict.fromkeys(
            ENGINES,
            (
                "which parameters have gradients is settled when the model is wrapped",
                "Take GradualUnfreezeCallback out of callbacks=, or train in one process",
            ),
        ),
    ),
    Technique("32-bit embeddings", refused=dict.fromkeys(("FSDP2", "other sharding"), _NO_SHARDED_OPERATORS)),
    Technique(
        "gradient release",
        "training",
        consent="release_clipping",
        fields={"gradient_release": False},
        optimizer="hf_memopt.techniques.optimizers.gradient_release:released_optimizer",
        title="released",
        sets={"gradient_release": True},
        why="a gradient is freed once its parameter has stepped; nothing is clipped or accumulated",
        refused={
            "norm clipping": (
                "the global norm is known only when the first gradients are gone",
                "Set max_grad_norm=0 (or max_grad_norm=0 and gradient_release(..., max_tensor_norm=1.0))",
            ),
            "fp16": ("the gradient scaler looks at all gradients at once", _BF16_OR_NEITHER),
            "accumulation": (
                "gradients have to stay until the last micro-batch of a step",
                "Set gradient_accumulation_steps=1",
            ),
            "micro-batching": (
                "gradients have to stay until the last micro-batch, and a weight that has stepped cannot be taken back",
                _DROP_MICROBATCH,
            ),
            "non-finite detection": (
                "a step that is not finite is dropped before the optimizer steps, and here it steps within the "
                "backward pass",
                _DROP_OVERFLOW,
            ),
            "reentrant checkpointing": (
                "a parameter that two checkpointed segments share would step twice",
                'Pass "use_reentrant": False',
            ),
            "layer-wise optimizer": ("its optimizer steps within the backward pass already", _OTHER_OPTIM),
            "auto_find_batch_size": (
                "weights that have stepped when memory runs out cannot be taken back",
                _DROP_AUTO_BATCH,
            ),
            **dict.fromkeys(ENGINES, ("weights would step before the processes have shared gradients", _DROP_RELEASE)),
        },
    ),
    Technique(
        "sparse tied embedding",
        fields={"sparse_tied_embedding": False},
        callback="hf_memopt.techniques.tied_embedding:TiedEmbeddingCallback",
        on_model="hf_memopt.binding.model_changes.tied_embedding:sparse_tied_embedding",
        sets={"sparse_tied_embedding": True},
        pays_for="trains_tied_embedding",
        why="saves a gradient as large as the embedding",
        refused={
            "torch.compile": (
                "compiled code makes the whole gradient of the embeddings, so nothing would be saved",
                _DROP_COMPILE,
            ),
            **dict.fromkeys(
                SHARDED,
                (
                    "which rows of the weight this process holds, and where its gradient arrives, is decided by the "
                    "sharding",
                    "Take TiedEmbeddingCallback out of callbacks=",
                ),
            ),
        },
    ),
    Technique(
        "fused cross-entropy",
        fields={"fused_cross_entropy": False},
        callback="hf_memopt.techniques.fused_cross_entropy:FusedCrossEntropyCallback",
        on_model="hf_memopt.binding.fused_loss.fuse:fuse_cross_entropy",
        sets={"fused_cross_entropy": True},
        pays_for="is_language_model",
        why="all logits at once would be large",
        refused={
            "torch.compile": (
                "the logits are a tensor without storage, which breaks the compiled graph",
                _DROP_COMPILE,
            ),
            "Liger kernel": ("Liger's own fused loss does not call the head, so nothing would be fused", _DROP_FUSED),
            "TRL": (
                "its trainers compute the loss from the head's weights, in tiles of their own, and do not call the "
                "head",
                _DROP_FUSED,
            ),
            **dict.fromkeys(
                ("other sharding", "DeepSpeed"),
                ("the weights of the head are sharded when the loss needs them", _DROP_FUSED),
            ),
        },
    ),
    Technique(
        "16-bit weights",
        "rounding",
        consent="bf16_weights",
        fields={"rounding": "nearest"},
        optimizer="hf_memopt.techniques.optimizers.sixteen_bit_weights:rounded_optimizer",
        title="bf16 weights",
        sets={"weights_dtype": "bfloat16", "rounding": "stochastic"},
        why="2 bytes per weight and gradient; stochastic rounding keeps small updates on average",
        refused={
            "fp16": ("the gradient scaler needs float32 weights", _BF16_OR_NEITHER),
            "layer-wise optimizer": (
                "it has a step of its own within the backward pass, which is not one element by element",
                "Choose another optim, with released_optimizer(args, model, rounding=...)",
            ),
            "FSDP2": (
                "it updates slices of a weight in place, and a slice of a sharded weight is a copy",
                _DROP_RELEASE,
            ),
            "other sharding": (
                "it shards float32 weights, and loses what rounding cut off when it gathers the state",
                _DROP_RELEASE,
            ),
            "DeepSpeed": (
                "its engine updates float32 weights of its own in place of the optimizer",
                _DROP_RELEASE,
            ),
        },
    ),
    Technique(
        "checkpointing policy",
        refused={
            "reentrant checkpointing": (
                "policies need the non-reentrant variant",
                'Leave activation_checkpointing_kwargs={"use_reentrant": True} out',
            ),
            "ZeRO-3": (
                "a layer that is recomputed does not gather its weights by the operations that a policy has kept",
                "Set activation_checkpointing=True (gradient_checkpointing=True before transformers 5.23) in its place",
            ),
        },
    ),
    Technique(
        "micro-batching",
        fields={"micro_batch_size": None, "micro_batching": False},
        callback="hf_memopt.techniques.microbatching.microbatch:MicrobatchCallback",
        refused={
            "DDP, default flags": (
                "a forward pass that is run again would wait for the buffers of processes that do not run it",
                _WHOLE_DDP,
            ),
            **dict.fromkeys(("other sharding", "DeepSpeed"), (_WAITS_WITHIN_STEP, _DROP_MICROBATCH)),
            "layer-wise optimizer": (
                f"{_STEPS_WITHIN_BACKWARD} an interrupted step cannot be repeated",
                _OTHER_OPTIM,
            ),
            "NEFTune": (
                "its noise is scaled by the padded length, which is another one in a part of a batch",
                "Leave neftune_noise_alpha out",
            ),
            "auto_find_batch_size": (
                "both recover from out of memory, and stock's restarts the run with a smaller batch",
                _DROP_AUTO_BATCH,
            ),
        },
    ),
    Technique(
        "non-finite detection",
        refused={
            "layer-wise optimizer": (
                f"{_STEPS_WITHIN_BACKWARD} a step that is not finite cannot be dropped",
                _OTHER_OPTIM,
            ),
            "other sharding": (
                "the diagnosis runs rows in one process, and sharded weights need all of them",
                _DROP_OVERFLOW,
            ),
            "DeepSpeed": (
                "its engine steps by itself, so a step that is not finite cannot be dropped",
                _DROP_OVERFLOW,
            ),
        },
    ),
    Technique("precision"),
    Technique(
        "evaluation guard",
        refused=dict.fromkeys(
            ("other sharding", "DeepSpeed"),
            (
                "processes wait for each other within a forward pass, and only one would repeat it",
                "Take EvaluationGuardCallback out of callbacks=",
            ),
        ),
    ),
    Technique(
        "memory report",
        fields={"memory_report": False},
        callback="hf_memopt.memory.run.callback:MemoryReportCallback",
    ),
    Technique("sharded checkpoints"),
)
"""The techniques by name, in the order of the table in docs."""

VARIANTS = _listed(
    Technique(
        NO_LIMIT,
        fields={"micro_batching": False},  # a recipe sets no limit
        refused={"FSDP2": (_WAITS_WITHIN_STEP, "Pass a limit: MicrobatchCallback(max_tokens=4096)")},
    ),
    Technique(
        LATE_LOSS,
        refused={
            "DDP, default flags": (
                "DDP looks for unused parameters from the logits back, and those of a fused loss lead to none",
                _WHOLE_DDP,
            )
        },
    ),
    Technique("bitsandbytes optimizer", refused=dict.fromkeys(("FSDP2", "other sharding"), _NO_SHARDED_OPERATORS)),
)
"""Uses of a technique that more is refused for, and a class of stock's optimizers; none is a technique of its own."""


def asked_by(set_up: Any) -> dict[str, Technique]:
    """Return what the fields of a set-up, a ``Recipe`` or ``StepSettings``, ask for, by name."""
    return {one.name: one for one in (*TECHNIQUES.values(), *VARIANTS.values()) if one.field_in(set_up)}
