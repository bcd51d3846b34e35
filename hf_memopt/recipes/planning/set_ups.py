"""The set-ups that ``plan`` considers, as Recipes, in the order in which it prefers them, each with its techniques.

What a technique changes decides the order (``KINDS``): nothing of the result, its rounding, or the training itself. Of
set-ups that are as good as each other the one with fewer techniques, and of an earlier kind, is the simpler one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_memopt.recipes.recipe import Recipe

if TYPE_CHECKING:
    from hf_memopt.devices.gpus import Gpu

__all__ = ["LORA_RANK", "ModelFacts", "SetUp", "Technique", "set_ups"]

KINDS = ("exact", "rounding", "training")
LORA_RANK = 16
LANGUAGE_TASKS = ("causal-lm", "masked-lm", "seq2seq", "speech-seq2seq")
EVAL_ROWS = 8  # no more than that are needed to use a GPU where no activations are kept


@dataclass(frozen=True)
class Technique:
    """A way to save memory or time: its name in a table, which fields of a Recipe it sets, and why it is worth it.

    Attributes:
        name: short, for a table.
        fields: of the Recipe, by name.
        reason: for these fields.
        kind: what it changes, one of ``KINDS``.
        consent: the word of ``allow`` that it needs; "" for none.
    """

    name: str
    fields: dict[str, Any]
    reason: str
    kind: str = "exact"
    consent: str = ""


AUTOCAST = "matrix products in 16 bits, weights and updates in float32"
CHECKPOINTING = Technique(
    "checkpointing",
    {"checkpointing": True, "autocast_cache": False},
    "activations are recomputed in the backward pass instead of kept",
)
OFFLOAD = Technique(
    "offload",
    {"checkpointing": True, "autocast_cache": False, "offload": True},
    "the inputs of checkpointed layers wait in host memory",
)
PAGED = Technique(
    "paged AdamW", {"optim": "paged_adamw_32bit"}, "optimizer state that does not fit moves to host memory"
)
EIGHT_BIT = Technique(
    "8-bit AdamW", {"optim": "adamw_8bit"}, "2 bytes of state per parameter instead of 8, embeddings apart", "rounding"
)
PAGED_EIGHT_BIT = Technique(
    "paged 8-bit AdamW",
    {"optim": "paged_adamw_8bit"},
    "2 bytes of state per parameter, and what does not fit moves to host memory",
    "rounding",
)
RELEASE = Technique(
    "released",
    {"gradient_release": True},
    "each gradient is freed as soon as its parameter has stepped; nothing is clipped or accumulated",
    "training",
    "release_clipping",
)
BF16_WEIGHTS = Technique(
    "bf16 weights",
    {"weights_dtype": "bfloat16", "rounding": "stochastic"},
    "2 bytes per weight and gradient instead of 4; stochastic rounding keeps small updates on average",
    "rounding",
    "bf16_weights",
)


@dataclass(frozen=True)
class ModelFacts:
    """What the order of set-ups depends on.

    Attributes:
        task: of the model's head; None for a head that is unknown.
        is_tied: whether the embedding is the head too.
        layers: of its shortest stack.
        has_adapters: whether it has adapters of its own.
        is_quantized: whether its weights are quantised already.
        can_adapt: whether PEFT's rules are known to fit it.
        can_reload: whether it is built from a name or a configuration, so that its weights can be of another dtype.
    """

    task: str | None
    is_tied: bool
    layers: int
    has_adapters: bool = False
    is_quantized: bool = False
    can_adapt: bool = True
    can_reload: bool = True

    @property
    def is_language_model(self) -> bool:
        """Whether its head has a logit for each word of the vocabulary."""
        return self.task in LANGUAGE_TASKS


@dataclass(frozen=True)
class SetUp:
    """A recipe before its batch is cut, and the techniques that make it.

    Attributes:
        stage: the rung of the ladder: "full", "freeze", "lora" or "qlora".
        recipe: with one example at a time.
        techniques: in the order of preference.
    """

    stage: str
    recipe: Recipe
    techniques: tuple[Technique, ...]

    @property
    def consents(self) -> tuple[str, ...]:
        """The words of ``allow`` that it needs."""
        return tuple(dict.fromkeys(technique.consent for technique in self.techniques if technique.consent))

    @property
    def name(self) -> str:
        """The method and its techniques in short."""
        method = {"full": "full", "freeze": "full", "lora": f"LoRA r{LORA_RANK}", "qlora": f"QLoRA r{LORA_RANK}"}
        return ", ".join((method[self.stage], *(technique.name for technique in self.techniques)))

    @property
    def structure(self) -> Recipe:
        """The recipe without what needs no recording of its own: the optimizer."""
        return self.recipe.replace(optim="adamw_torch_fused", reasons={})

    def without_offload(self) -> SetUp:
        """Return it with checkpointing in place of offloading."""
        techniques = tuple(CHECKPOINTING if one is OFFLOAD else one for one in self.techniques)
        reasons = {name: why for name, why in self.recipe.reasons.items() if name != "offload"}
        reasons |= dict.fromkeys(CHECKPOINTING.fields, CHECKPOINTING.reason)
        return replace(self, recipe=self.recipe.replace(offload=False, reasons=reasons), techniques=techniques)

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Smaller is simpler: what it changes of training, how many techniques it has, how many change rounding."""
        kinds = [technique.kind for technique in self.techniques]
        return kinds.count("training"), len(kinds), kinds.count("rounding")


def set_ups(stage: str, facts: ModelFacts, gpu: Gpu, effective_batch_size: int) -> Iterator[SetUp]:
    """Yield the set-ups of one rung of the ladder, those of one recording after each other."""
    base = _base(facts, effective_batch_size)
    for common in _commons(stage, facts, gpu):
        for memory in ((), (CHECKPOINTING,), (OFFLOAD,)):
            for optimizer in _optimizers(stage, common):
                techniques = (*common, *optimizer, *memory)
                fields: dict[str, Any] = {}
                reasons = dict(base.reasons)
                for technique in techniques:
                    fields |= technique.fields
                    reasons |= dict.fromkeys(technique.fields, technique.reason)
                changed = base.replace(**_fused(facts, stage, fields), **fields)
                yield SetUp(stage, changed.replace(reasons=reasons), techniques)


def _base(facts: ModelFacts, effective_batch_size: int) -> Recipe:
    rows = 1 if facts.is_language_model else min(EVAL_ROWS, effective_batch_size)
    reasons = {
        "per_device_eval_batch_size": "evaluation has whole logits, of one example at a time"
        if facts.is_language_model
        else "evaluation keeps no activations, and more examples at a time are hardly faster",
        "fused_cross_entropy": "the logits of all positions would be among the largest tensors",
        "sparse_tied_embedding": "one matrix of the vocabulary's size less in the backward pass",
        "eval_accumulation_steps": "logits would pile up on the GPU until evaluation ends",
    }
    return Recipe(
        name="plan",
        purpose="chosen by plan()",
        effective_batch_size=effective_batch_size,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=rows,
        eval_accumulation_steps=1 if facts.is_language_model else None,
        bucketing=facts.task != "image-classification",
        reasons=reasons,
    )


def _fused(facts: ModelFacts, stage: str, fields: dict[str, Any]) -> dict[str, Any]:
    if not facts.is_language_model:
        return {}
    trains_embedding = stage == "full" and not facts.has_adapters and not facts.is_quantized
    return {"fused_cross_entropy": True, "sparse_tied_embedding": facts.is_tied and trains_embedding}


def _optimizers(stage: str, common: tuple[Technique, ...]) -> tuple[tuple[Technique, ...], ...]:
    if stage in ("lora", "qlora"):
        return ((),)  # the state of adapters is small
    if stage == "freeze":
        return ((), (EIGHT_BIT,))
    if BF16_WEIGHTS in common:
        return ((), (EIGHT_BIT,), (PAGED_EIGHT_BIT,))
    return ((), (PAGED,), (EIGHT_BIT,), (PAGED_EIGHT_BIT,))


def _commons(stage: str, facts: ModelFacts, gpu: Gpu) -> Iterator[tuple[Technique, ...]]:
    """Yield what the set-ups of a stage have in common, that in 16 bits first since it is the faster as a rule."""
    name = "bf16" if gpu.bf16 else "fp16"
    weights = "bfloat16" if gpu.bf16 else "float16"
    autocast = Technique(name, {"precision": name}, AUTOCAST, "rounding")
    plain = Technique("fp32", {"precision": "fp32"}, "nothing is rounded to 16 bits")
    if stage == "lora":
        fields = {"lora": LORA_RANK} if facts.is_quantized else {"lora": LORA_RANK, "weights_dtype": weights}
        reason = "adapters are trained in float32, and the weights stay as published, in 16 bits"
        yield (Technique(name, {**fields, "precision": name}, reason, "training"),)
    elif stage == "qlora":
        fields = {"lora": LORA_RANK, "load_in": "nf4", "precision": name}
        reason = "adapters are trained in float32, and the frozen weights take 4 bits"
        yield (Technique("nf4", fields, reason, "training"),)
    elif stage == "freeze":
        for patterns in _frozen(facts):
            what = " and ".join(patterns).replace("layers:0-", "layers 0-")
            reason = "frozen parameters have no gradient, no state and no backward pass below them"
            yield autocast, Technique(f"frozen {what}", {"freeze": patterns}, reason, "training", "freeze")
    else:
        yield (autocast,)
        yield (plain,)
        if facts.has_adapters or facts.is_quantized:
            return
        yield ((autocast if gpu.bf16 else plain), RELEASE)
        if gpu.bf16 and facts.can_reload:
            yield (BF16_WEIGHTS,)
            yield BF16_WEIGHTS, RELEASE


def _frozen(facts: ModelFacts) -> Iterator[tuple[str, ...]]:
    yield ("embeddings",)
    if facts.layers > 1:
        yield "embeddings", f"layers:0-{facts.layers // 2 - 1}"
