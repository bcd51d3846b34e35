"""The set-ups that ``plan`` considers, as Recipes, in the order in which it prefers them, each with its techniques.

What a technique changes decides the order: nothing of the result, its rounding, or the training itself. The set-up that
changes the training less is simpler, then the one with the first of ``LEVERS``; ``choice`` weighs speed against that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from hf_memopt.plain_data import packaged_rows
from hf_memopt.prediction.recipes import Recipe
from hf_memopt.prediction.recipes.planning.simulated import priced_on
from hf_memopt.technique_list import TECHNIQUES
from hf_memopt.training.binding.model import head_for
from hf_memopt.training.devices import Gpu, against_float16

ADAPTERS = ("lora", "qlora")
LORA_RANK = 16
EVAL_ROWS = 8  # no more than that are needed to use a GPU where no activations are kept


@dataclass(frozen=True)
class Technique:
    """A way to save memory or time: its name in a table, which fields of a Recipe it sets, and why it is worth it."""

    name: str  # short, for a table
    fields: Mapping[str, Any] = field(hash=False)  # of the Recipe, with their values
    reason: str  # for these fields
    kind: str = "exact"  # what it changes: "exact" (nothing of the result), "rounding" or "training"
    consent: str = ""  # the word of `allow` that it needs; "" for none
    # whether it never makes a step faster, so that it is of use only with more rows than fit without it
    only_saves: bool = False
    replaces: Technique | None = None  # the technique that it builds on and stands for; None for none


AUTOCAST = "matrix products in 16 bits, weights and updates in float32"


def _packaged() -> tuple[Technique, ...]:
    found: dict[str, Technique] = {}
    for row in packaged_rows("hf_memopt.prediction.recipes.planning", "levers.csv"):
        pairs = (pair.split("=") for pair in row["sets"].split())
        fields = {name: {"True": True, "False": False}.get(value, value) for name, value in pairs}
        replaced = found.get(row["replaces"])
        found[row["name"]] = Technique(
            row["name"], fields, row["reason"], row["kind"], only_saves=bool(row["only_saves"]), replaces=replaced
        )
    return tuple(found.values())


*LEVERS, TF32, EXPERTS = _packaged()
"""Of set-ups that are as good as each other, the one whose last lever comes first here is the simpler."""
FLASH, CHECKPOINTING, EIGHT_BIT, SEGMENTS, TILES, WAITING, WAITING_EIGHT_BIT, PAGED, *ON_HOST = LEVERS
OFFLOAD, STREAMED, STREAMED_EMBEDDINGS = ON_HOST
LINUX_ONLY = SEGMENTS, PAGED


def _planned(one: Any) -> Technique:
    """Return a technique of this package as plans choose it, with a word of consent."""
    return Technique(one.title, one.sets, one.why, one.kind, one.consent)


BF16_WEIGHTS = _planned(TECHNIQUES["16-bit weights"])


def _asking() -> list[Technique]:
    """Return the other techniques of this package that need a word of consent."""
    return [one for one in map(_planned, TECHNIQUES.values()) if one.name not in ("", BF16_WEIGHTS.name)]


@dataclass(frozen=True)
class ModelFacts:
    """What the order of set-ups depends on: the model, and what is installed here."""

    task: str | None  # of the model's head; None for a head that is unknown
    is_tied: bool  # whether the embedding is the head too
    layers: int  # of its shortest stack
    all_layers: int = 0  # of all its stacks
    has_adapters: bool = False  # whether it has adapters of its own
    is_quantized: bool = False  # whether its weights are quantised already
    can_adapt: bool = True  # whether PEFT's rules are known to fit it
    # whether it is built from a name or a configuration, so that its weights can be of another dtype
    can_reload: bool = True
    supports_flash: bool = False  # whether transformers has FlashAttention-2 for it
    has_flash: bool = False  # whether FlashAttention-2 is installed here
    has_offload: bool = True  # whether transformers here can offload
    has_segments: bool = True  # whether torch's allocator has expandable segments where it trains
    has_paging: bool = True  # whether memory that CUDA manages may exceed the GPU there
    overflow: str = ""  # why it should not compute in float16, with the source; "" where nothing is known
    most_tokens: int | None = None  # of a row that it takes; None for no limit
    default_length: int | None = None  # tokens of a row where none are given; None for a model without text
    compares_rows: bool = False  # whether its loss compares the rows of a batch with each other, as CLIP's
    has_experts: bool = False  # whether it has fused experts that can be put into 4 bits
    tiles: bool = False  # whether its rows are long, and modules of it work on each position alone
    kind: str = ""  # its model_type
    new_parts: tuple[str, ...] | None = None  # which adapters train whole; None for all that its task may have
    notes: tuple[str, ...] = ()  # on its published weights

    @property
    def is_language_model(self) -> bool:
        """Whether its head has a logit for each word of the vocabulary."""
        return "vocabulary" in head_for(self.task).traits

    @property
    def is_generating(self) -> bool:
        """Whether evaluation generates, and a metric compares the texts."""
        return self.task == "seq2seq"

    def against_float16(self, gpu: Gpu) -> str:
        """Return why it should not compute in float16 on a GPU without bfloat16; "" where nothing is known."""
        return "" if gpu.bf16 else self.overflow or against_float16(gpu.name)

    @property
    def trains_tied_embedding(self) -> bool:
        """Whether it is a language model whose embedding is the head too, and trained."""
        return self.is_language_model and self.is_tied and not self.has_adapters and not self.is_quantized


@dataclass(frozen=True)
class SetUp:
    """A recipe before its batch is cut, and the techniques that make it."""

    stage: str  # the rung of the ladder: "full", "freeze", "lora" or "qlora"
    recipe: Recipe  # with one example at a time
    techniques: tuple[Technique, ...]  # in the order of preference

    @property
    def consents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(technique.consent for technique in self.techniques if technique.consent))

    @property
    def name(self) -> str:
        method = {"full": "full", "freeze": "full", "lora": f"LoRA r{LORA_RANK}", "qlora": f"QLoRA r{LORA_RANK}"}
        return ", ".join((method[self.stage], *(technique.name for technique in self.techniques)))

    @property
    def plainer(self) -> tuple[tuple[Technique, ...], ...]:
        """The techniques of the set-ups that are at least as fast: without one of those that only save memory.

        The state of adapters is so small that an optimizer with less of it counts among them.
        """
        found = []
        for one in self.techniques:
            if one.only_saves or (self.stage in ADAPTERS and "optim" in one.fields):
                others = (one.replaces if other is one else other for other in self.techniques)
                found.append(tuple(other for other in others if other is not None))
        return tuple(found)

    @property
    def held(self) -> tuple[Any, ...]:
        """What decides the bytes that are there in every pass: weights, gradients between passes, optimizer state."""
        one = self.recipe
        state = one.optim, one.optimizer_state_on_host
        return one.weights_dtype, one.load_in, one.lora, one.freeze, one.accumulates, state

    def with_rows(self, rows: int) -> Recipe:
        """Return the recipe with micro-batches of ``rows``, with its reasons."""
        evaluated = max(self.recipe.per_device_eval_batch_size, min(rows, EVAL_ROWS))
        sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": evaluated}
        return self.recipe.replace(**sizes, reasons=self.recipe.reasons)

    def with_resident(self, resident: int, layers: int) -> SetUp:
        """Return the streamed set-up with so many of its layers on the GPU, where they are recomputed too."""
        [streamed] = [one for one in self.techniques if one.fields.get("streamed")]
        waits = f"{layers - resident} of {layers} layers"
        varied = replace(
            streamed,
            name=streamed.name.replace("streamed layers", f"{waits} streamed"),
            fields={**streamed.fields, **CHECKPOINTING.fields, "resident": resident},
            reason=f"{waits} wait in host memory, spread evenly over those that fit on the GPU; each is recomputed",
            replaces=streamed,
        )
        techniques = tuple(varied if one is streamed else one for one in self.techniques)
        return SetUp(self.stage, _with(self.recipe, [varied]), techniques)

    @property
    def structure(self) -> Recipe:
        """The recipe without what needs no recording of its own: the optimizer and the allocator's segments."""
        plain = {"optim": "adamw_torch_fused", "optimizer_state_on_host": False, "expandable_segments": False}
        return self.recipe.replace(**plain, reasons={})

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Smaller is simpler: how many techniques change the training, which levers it has, how many round or share."""
        changing = sum(one.kind == "training" or bool(one.consent) for one in self.techniques)
        techniques = (one.replaces if one.fields.get("resident") else one for one in self.techniques)
        levers = sum(2 ** LEVERS.index(one) for one in techniques if one in LEVERS)
        return changing, levers, sum(one.kind == "rounding" for one in self.techniques)


def on_host(techniques: Iterable[Technique]) -> list[Technique]:
    """Return those with which optimizer state or activations wait in host memory."""
    kinds = (WAITING, WAITING_EIGHT_BIT, PAGED, *ON_HOST)
    return [one for one in techniques if one in kinds or one.fields.get("resident")]


@dataclass(frozen=True)
class Situation:
    """What decides which options of a set-up are possible."""

    stage: str
    facts: ModelFacts
    gpu: Gpu
    precision: tuple[Technique, ...]  # that of ``_precisions``
    streamed: bool  # whether layers wait in host memory

    def sets_precision(self, *names: str) -> bool:
        return any(one.fields.get("precision") in names for one in self.precision)

    @property
    def can_train(self) -> bool:
        """False where the scaler of float16 would read gradients on the GPU that wait on the host."""
        return not (self.streamed and self.stage in ("full", "freeze") and self.sets_precision("fp16"))

    @property
    def has_flash(self) -> bool:
        is_short = self.sets_precision("bf16", "fp16") or BF16_WEIGHTS in self.precision
        return is_short and self.gpu.bf16 and self.facts.supports_flash and self.facts.has_flash

    @property
    def can_wait(self) -> bool:
        """Whether optimizer state may wait in host memory."""
        return not self.streamed and not self.is_released and self.stage != "freeze"

    @property
    def can_page(self) -> bool:
        """Whether its state may be paged, which a released optimizer alone needs: it steps within the backward pass."""
        return self.facts.has_paging and not self.streamed and self.is_released

    @property
    def is_released(self) -> bool:
        return any(one.fields.get("gradient_release") for one in self.precision)


@dataclass(frozen=True)
class Option:
    """Techniques that go together, and what they need."""

    techniques: tuple[Technique, ...] = ()
    is_possible: Callable[[Situation], bool] = lambda at: True


_CHOICES = (  # of each row one option is taken, in this order of preference
    (Option(), Option((FLASH,), lambda at: at.has_flash)),
    (
        Option((), lambda at: not at.streamed),
        Option((CHECKPOINTING,), lambda at: not at.streamed),
        Option((CHECKPOINTING, TILES), lambda at: not at.streamed and at.facts.tiles),
        Option((OFFLOAD,), lambda at: not at.streamed and at.facts.has_offload),
        Option((OFFLOAD, TILES), lambda at: not at.streamed and at.facts.has_offload and at.facts.tiles),
        Option((STREAMED,), lambda at: at.streamed),
        Option((STREAMED_EMBEDDINGS,), lambda at: at.streamed and not at.facts.is_tied),
    ),
    (
        Option(),
        Option((WAITING,), lambda at: at.can_wait and BF16_WEIGHTS not in at.precision),
        Option((EIGHT_BIT,)),
        Option((WAITING_EIGHT_BIT,), lambda at: at.can_wait and at.stage not in ADAPTERS),
        Option((PAGED,), lambda at: at.can_page),
    ),
    (Option(), Option((SEGMENTS,), lambda at: at.facts.has_segments)),
)


def set_ups(
    stage: str, facts: ModelFacts, gpu: Gpu, effective_batch_size: int, *, streamed: bool = False
) -> Iterator[SetUp]:
    """Yield the set-ups of one rung of the ladder, those of one recording after each other.

    With ``streamed`` those whose layers wait in host memory: none has another checkpointing, or state that waits.
    """
    base = _base(stage, facts, gpu, effective_batch_size)
    for precision in _precisions(stage, facts, gpu):
        at = Situation(stage, facts, gpu, precision, streamed)
        if not at.can_train:
            continue
        possible = ([option for option in row if option.is_possible(at)] for row in _CHOICES)
        for attention, memory, state, segments in product(*possible):
            options = (attention, state, memory, segments)  # in the order in which a name tells them
            techniques = (*precision, *(technique for option in options for technique in option.techniques))
            yield SetUp(stage, _with(base, techniques), techniques)


def _with(base: Recipe, techniques: Iterable[Technique]) -> Recipe:
    fields: dict[str, Any] = {}
    reasons = dict(base.reasons)
    for technique in techniques:
        fields |= technique.fields
        reasons |= dict.fromkeys(technique.fields, technique.reason)
    return base.replace(**fields, reasons=reasons)


def _base(stage: str, facts: ModelFacts, gpu: Gpu, effective_batch_size: int) -> Recipe:
    traits = head_for(facts.task).traits
    trained = replace(facts, is_tied=facts.is_tied and stage == "full")
    paying = [one for one in TECHNIQUES.values() if one.pays_for]
    rows = 1 if facts.is_language_model else min(EVAL_ROWS, effective_batch_size)  # more with more rows in training
    reasons = {
        "per_device_eval_batch_size": "evaluation gathers what it generates, and has the logits of one batch at a time"
        if facts.is_generating
        else "evaluation keeps no activations, and more examples at a time are hardly faster",
        "prediction_loss_only": "without a metric evaluation needs the loss alone, which is computed without logits",
        **{field: one.why for one in paying for field in one.sets},
    }
    if gpu.bf16 and facts.supports_flash and not facts.has_flash:
        reasons["attn_implementation"] = "no attention matrix is kept; flash_attention_2 is not installed here"
    found = Recipe(
        name="plan",
        purpose="chosen by plan()",
        effective_batch_size=effective_batch_size,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=rows,
        prediction_loss_only="loss-alone" in traits,
        bucketing="buckets" in traits,
        **{name: value for one in paying if getattr(trained, one.pays_for) for name, value in one.sets.items()},
    )
    return found.replace(reasons={name: reason for name, reason in reasons.items() if getattr(found, name)})


def _precisions(stage: str, facts: ModelFacts, gpu: Gpu) -> Iterator[tuple[Technique, ...]]:
    """Yield what computes in 16 bits first, since it is the faster as a rule; only float32 where float16 overflows."""
    problem = facts.against_float16(gpu) if facts.can_reload else ""
    name, weights = ("bf16", "bfloat16") if gpu.bf16 else ("fp32", "float32") if problem else ("fp16", "float16")
    plain = Technique("fp32", {"precision": "fp32"}, problem or "nothing is rounded to 16 bits")
    autocast = plain if problem else Technique(name, {"precision": name}, AUTOCAST, "rounding")
    if stage == "lora":
        loaded = {"weights_dtype": weights} if facts.can_reload or not facts.is_quantized else {}
        reason = "adapters are trained in float32, and the weights "
        reason += f"are float32 too: {problem}" if problem else "stay as published, in 16 bits"
        yield (Technique(name, dict(lora=LORA_RANK, **loaded, precision=name), reason, "training"),)
    elif stage == "qlora":
        fields = {"lora": LORA_RANK, "load_in": "nf4", "precision": name}
        reason = "adapters are trained in float32, and the frozen weights take 4 bits"
        reason += f"; all else is float32: {problem}" if problem else ""
        nf4 = Technique("nf4, fp32" if problem else "nf4", fields, reason, "training")
        yield (nf4, EXPERTS) if facts.has_experts else (nf4,)
    elif stage == "freeze":
        lower = [f"layers:0-{facts.layers // 2 - 1}"] if facts.layers > 1 else []
        for patterns in dict.fromkeys([("embeddings",), ("embeddings", *lower)]):
            what = " and ".join(patterns).replace("layers:0-", "layers 0-")
            reason = "frozen parameters have no gradient, no state and no backward pass below them"
            yield autocast, Technique(f"frozen {what}", {"freeze": patterns}, reason, "training", "freeze")
    else:
        rates = priced_on(gpu).peak_flops_per_second  # on a GeForce TF32 and float32 have the same rate
        faster = [(TF32,)] if gpu.bf16 and (rates.tf32 or 0) > (rates.fp32 or 0) else []
        yield from dict.fromkeys([(autocast,), *faster, (plain,)])
        if facts.has_adapters or facts.is_quantized:
            return
        yield from (((autocast if gpu.bf16 else plain), one) for one in _asking())
        if gpu.bf16 and facts.can_reload:
            yield (BF16_WEIGHTS,)
            yield from ((BF16_WEIGHTS, one) for one in _asking())
