"""A Recipe: the values that name a set-up of the stock ``Trainer``, each with its reason, and what is built from
them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_memopt.changes import Change
from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import (
    Count,
    CountOrZero,
    check_fields,
    check_format,
    check_word,
    checked_path,
    from_object,
    parse_object,
    shown,
)
from hf_memopt.prediction.recipes.resolved_arguments import resolve_arguments
from hf_memopt.training.binding.compatibility import refuse_without_adapters, refused_fields

# What a recipe turns into needs torch and transformers, and is imported there: the presets are read without them.
if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback, TrainingArguments

    from hf_memopt.prediction.memory.settings import StepSettings
    from hf_memopt.training.batching.collation import BucketedCollator

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the JSON text; a higher one has fields or values that this version does not know."""


def _choice(default: Any, why: str) -> Any:
    """Declare a field, its default and the reason for it."""
    return field(default=default, metadata={"why": why})


@dataclass(frozen=True)
class Recipe:
    """A set-up of the stock Trainer as plain data; ``print`` shows every choice with its reason.

    Its methods give the parts of a Trainer: ``model_kwargs`` for ``from_pretrained``, ``prepare_model``,
    ``training_arguments``, ``collator``, ``optimizer`` and ``callbacks``. ``bucketed`` arranges the data; ``attach``
    comes last.

    Attributes:
        name: what the recipe is called.
        purpose: the GPU and the size of model it is meant for, and which of its figures were measured.
        effective_batch_size: examples per optimizer step, over accumulation and processes; it stays what it is whatever
            the batch is cut into.
        per_device_train_batch_size: examples of one forward and backward pass.
        per_device_eval_batch_size: examples of one evaluation batch.
        precision: ``"auto"``, ``"bf16"``, ``"fp16"`` or ``"fp32"`` of the autocast region, or ``"tf32"``: none, and
            float32 products in TF32 on GPUs that have it. With ``"auto"`` there is no autocast where 16-bit weights are
            trained: they compute in 16 bits by themselves.
        optim: a name that ``TrainingArguments(optim=...)`` knows.
        embedding_bits: bits of the embeddings' state in an 8-bit optimizer; ignored with any other.
        checkpointing: whether activations are recomputed instead of kept.
        every_n_layers: with checkpointing, of how many layers one is recomputed; 1 for all of them.
        bucketing: whether the training data is read in length-bucketed order; not where the loss compares rows (CLIP).
        pad_to_multiple_of: what the longest row of a batch is rounded up to.
        freeze: patterns for ``hf_memopt.techniques.freeze``.
        lora: the rank of LoRA adapters, which are trained in place of the weights; None for none.
        lora_alpha: the adapters' output is scaled by alpha / rank; None for twice the rank.
        lora_targets: the layers that get adapters, by the last parts of their names such as ``("q_proj", "v_proj")``;
            ``"auto"`` for all linear layers but the head.
        load_in: ``"nf4"`` (4 bits with double quantisation, as in QLoRA) or ``"int8"`` for weights that bitsandbytes
            quantises; needs ``lora``. None for weights as they are.
        quantize_experts: with ``load_in="nf4"``, whether the fused experts of a mixture are in 4 bits too.
        weights_dtype: of the weights as loaded: ``"float32"``, or 16 bits for weights that adapters leave frozen, or
            (``"bfloat16"`` alone) for training without float32 copies. Beside quantised weights ``"float32"`` means
            the 16 bits that the machine computes in, unless ``precision`` is ``"fp32"`` or ``"tf32"``.
        rounding: how an update of 16-bit weights is rounded: ``"nearest"``, which loses small ones, ``"stochastic"`` or
            ``"kahan"``.
        offload: whether the inputs of checkpointed layers wait in host memory.
        streamed: whether the weights of the layers wait in host memory, as with ``stream_layers``.
        embeddings_on_host: whether, with ``streamed``, the input embeddings wait and compute there too.
        resident: with ``streamed``, how many layers stay on the GPU, spread evenly over all.
        optimizer_state_on_host: whether optimizer state waits there, and visits the GPU in chunks.
        tiled: whether MLPs and experts run over tiles of positions, as with ``tile_layers``.
        tile_tokens: with ``tiled``, the tokens of a tile; None for the model's width, at least 1024.
        fused_cross_entropy: whether the loss is computed without all logits at once.
        sparse_tied_embedding: whether the gradient of a tied embedding is added into the head's in place.
        gradient_release: whether each parameter steps as soon as it has its gradient; then nothing is accumulated, and
            nothing clipped.
        attn_implementation: for ``from_pretrained``.
        prediction_loss_only: whether evaluation computes the loss alone; ``compute_metrics`` then gets nothing, and
            where the loss is fused no logits are made.
        eval_accumulation_steps: evaluation batches whose outputs stay on the GPU before they move to the host; None
            for all of them.
        dataloader_num_workers: processes that prepare batches.
        autocast_cache: whether autocast keeps the 16-bit copy of each weight through a forward pass.
        expandable_segments: whether torch's allocator has segments that grow, so that nothing fragments. Call
            ``use_expandable_segments()`` at the top of the script; the recipe's methods do where CUDA has not started.
        micro_batching: whether a batch that runs out of memory is cut into micro-batches and run again.
        memory_report: whether the log has the memory of each phase.
        reasons: why a field has its value, by the field's name.
    """

    name: str
    purpose: str
    effective_batch_size: Count = _choice(32, "examples per optimizer step; never changed by a small GPU")
    per_device_train_batch_size: Count = _choice(32, "the whole effective batch at once is fastest where it fits")
    per_device_eval_batch_size: Count = _choice(32, "evaluation keeps no activations")
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = _choice(
        "auto", "follows the GPU: bf16 where it is native, else fp16 with fp32 weights, else fp32"
    )
    optim: str = _choice("adamw_torch_fused", "one fused kernel; nothing cheaper in time")
    embedding_bits: Literal[32] = _choice(32, "8 bits are too few for rare tokens")
    checkpointing: bool = _choice(False, "recomputing costs one more forward pass per step")
    every_n_layers: Count = _choice(1, "what is recomputed at all is recomputed in every layer")
    bucketing: bool = _choice(True, "batches of like lengths pad little")
    pad_to_multiple_of: Count = _choice(8, "tensor cores like multiples of 8")
    freeze: tuple[str, ...] = _choice((), "nothing is frozen unless asked for")
    lora: Count | None = _choice(None, "all weights are trained, no adapters")
    lora_alpha: Count | None = _choice(None, "twice the rank, as usual")
    lora_targets: Literal["auto"] | tuple[str, ...] = _choice(
        "auto", "all linear layers but the head matter more than the rank (arXiv 2305.14314)"
    )
    load_in: Literal["nf4", "int8"] | None = _choice(None, "only frozen weights can be quantised")
    quantize_experts: bool = _choice(False, "linear layers alone are quantised")
    weights_dtype: Literal["float32", "bfloat16", "float16"] = _choice("float32", "small updates are lost in 16 bits")
    rounding: Literal["nearest", "stochastic", "kahan"] = _choice(
        "nearest", "float32 weights lose no update that matters"
    )
    offload: bool = _choice(False, "copies to the host cost time on the bus")
    streamed: bool = _choice(False, "copies of the layers cost time on the bus")
    embeddings_on_host: bool = _choice(False, "the host steps slower than the GPU")
    resident: CountOrZero = _choice(0, "no layer is streamed, or all are")
    optimizer_state_on_host: bool = _choice(False, "copies of the state cost time on the bus")
    tiled: bool = _choice(False, "only long rows have large intermediates")
    tile_tokens: Count | None = _choice(None, "the model's width, at least 1024; smaller tiles save little more")
    fused_cross_entropy: bool = _choice(False, "the logits of a small vocabulary are small")
    sparse_tied_embedding: bool = _choice(False, "matters where a large embedding is the head too")
    gradient_release: bool = _choice(False, "it would exclude accumulation and clipping")
    attn_implementation: str = _choice("sdpa", "no attention matrix is kept")
    prediction_loss_only: bool = _choice(False, "compute_metrics may need what the model predicts")
    eval_accumulation_steps: Count | None = _choice(None, "what evaluation keeps stays on the GPU until it ends")
    dataloader_num_workers: CountOrZero = _choice(0, "padding from Arrow is cheap beside a training step")
    autocast_cache: bool = _choice(True, "a weight is cast once per pass")
    expandable_segments: bool = _choice(False, "batches of few lengths hardly fragment")
    micro_batching: bool = _choice(True, "out of memory: the step is run in parts")
    memory_report: bool = _choice(True, "the log has the peak of each phase")
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("freeze", "lora_targets"):
            if isinstance(names := getattr(self, name), list):  # JSON has no tuples
                object.__setattr__(self, name, tuple(names))
        check_fields(self)
        for problem in _contradictions(self):
            raise ValueError(problem)

    def replace(self, **changed: Any) -> Recipe:
        """Return the recipe with other values; a changed field loses its reason, which was for the old value.

        Raises:
            TypeError: no such field; the message names the nearest.
        """
        known = [item.name for item in fields(self)]
        for name in changed:
            if name not in known:
                raise TypeError(
                    f"{name}={changed[name]!r} is not a field of a Recipe; expected one of "
                    f"{known}.{did_you_mean(name, known)} TrainingArguments go into "
                    f"recipe.training_arguments({name}=...)"
                )
        kept = {name: why for name, why in self.reasons.items() if name not in changed}
        return replace(self, **{"reasons": kept, **changed})

    def choices(self) -> list[tuple[str, Any, str]]:
        """Return the name of each choice, its value and its reason."""
        names = [item.name for item in fields(self) if "why" in item.metadata]
        return [(name, getattr(self, name), self.reason_of(name)) for name in names]

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.choices())
        lines = [f"  {name:<{width}}  {value!r:<20}  {reason}" for name, value, reason in self.choices()]
        return "\n".join([f"{self.name}: {self.purpose}", *lines])

    def _repr_html_(self) -> str:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        from hf_memopt.terminal import printed_html

        table = Table("setting", "value", "reason", title=escape(f"{self.name}: {self.purpose}"), title_justify="left")
        table.box, table.show_edge, table.pad_edge = box.SIMPLE_HEAD, False, False
        for name, value, reason in self.choices():
            table.add_row(name, escape(repr(value)), escape(reason))
        return printed_html(lambda console: console.print(table))

    def reason_of(self, name: str) -> str:
        """Return why a field has its value: the recipe's own reason, else that of its default."""
        choices = {item.name: item for item in fields(self) if "why" in item.metadata}
        check_word("name", name, choices)
        is_default = getattr(self, name) == choices[name].default
        return self.reasons.get(name, choices[name].metadata["why"] if is_default else "chosen by the caller")

    def to_json(self) -> str:
        """Return the recipe as JSON text, for ``from_json``."""
        return json.dumps({"format": FORMAT, **asdict(self), "reasons": dict(self.reasons)}, indent=2)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Return the recipe that ``to_json`` wrote.

        Raises:
            ValueError: the text is not a JSON object, or of another version of this package; a field is unknown or
                missing, or its value does not fit.
        """
        try:
            values = {"format": FORMAT, **parse_object(text)}
            check_format(values, FORMAT)
        except ValueError as error:
            raise ValueError(
                f"text={shown(text)} is not a recipe ({error}); expected what Recipe.to_json() returns. "
                "Write it anew: recipe('4gb-gpu').to_json()"
            ) from None
        del values["format"]
        return from_object(Recipe, values)

    # ---- What it turns into -----------------------------------------------------------------------------------------

    def changes(self, *, effective_batch_size: int | None = None, **training_arguments: Any) -> tuple[Change, ...]:
        """Return what ``training_arguments`` with the same overrides would decide by itself, each with its reason."""
        return resolve_arguments(self, effective_batch_size, training_arguments)[1]

    def training_arguments(
        self, output_dir: str | None = None, *, effective_batch_size: int | None = None, **overrides: Any
    ) -> TrainingArguments:
        """Return plain ``transformers.TrainingArguments``; ``overrides`` are any of its fields.

        Giving ``per_device_train_batch_size`` re-derives ``gradient_accumulation_steps`` so that the effective batch
        stays, and the other way round; each decision is logged, and ``changes`` returns it.

        Raises:
            TypeError: an override that TrainingArguments does not have (a name of 4.x: the message says the new one).
            ValueError: a batch that does not divide the effective batch, or a precision the machine cannot train in.
            NotADirectoryError: ``output_dir`` is a file.
            ModuleNotFoundError: ``deepspeed=`` without the package.
            RuntimeError: several GPUs in one process, where stock would enter ``torch.nn.DataParallel`` and multiply
                the effective batch by their number; the message has the command to launch.
        """
        from transformers import TrainingArguments

        from hf_memopt.training.binding import refuse_data_parallel

        folder = None if output_dir is None else checked_path("output_dir", output_dir)
        if folder is not None and folder.exists() and not folder.is_dir():
            raise NotADirectoryError(
                f"output_dir={output_dir!r} is a file; expected a folder or a new path. Pass another output_dir"
            )
        self._prepare_allocator()
        arguments, changes = resolve_arguments(self, effective_batch_size, overrides)
        for change in changes:
            logger.info("%s: %s", self.name, change)
        made = TrainingArguments(output_dir=output_dir, **arguments)
        refuse_data_parallel(made.n_gpu)
        return made

    @property
    def trains_16_bits(self) -> bool:
        """Whether weights are trained that have 16 bits themselves, without a float32 copy."""
        return self.lora is None and self.weights_dtype != "float32"

    def model_kwargs(self, task: str | None = None) -> dict[str, Any]:
        """Return keywords for ``from_pretrained``: the weights' dtype (its own default is the checkpoint's), attention
        other than stock's own choice, and the ``BitsAndBytesConfig`` of ``load_in``.

        Args:
            task: of the head, such as ``"sequence-classification"``: where it is new, it is not quantised, so that it
                can be trained. None for a language model.

        Raises:
            ValueError: bfloat16 weights on a GPU that only emulates them; an unknown task.
        """
        from hf_memopt.prediction.recipes.model_setup import model_keywords

        self._prepare_allocator()
        return model_keywords(self, task)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return the model with the recipe's adapters, all else frozen, and what is trained in float32.

        The order is that of a QLoRA run: PEFT's ``get_peft_model``, then ``prepare_quantized`` in place of PEFT's
        ``prepare_model_for_kbit_training``; the Trainer switches checkpointing on afterwards. A model without ``lora``,
        or with adapters of its own, is returned as it is.

        Args:
            model: as ``from_pretrained(name, **recipe.model_kwargs())`` returned it. Changed in place.

        Raises:
            ValueError: ``lora_targets`` name no layer; the weights are not quantised though ``load_in`` says so, or
                the other way round; a new head is quantised.
            MissingExtraError: peft is not installed.
        """
        from hf_memopt.prediction.recipes.model_setup import prepared_model

        prepared, changes = prepared_model(self, model)
        for change in changes:
            logger.info("%s: %s", self.name, change)
        return prepared

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay until the step ends, so that they can be accumulated and clipped."""
        return not self.gradient_release

    def step_settings(self) -> StepSettings:
        """Return what of the recipe changes the bytes of a step, for ``estimate``; freezing by the same function."""
        from hf_memopt.prediction.memory.settings import StepSettings  # the presets are read without the estimate

        own = {item.name for item in fields(self)}
        shared = {item.name: getattr(self, item.name) for item in fields(StepSettings) if item.name in own}
        of_weights = "fp32" if self.trains_16_bits else "fp16" if self.weights_dtype == "float16" else "auto"
        accumulated = max(self.effective_batch_size // self.per_device_train_batch_size, 1)
        return StepSettings(
            **{
                **shared,
                "precision": of_weights if self.precision == "auto" else self.precision,
                "checkpointing": self.checkpointing and (self.checkpointing_options() or True),
                "max_grad_norm": 1.0 if self.accumulates else 0.0,
                "gradient_accumulation_steps": accumulated if self.accumulates else 1,
                "eval_batch_size": self.per_device_eval_batch_size,
            }
        )

    def checkpointing_options(self) -> dict[str, Any]:
        """Return the options of checkpointing, by their names in ``TrainingArguments``, that are not the default."""
        every = {} if self.every_n_layers == 1 else {"every_n_layers": self.every_n_layers}
        return {**every, **({"offload": True} if self.offload else {})}

    def _prepare_allocator(self) -> None:
        if self.expandable_segments:
            from hf_memopt.training.devices import accelerator_type
            from hf_memopt.training.techniques import use_expandable_segments

            if accelerator_type() == "cuda":
                use_expandable_segments()

    def callbacks(self) -> list[TrainerCallback]:
        """Return new callbacks for a Trainer that ``attach`` is called on: freezing, float32 weights and autocast's
        cache, 32-bit embeddings of an 8-bit optimizer, fp16's overflow, micro-batches after out of memory, the report.

        Micro-batches are left out beside something else of the recipe with which they do not work.
        """
        from hf_memopt.prediction.recipes.own_parts import callbacks_of

        return callbacks_of(self)

    def collator(self, tokenizer: Any, *, causal_lm: bool = False) -> BucketedCollator:
        """Return the collator that pads every batch to its own longest row, and labels the tokens of a causal LM."""
        from hf_memopt.training.batching.collation import BucketedCollator

        return BucketedCollator(tokenizer, causal_lm=causal_lm, pad_to_multiple_of=self.pad_to_multiple_of)

    def optimizer(self, args: TrainingArguments, model: nn.Module) -> tuple[Any, dict[str, Any]] | None:
        """Return what ``Trainer(optimizer_cls_and_kwargs=...)`` takes: of gradient release, of 16-bit weights, or None.

        Args:
            args: of ``training_arguments``.
            model: of ``prepare_model``.
        """
        from hf_memopt.prediction.recipes.own_parts import optimizer_of

        return optimizer_of(self, args, model)

    def __getattr__(self, name: str) -> Any:
        if name in _GONE:
            raise AttributeError(f"Recipe.{name} was removed after 0.5.0; {_GONE[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_GONE = {
    "trainer": "expected the lines that build a Trainer. Call: print(plan(model, gpu=...).script()), or see "
    "docs/getting-started.md",
    "distributed": "expected a launcher's own options. Call: torchrun --nproc_per_node=2 train.py; what it needs, "
    "hf-memopt rehearse --gpus 2 train.py tells",
}


# ---- Fields that contradict each other ------------------------------------------------------------------------------


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with fields of which each is valid by itself; a text begins with the one to change."""
    for name, default in (("lora_alpha", None), ("lora_targets", "auto")):
        if recipe.lora is None and (value := getattr(recipe, name)) != default:
            yield f"{name}={value!r}, lora=None add no adapters; expected their rank. Pass lora=16"
    refuse_without_adapters(recipe.load_in, recipe.lora)
    if recipe.quantize_experts and recipe.load_in != "nf4":
        yield (
            f"quantize_experts=True, load_in={recipe.load_in!r} do not fit each other: experts are put into 4 bits "
            "where linear layers are; expected both. Pass load_in='nf4', lora=16"
        )
    if recipe.lora_targets == ():
        yield "lora_targets=() names no layer; expected 'auto', or names of layers. Pass lora_targets='auto'"
    if recipe.weights_dtype == "float16" and recipe.lora is None:
        yield (
            "weights_dtype='float16', lora=None train float16 weights, whose gradients torch's scaler refuses; "
            "expected bfloat16 or float32 for weights that are trained. Pass weights_dtype='float32', or lora=16"
        )
    if recipe.rounding != "nearest" and not recipe.trains_16_bits:
        trained = "adapters, which are float32" if recipe.lora is not None else "float32 weights"
        yield (
            f"rounding={recipe.rounding!r} is for 16-bit weights, and this recipe trains {trained}; expected "
            f"'nearest'. Pass rounding='nearest', or weights_dtype='bfloat16', lora=None"
        )
    if recipe.offload and not recipe.checkpointing:
        yield (
            "offload=True, checkpointing=False offload nothing: what goes to the host are the inputs of checkpointed "
            "layers; expected checkpointing. Pass checkpointing=True"
        )
    if recipe.resident and not recipe.streamed:
        yield f"resident={recipe.resident}, streamed=False stream nothing; expected both. Pass streamed=True"
    if recipe.every_n_layers > 1 and not recipe.checkpointing:
        yield (
            f"every_n_layers={recipe.every_n_layers}, checkpointing=False recompute nothing; expected checkpointing. "
            "Pass checkpointing=True"
        )
    for name, (_, refusal) in refused_fields(recipe, recipe.precision).items():
        yield (
            f"{name}={getattr(recipe, name)!r}, precision={recipe.precision!r} are incompatible: {refusal.reason}; "
            "expected another precision. Pass precision='auto'"
        )
