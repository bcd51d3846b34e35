"""A Recipe: the values that name a set-up of the stock ``Trainer``, each with its reason, and what is built from
them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from hf_memopt.binding import versions
from hf_memopt.binding.conflicts import refusals_of
from hf_memopt.changes import Change, record_changes
from hf_memopt.errors import did_you_mean
from hf_memopt.memory.settings import StepSettings
from hf_memopt.plain_data import Count, CountOrZero, check_fields, from_object, parse_object, shown
from hf_memopt.recipes.effective_batch import cut_effective_batch

# What a recipe turns into needs torch and transformers, and is imported there: the presets are read without them.
if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_memopt.batching.collation.collators import BucketedCollator

__all__ = ["Recipe"]

logger = logging.getLogger(__name__)

PRECISION_REASON = "follows the GPU: bf16 where it is native, else fp16 with fp32 weights, else fp32"


@dataclass(frozen=True)
class Recipe:
    """A set-up of the stock Trainer as plain data; ``print`` shows every choice with its reason.

    Attributes:
        name: what the recipe is called.
        purpose: the GPU and the size of model it is meant for, and which of its figures were measured.
        effective_batch_size: examples per optimizer step, over accumulation and processes; it stays what it is whatever
            the batch is cut into.
        per_device_train_batch_size: examples of one forward and backward pass.
        per_device_eval_batch_size: examples of one evaluation batch.
        precision: ``"auto"``, ``"bf16"``, ``"fp16"`` or ``"fp32"`` of the autocast region; weights stay float32.
        optim: a name that ``TrainingArguments(optim=...)`` knows.
        embedding_bits: bits of the embeddings' state in an 8-bit optimizer; ignored with any other.
        checkpointing: whether activations are recomputed instead of kept.
        bucketing: whether the training data is read in length-bucketed order.
        pad_to_multiple_of: what the longest row of a batch is rounded up to.
        freeze: patterns for ``hf_memopt.freeze``.
        attn_implementation: for ``from_pretrained``.
        eval_accumulation_steps: evaluation batches whose outputs stay on the GPU before they move to the host; None
            for all of them.
        dataloader_num_workers: processes that prepare batches.
        autocast_cache: whether autocast keeps the 16-bit copy of each weight through a forward pass.
        micro_batching: whether a batch that runs out of memory is cut into micro-batches and run again.
        memory_report: whether the log has the memory of each phase.
        reasons: why a field has its value, by the field's name.
    """

    name: str
    purpose: str
    effective_batch_size: Count = 32
    per_device_train_batch_size: Count = 32
    per_device_eval_batch_size: Count = 32
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    optim: str = "adamw_torch_fused"
    embedding_bits: Literal[32] = 32
    checkpointing: bool = False
    bucketing: bool = True
    pad_to_multiple_of: Count = 8
    freeze: tuple[str, ...] = ()
    attn_implementation: str = "sdpa"
    eval_accumulation_steps: Count | None = None
    dataloader_num_workers: CountOrZero = 0
    autocast_cache: bool = True
    micro_batching: bool = True
    memory_report: bool = True
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        patterns: Any = self.freeze
        if isinstance(patterns, list):  # JSON has no tuples
            object.__setattr__(self, "freeze", tuple(patterns))
        check_fields(self)

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

    def __str__(self) -> str:
        shown = [item.name for item in fields(self) if item.name not in ("name", "purpose", "reasons")]
        width = max(map(len, shown))
        lines = [f"{self.name}: {self.purpose}"]
        for name in shown:
            lines.append(f"  {name:<{width}}  {getattr(self, name)!r:<20}  {self._reason(name)}")
        return "\n".join(lines)

    def _reason(self, name: str) -> str:
        default = next(item.default for item in fields(self) if item.name == name)
        why = self.reasons.get(name)
        if why is None:
            why = DEFAULT_REASONS[name] if getattr(self, name) == default else "chosen by the caller"
        return why

    def to_json(self) -> str:
        """Return the recipe as JSON text, for ``from_json``."""
        return json.dumps({**asdict(self), "reasons": dict(self.reasons)}, indent=2)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """Return the recipe that ``to_json`` wrote.

        Raises:
            ValueError: the text is not a JSON object, a field is unknown or missing, or its value does not fit.
        """
        try:
            values = parse_object(text)
        except ValueError as error:
            raise ValueError(
                f"text={shown(text)} is not a recipe ({error}); expected what Recipe.to_json() returns. "
                "Write it anew: recipe('4gb-gpu').to_json()"
            ) from None
        return from_object(Recipe, values)

    # ---- What it turns into -----------------------------------------------------------------------------------------

    def changes(self, *, effective_batch_size: int | None = None, **training_arguments: Any) -> tuple[Change, ...]:
        """Return what ``training_arguments`` with the same overrides would decide by itself, each with its reason."""
        return self._resolve(effective_batch_size, training_arguments)[1]

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
        """
        from transformers import TrainingArguments

        if output_dir is not None and os.path.exists(output_dir) and not os.path.isdir(output_dir):
            raise NotADirectoryError(
                f"output_dir={output_dir!r} is a file; expected a folder or a new path. Pass another output_dir"
            )
        arguments, changes = self._resolve(effective_batch_size, overrides)
        for change in changes:
            logger.info("%s: %s", self.name, change)
        return TrainingArguments(output_dir=output_dir, **arguments)

    def _resolve(
        self, effective_batch_size: int | None, overrides: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[Change, ...]]:
        _check_names(overrides)
        use_cpu = bool(overrides.get("use_cpu", False))
        from hf_memopt.devices.precision_support import accelerator_type

        on_cpu = use_cpu or accelerator_type() == "cpu"
        arguments: dict[str, Any] = {
            "per_device_eval_batch_size": self.per_device_eval_batch_size,
            "optim": self.optim,
            "eval_accumulation_steps": self.eval_accumulation_steps,
            "dataloader_num_workers": self.dataloader_num_workers,
        }
        changes = []
        if self.checkpointing and not any(name.endswith("_checkpointing") for name in overrides):
            arguments.update(versions.checkpointing_arguments())
        if on_cpu and "dataloader_pin_memory" not in overrides:
            arguments["dataloader_pin_memory"] = False
            changes.append(Change("dataloader_pin_memory", True, False, "there is no accelerator to copy to"))
        precision, why = self._precision(overrides, use_cpu)
        arguments.update(precision)
        if why is not None:
            changes.append(why)
        preferred = self.per_device_train_batch_size, self.effective_batch_size // self.per_device_train_batch_size
        effective = self.effective_batch_size if effective_batch_size is None else effective_batch_size
        batch, why = cut_effective_batch(effective, preferred, overrides)
        arguments.update(batch)
        if why is not None:
            changes.append(why)
        if on_cpu and arguments.get("bf16") and "use_cpu" not in overrides:
            arguments["use_cpu"] = True  # stock asks for it where bf16 runs on a CPU
        return {**arguments, **overrides, **batch}, tuple(changes)

    def _precision(self, overrides: Mapping[str, Any], use_cpu: bool) -> tuple[dict[str, bool], Change | None]:
        from hf_memopt.devices.precision_support import check_precision, choose_precision

        if "bf16" in overrides or "fp16" in overrides:
            asked = {"bf16": bool(overrides.get("bf16", False)), "fp16": bool(overrides.get("fp16", False))}
            check_precision(**asked, use_cpu=use_cpu)
            return asked, None
        if self.precision != "auto":
            asked = {"bf16": self.precision == "bf16", "fp16": self.precision == "fp16"}
            check_precision(**asked, use_cpu=use_cpu)
            return asked, None
        chosen = choose_precision(use_cpu=use_cpu)
        return {"bf16": chosen.bf16, "fp16": chosen.fp16}, Change("precision", "auto", chosen.name, chosen.reason)

    def model_kwargs(self) -> dict[str, Any]:
        """Return keywords for ``from_pretrained``: float32 weights (its own default is the checkpoint's dtype) and
        attention.
        """
        import torch

        return {"dtype": torch.float32, "attn_implementation": self.attn_implementation}

    def step_settings(self) -> StepSettings:
        """Return what of the recipe changes the bytes of a step, for ``estimate``; freezing by the same function."""
        return StepSettings(
            precision=self.precision,
            optim=self.optim,
            embedding_bits=self.embedding_bits,
            gradient_accumulation_steps=max(self.effective_batch_size // self.per_device_train_batch_size, 1),
            autocast_cache=self.autocast_cache,
            checkpointing=self.checkpointing,
            attn_implementation=self.attn_implementation,
            eval_batch_size=self.per_device_eval_batch_size,
            eval_accumulation_steps=self.eval_accumulation_steps,
            freeze=self.freeze,
        )

    def callbacks(self) -> list[TrainerCallback]:
        """Return new callbacks for a Trainer that ``attach`` is called on: freezing, float32 weights and autocast's
        cache, 32-bit embeddings of an 8-bit optimizer, micro-batches after out of memory, the memory report.
        """
        return self._callbacks(self.optim)

    def _callbacks(self, optim: str) -> list[TrainerCallback]:
        from hf_memopt.memory.report import MemoryReportCallback
        from hf_memopt.techniques.freezing.freezing import FreezeCallback
        from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback
        from hf_memopt.techniques.optimizers.embedding_bits import EmbeddingBitsCallback
        from hf_memopt.techniques.precision import PrecisionCallback

        wanted: list[TrainerCallback] = []
        if self.freeze:
            wanted.append(FreezeCallback(self.freeze))
        wanted.append(PrecisionCallback(autocast_cache=self.autocast_cache))
        if optim in BITSANDBYTES_8BIT:
            wanted.append(EmbeddingBitsCallback())
        if self.micro_batching:
            wanted.append(MicrobatchCallback())
        if self.memory_report:
            wanted.append(MemoryReportCallback())
        return wanted

    def collator(self, tokenizer: Any) -> BucketedCollator:
        """Return the collator that pads every batch to its own longest row."""
        from hf_memopt.batching.collation.collators import BucketedCollator

        return BucketedCollator(tokenizer, pad_to_multiple_of=self.pad_to_multiple_of)

    def trainer(
        self,
        *,
        model: Any = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        training_arguments: Mapping[str, Any] | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        **trainer_kwargs: Any,
    ) -> Trainer:
        """Return a stock ``transformers.Trainer`` with everything wired: arguments, bucketed data, collator, callbacks.

        Args:
            model: as for Trainer; or ``model_init=`` among the other keywords.
            train_dataset: tokenised examples, read in bucketed order; ``eval_dataset=`` among the other keywords is
                read sorted by length, with the results in its own order.
            processing_class: the tokenizer; not needed if ``data_collator=`` is given.
            training_arguments: fields of TrainingArguments, and ``effective_batch_size``.
            callbacks: yours, after the recipe's.
            trainer_kwargs: anything else that Trainer takes.

        Raises:
            TypeError, ValueError: see ``training_arguments``, ``bucketed`` and ``attach``.
        """
        from transformers import Trainer

        from hf_memopt.binding.attach import attach
        from hf_memopt.recipes.data_views import evaluation_view, training_view, view_arguments

        callbacks = tuple(callbacks)
        if training_arguments is not None and not isinstance(training_arguments, Mapping):
            raise TypeError(
                f"training_arguments=<{type(training_arguments).__name__}> is not a mapping; expected a dict of "
                "fields. "
                'Pass training_arguments={"output_dir": "out", "learning_rate": 3e-5}'
            )
        if processing_class is None and "data_collator" not in trainer_kwargs:
            raise ValueError(
                "processing_class=None leaves nothing to pad with; expected the tokenizer. Pass "
                "processing_class=tokenizer, or data_collator=..."
            )
        given = dict(training_arguments or {})
        if self.bucketing:
            given = view_arguments(self.name, train_dataset, given)
        args = self.training_arguments(**given)
        if self.bucketing:
            batch = {"batch_size": args.per_device_train_batch_size, "pad_to_multiple_of": self.pad_to_multiple_of}
            train_dataset = training_view(self.name, train_dataset, **batch)
            trainer_kwargs["eval_dataset"] = evaluation_view(self.name, trainer_kwargs.get("eval_dataset"), args)
        trainer_kwargs.setdefault("data_collator", None)
        if trainer_kwargs["data_collator"] is None:
            trainer_kwargs["data_collator"] = self.collator(processing_class)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            processing_class=processing_class,
            callbacks=[*self._callbacks(args.optim), *callbacks],
            **trainer_kwargs,
        )
        self._remove_refused_callbacks(trainer, kept=callbacks)
        return attach(trainer)

    def _remove_refused_callbacks(self, trainer: Trainer, kept: Iterable[TrainerCallback]) -> None:
        """Remove the recipe's own callbacks that are incompatible with what the caller asked for."""
        for refusal in refusals_of(trainer):
            for callback in tuple(trainer.callback_handler.callbacks):
                name = getattr(callback, "technique", None)
                if name in (refusal.one, refusal.other) and not any(callback is own for own in kept):
                    trainer.remove_callback(callback)
                    other = refusal.other if name == refusal.one else refusal.one
                    change = Change(name, True, False, f"incompatible with {other}: {refusal.reason}")
                    logger.info("%s: %s", self.name, change)
                    record_changes(trainer, (change,))


BITSANDBYTES_8BIT = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "paged_lion_8bit",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "rmsprop_bnb_8bit",
)
"""The names of ``TrainingArguments(optim=...)`` whose state bitsandbytes keeps in 8 bits."""

DEFAULT_REASONS = {
    "effective_batch_size": "examples per optimizer step; never changed by a small GPU",
    "per_device_train_batch_size": "the whole effective batch at once is fastest where it fits",
    "per_device_eval_batch_size": "evaluation keeps no activations",
    "precision": PRECISION_REASON,
    "optim": "one fused kernel; nothing cheaper in time",
    "embedding_bits": "gradients of rare and frequent tokens differ too much for 8 bits (arXiv 2110.02861)",
    "checkpointing": "recomputing costs one more forward pass per step",
    "bucketing": "batches of like lengths pad little",
    "pad_to_multiple_of": "tensor cores like multiples of 8",
    "freeze": "nothing is frozen unless asked for",
    "attn_implementation": "no attention matrix is kept",
    "eval_accumulation_steps": "logits stay on the GPU until evaluation ends",
    "dataloader_num_workers": "padding from Arrow is cheap beside a training step",
    "autocast_cache": "a weight is cast once per pass",
    "micro_batching": "a batch that is too large is cut, and the step repeated, instead of the run lost",
    "memory_report": "the log has the peak of each phase",
}


def _check_names(overrides: Mapping[str, Any]) -> None:
    known = versions.training_argument_names()
    for name in overrides:
        if name in known:
            continue
        if name in versions.RENAMED_ARGUMENTS:
            raise TypeError(
                f"{name}={overrides[name]!r} is a name of transformers 4.x; expected a field of TrainingArguments 5.x. "
                f"Instead: {versions.RENAMED_ARGUMENTS[name]}"
            )
        raise TypeError(
            f"{name}={overrides[name]!r} is not a field of TrainingArguments; expected one of its fields."
            f"{did_you_mean(name, known)} List them: help(transformers.TrainingArguments)"
        )
