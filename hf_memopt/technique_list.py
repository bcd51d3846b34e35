"""The list of techniques: what the rest of the package knows of each, in one descriptor.

A technique is one file in ``techniques/``, with its function and the callback under it, and one entry here. ``attach``,
the estimate, recipes, the planner, the script and the table of docs read the entries; none of them names a technique.
They stand in a file that imports little, since settings and options are checked without torch.

``refusals.csv`` has what a technique cannot be used with: it would train wrongly, hang or stop in the middle of a run.
``binding.compatibility`` says what the settings are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from hf_memopt.plain_data import packaged_rows

SHARDED = ("FSDP2", "other sharding", "DeepSpeed")
ENGINES = ("DDP", "DDP, default flags", *SHARDED)
"""The settings that train in several processes."""

NO_OVERLAP = "offload='overlapped' is gone; expected stock's offload, or none. Pass offload=True"
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
        callback: the callback that a recipe uses where its field asks for it, as "module:class".
        on_load: what it does to a model before adapters are added, as "module:function"; "" for nothing.
        on_model: what it does to a model before the first step; "" for nothing.
        optimizer: makes the optimizer's class from the arguments, the model and the recipe's rounding; "" for none.
        function: which recordings apply it with, where a step is simulated by the technique itself; "" for none.
        steps: the class by which a released optimizer then steps; "" for none.
        arguments: fields of a recipe that callback and function take.
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
    on_load: str = ""
    on_model: str = ""
    optimizer: str = ""
    function: str = ""
    steps: str = ""
    arguments: tuple[str, ...] = ()
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
    refused: dict[str, dict[str, tuple[str, str]]] = {one.name: {} for one in techniques}
    for row in packaged_rows("hf_memopt", "refusals.csv"):
        if row["technique"] in refused:
            refused[row["technique"]].update(dict.fromkeys(row["others"].split(" | "), (row["reason"], row["fix"])))
    return {one.name: replace(one, refused=refused[one.name]) for one in techniques}


TECHNIQUES = _listed(
    Technique("length buckets"),
    Technique("freezing", "training", consent="freeze", fields={"freeze": ()}),
    Technique("32-bit embeddings"),
    Technique(
        "gradient release",
        "training",
        consent="release_clipping",
        fields={"gradient_release": False},
        optimizer="hf_memopt.training.techniques.optimizers.low_memory:low_memory_optimizer",
        title="released",
        sets={"gradient_release": True},
        why="a gradient is freed once its parameter has stepped; nothing is clipped or accumulated",
    ),
    Technique(
        "sparse tied embedding",
        fields={"sparse_tied_embedding": False},
        callback="hf_memopt.training.techniques.tied_embedding:TiedEmbeddingCallback",
        on_model="hf_memopt.training.binding.model_changes.tied_embedding:sparse_tied_embedding",
        sets={"sparse_tied_embedding": True},
        pays_for="trains_tied_embedding",
        why="saves a gradient as large as the embedding",
    ),
    Technique(
        "fused cross-entropy",
        fields={"fused_cross_entropy": False},
        callback="hf_memopt.training.techniques.fused_cross_entropy:FusedCrossEntropyCallback",
        on_model="hf_memopt.training.binding.fused_loss.fuse:fuse_cross_entropy",
        sets={"fused_cross_entropy": True},
        pays_for="is_language_model",
        why="all logits at once would be large",
    ),
    Technique(
        "16-bit weights",
        "rounding",
        consent="bf16_weights",
        fields={"rounding": "nearest"},
        optimizer="hf_memopt.training.techniques.optimizers.low_memory:low_memory_optimizer",
        title="bf16 weights",
        sets={"weights_dtype": "bfloat16", "rounding": "stochastic"},
        why="2 bytes per weight and gradient; stochastic rounding keeps small updates on average",
    ),
    Technique(
        "checkpointing policy",
        callback="hf_memopt.training.techniques.checkpointing.policies:CheckpointingCallback",
        sets={"checkpointing": True},
    ),
    Technique(
        "tiled layers",
        fields={"tiled": False},
        callback="hf_memopt.training.techniques.tiling.tiles:TiledLayersCallback",
        on_model="hf_memopt.training.techniques.tiling.tiles:tile_layers",
        arguments=("tile_tokens",),
    ),
    Technique(
        "streamed layers",
        fields={"streamed": False},
        function="hf_memopt.training.techniques.streaming.streamed_layers:stream_layers",
        steps="hf_memopt.training.techniques.streaming.gradients:DeviceSteps",
        callback="hf_memopt.training.techniques.streaming.streamed_layers:StreamedLayersCallback",
        arguments=("embeddings_on_host", "resident"),
        why="the weights of the layers wait in host memory",
    ),
    Technique(
        "optimizer state on the host",
        fields={"optimizer_state_on_host": False},
        callback="hf_memopt.training.techniques.optimizers.state_on_host:OptimizerStateOnHostCallback",
    ),
    Technique(
        "micro-batching",
        fields={"micro_batch_size": None, "micro_batching": False},
        callback="hf_memopt.training.techniques.microbatching.microbatch:MicrobatchCallback",
    ),
    Technique("non-finite detection"),
    Technique("precision"),
    Technique("evaluation guard", callback="hf_memopt.training.techniques.evaluation.guard:EvaluationGuardCallback"),
    Technique("memory report", fields={"memory_report": False}),  # its callback compares a run with its estimate
    Technique("sharded checkpoints"),
)
"""The techniques by name, in the order of the table in docs."""

VARIANTS = _listed(
    Technique(LATE_LOSS),
    Technique("bitsandbytes optimizer"),
    Technique(
        "experts in 4 bits",
        "rounding",
        fields={"quantize_experts": False},
        on_load="hf_memopt.training.techniques.experts.quantize:quantize_experts_for_qlora",
    ),
)
"""Uses of a technique that more is refused for, and a class of stock's optimizers; none is a technique of its own."""


def asked_by(set_up: Any) -> dict[str, Technique]:
    """Return what the fields of a set-up, a ``Recipe`` or ``StepSettings``, ask for, by name."""
    return {one.name: one for one in (*TECHNIQUES.values(), *VARIANTS.values()) if one.field_in(set_up)}
