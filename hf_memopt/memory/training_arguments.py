"""Read ``StepSettings`` from existing ``TrainingArguments``, and refuse arguments that are not simulated."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hf_memopt.binding import versions as compat
from hf_memopt.memory.argument_spellings import REFUSED
from hf_memopt.memory.settings import NotEstimableError, StepSettings

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["notes_of_arguments", "refuse_arguments", "settings_of_arguments"]


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ``NotEstimableError`` for the first argument that asks for something that is not simulated."""
    for name, reason in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise NotEstimableError(f"not estimable: {name}={value!r}: {reason}")


def settings_of_arguments(args: TrainingArguments) -> StepSettings:
    """Return the settings that affect the memory of a step."""
    checkpointing, options = compat.checkpointing_of(args)
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "tf32" if args.tf32 else "fp32"
    return StepSettings(
        precision=precision,
        optim=str(getattr(args.optim, "value", args.optim)),
        optim_args=args.optim_args,
        optim_target_modules=args.optim_target_modules,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        checkpointing=checkpointing and (options or True),
        label_smoothing_factor=args.label_smoothing_factor,
        eval_batch_size=args.per_device_eval_batch_size if evaluates else None,
        prediction_loss_only=args.prediction_loss_only,
        eval_accumulation_steps=args.eval_accumulation_steps,
        eval_do_concat_batches=args.eval_do_concat_batches,
        batch_eval_metrics=args.batch_eval_metrics,
        torch_empty_cache_steps=args.torch_empty_cache_steps,
        **_generation(args),
    )


def _generation(args: TrainingArguments) -> dict[str, Any]:
    """Return what ``Seq2SeqTrainingArguments`` say about generation in evaluation."""
    if not getattr(args, "predict_with_generate", False):
        return {}
    config = getattr(args, "generation_config", None)
    if isinstance(config, str | os.PathLike):
        raise NotEstimableError(
            f"not estimable: generation_config={os.fspath(config)!r} is not read; expected a GenerationConfig or None. "
            "Pass GenerationConfig.from_pretrained(path)"
        )
    return {
        "predict_with_generate": True,
        "generation_max_length": getattr(args, "generation_max_length", None) or getattr(config, "max_length", None),
        "generation_num_beams": getattr(args, "generation_num_beams", None) or getattr(config, "num_beams", None),
    }


def notes_of_arguments(args: TrainingArguments) -> tuple[str, ...]:
    """Return notes about arguments that have no effect here, though a reader may expect one."""
    name = "bf16_full_eval" if args.bf16_full_eval else "fp16_full_eval" if args.fp16_full_eval else None
    if name is None:
        return ()
    return (
        f"{name} changes nothing while training: the Trainer casts the weights only in an evaluate() outside train()",
    )
