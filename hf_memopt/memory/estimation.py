"""Estimate the memory of a training step before it runs: the real model code, on the meta device, without a card.

A step of the stock ``Trainer`` is recorded (``step``) with the allocations of CUDA (``cuda``, ``kernels``) and replayed
through torch's allocator (``replay``, ``allocator``) with the bytes of the optimizer (``optimizer_state``). No formula
per architecture, no weights, no card.

Left out, since no CPU can know it: workspaces of cuDNN's convolutions, what NCCL takes, other processes on the card.
What cannot be simulated raises ``NotEstimableError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_memopt import compat
from hf_memopt.gpus import Gpu, find_gpu, gpu_at_hand
from hf_memopt.memory.allocator import AllocationError, CachingAllocator
from hf_memopt.memory.chips import Chip
from hf_memopt.memory.kernels import workspace_bytes
from hf_memopt.memory.models import load_model
from hf_memopt.memory.optimizer_state import (
    OptimizerMemory,
    ParameterFacts,
    clipping_temporaries,
    memory_by_parameter,
    optimizer_memory,
)
from hf_memopt.memory.replay import Replayed, ReplayPlan, replay
from hf_memopt.memory.result import Estimate
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.step import StepTrace
from hf_memopt.memory.trace_cache import Recorded, Shape, recorded

if TYPE_CHECKING:
    import os

    from torch import nn
    from transformers import PretrainedConfig, TrainingArguments

__all__ = ["estimate", "estimate_from_arguments"]

_ASSUMED_CAPABILITY = (8, 0)


def estimate(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    *,
    batch_size: int,
    seq_len: int | None = None,
    recipe: Any = None,
    gpu: str | Gpu | None = None,
    task: str | None = None,
    labels_length: int | None = None,
    **overrides: Any,
) -> Estimate:
    """Return the memory of a training step of the stock ``Trainer`` on a card, without the card.

    Args:
        model: a module (real or meta), a configuration, a folder or hub id with ``config.json``, or a well-known name
            such as ``"bert-large-uncased"``. It is not changed, and none of its weights is read.
        batch_size: examples of one forward and backward pass (``per_device_train_batch_size``).
        seq_len: tokens of the longest row, padding included; None for models of images.
        recipe: anything with ``step_settings()``, such as ``hf_memopt.recipe("4gb-gpu")``.
        gpu: a name such as ``"RTX 3050 4GB"`` or a ``Gpu``; None for the card at hand. Without any card kernels are
            those of compute capability 8.0, precision is fp32 unless told, and the context is unknown.
        task: the head to build where ``model`` is no module; the configuration's own, or the usual one, unless given.
        labels_length: tokens of the targets of an encoder-decoder; ``seq_len`` unless given.
        overrides: fields of ``StepSettings``, over those of the recipe.

    Repeated calls with the same model reuse what was recorded as far as it is the same: another optimizer, another
    accumulation cost a replay only.

    Raises:
        ValueError: an unknown model, card or setting; a batch or length below 1 or beyond the model's positions;
            settings that contradict each other.
        NotEstimableError: this set-up cannot be simulated; the message says why.
        TypeError: an override that is no field of ``StepSettings``; ``recipe`` is not a recipe.

    Example:
        >>> found = estimate("bert-base-uncased", batch_size=8, seq_len=128, gpu="RTX 3060 12GB", precision="fp32")
        >>> found.fits, found.phase
        (True, 'backward')
    """
    card = gpu_at_hand() if gpu is None else find_gpu(gpu)
    settings = _settings(recipe, card, overrides)
    loaded = load_model(
        model, attn_implementation=settings.attn_implementation, weights_dtype=settings.weights_dtype, task=task
    )
    chip = Chip.of(_ASSUMED_CAPABILITY) if card is None else Chip.of(card.compute_capability, card.multiprocessors)
    step = recorded(loaded, settings, Shape(batch_size, seq_len, labels_length), chip)
    optimizer = _optimizer(step.trainable, settings)
    plan = _replay_plan(step, settings, optimizer, batch_size, chip)
    replayed, retries = _replayed(step.trace, plan, settings, card)
    return Estimate(
        model=loaded.name,
        batch_size=batch_size,
        seq_len=seq_len,
        settings=settings,
        gpu=card,
        peak_allocated_bytes=replayed.peak_allocated,
        peak_reserved_bytes=replayed.peak_reserved,
        context_bytes=None if card is None else card.context_bytes,
        components=replayed.components,
        phase=replayed.phase,
        module=replayed.module,
        host_bytes=step.trace.host_bytes + optimizer.host_state_bytes,
        parameters=step.parameters,
        trainable_parameters=sum(fact.elements for fact in step.trainable),
        flops=step.trace.flops[0] * plan.batches * plan.pieces,
        timeline=replayed.timeline,
        notes=(*_notes(card, settings, retries), *step.notes, *optimizer.notes),
    )


def estimate_from_arguments(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    args: TrainingArguments,
    lengths: int | Sequence[int] | np.ndarray | None,
    *,
    gpu: str | Gpu | None = None,
    **overrides: Any,
) -> Estimate:
    """Return the memory of a training step as existing ``TrainingArguments`` describe it.

    Args:
        model: as for ``estimate``.
        args: read, not changed. Evaluation counts where ``eval_strategy`` is not ``"no"``, with one batch unless
            ``eval_batches=`` says how many gather on the card.
        lengths: tokens of the examples, such as ``token_lengths(dataset)``, or of the longest; None for images.
        gpu: as for ``estimate``.
        overrides: fields of ``StepSettings`` that the arguments do not tell; ``task`` and ``labels_length``.

    Raises:
        NotEstimableError: the arguments ask for what is not simulated: compilation, Liger kernels, sharding, NEFTune.
        ValueError, TypeError: as ``estimate`` does; ``lengths`` is empty.
    """
    _refuse_arguments(args)
    longest = None
    if lengths is not None:
        values = np.atleast_1d(np.asarray(lengths))
        if not values.size:
            raise ValueError(
                f"lengths={lengths!r} is empty; expected the tokens of at least one example. "
                "Pass lengths=token_lengths(dataset)"
            )
        longest = int(values.max())
    of_model = {name: overrides.pop(name) for name in ("task", "labels_length") if name in overrides}
    settings = _settings_of_arguments(args).replace(**overrides)
    return estimate(
        model,
        batch_size=args.per_device_train_batch_size,
        seq_len=longest,
        gpu=gpu,
        **of_model,
        **{item.name: getattr(settings, item.name) for item in fields(settings)},
    )


# ---- Settings -------------------------------------------------------------------------------------------------------


def _settings(recipe: Any, gpu: Gpu | None, overrides: Mapping[str, Any]) -> StepSettings:
    """Return the settings of a recipe with the overrides, and a precision that is not "auto"."""
    if recipe is None:
        settings = StepSettings()
    elif hasattr(recipe, "step_settings"):
        settings = recipe.step_settings()
    else:
        raise TypeError(
            f"recipe={recipe!r} is not a recipe; expected an object with step_settings(). "
            "Pass recipe=hf_memopt.recipe('4gb-gpu')"
        )
    settings = settings.replace(**overrides)
    if settings.precision != "auto":
        return settings
    native = "fp32" if gpu is None else "bf16" if gpu.bf16 else "fp16"
    return settings.replace(precision=native)


_REFUSED = {
    "torch_compile": "what the compiler fuses and saves is decided on the card",
    "use_liger_kernel": "its Triton kernels do not run without a card",
    "deepspeed": "sharding over processes is not simulated",
    "fsdp": "sharding over processes is not simulated",
    "neftune_noise_alpha": "its noise on the embeddings is not simulated",
}


def _refuse_arguments(args: TrainingArguments) -> None:
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise NotEstimableError(f"not estimable: {name}={value!r}: {reason}")


def _settings_of_arguments(args: TrainingArguments) -> StepSettings:
    checkpointing, options = compat.checkpointing_of(args)
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
        eval_batch_size=None if args.eval_strategy == "no" else args.per_device_eval_batch_size,
        prediction_loss_only=args.prediction_loss_only,
        eval_accumulation_steps=args.eval_accumulation_steps,
        torch_empty_cache_steps=args.torch_empty_cache_steps,
    )


def _notes(gpu: Gpu | None, settings: StepSettings, retries: int) -> tuple[str, ...]:
    notes = []
    if gpu is None:
        notes.append("no card named: kernels of compute capability 8.0, and the context is not in the total")
    elif gpu.context_bytes is None:
        notes.append(f"the size of the CUDA context on {gpu.name} is unknown and not in the total")
    if retries:
        notes.append(
            f"it fits because the allocator gives unused blocks back to the driver {retries} time(s) in three steps, "
            f"which costs time; {compat.allocator_variable()}=expandable_segments:True may avoid it"
        )
    if settings.eval_batch_size is None:
        notes.append("evaluation not included: give eval_batch_size")
    return tuple(notes)


# ---- The replay -----------------------------------------------------------------------------------------------------


def _replayed(trace: StepTrace, plan: ReplayPlan, settings: StepSettings, gpu: Gpu | None) -> tuple[Replayed, int]:
    """Return the replay, and how often the allocator had to empty its cache to stay within the card.

    Where even that does not help, the run would end in an out-of-memory error: then the replay goes on without a limit,
    to tell how much it would have needed.
    """
    if gpu is not None:
        limit_bytes = max(gpu.usable_bytes - (gpu.context_bytes or 0), 0)
        allocator = CachingAllocator(expandable_segments=settings.expandable_segments, limit_bytes=limit_bytes)
        try:
            return replay(trace, plan, allocator), allocator.retries
        except AllocationError:
            pass
    return replay(trace, plan, CachingAllocator(expandable_segments=settings.expandable_segments)), 0


def _optimizer(facts: tuple[ParameterFacts, ...], settings: StepSettings) -> OptimizerMemory:
    return optimizer_memory(
        facts, settings.optim, gradient_release=settings.gradient_release, **_optimizer_options(settings)
    )


def _optimizer_options(settings: StepSettings) -> dict[str, Any]:
    return {
        "optim_args": settings.optim_args,
        "target_modules": settings.optim_target_modules,
        "embedding_bits": settings.embedding_bits,
        "weight_decay": settings.weight_decay,
    }


def _replay_plan(
    step: Recorded, settings: StepSettings, optimizer: OptimizerMemory, batch_size: int, chip: Chip
) -> ReplayPlan:
    releases = optimizer.releases_gradients
    alone = None
    if releases:
        alone = memory_by_parameter(step.trainable, settings.optim, **_optimizer_options(settings))
    clips = settings.max_grad_norm > 0 and not releases
    gathered = settings.eval_batches if settings.eval_batch_size is not None else 0
    if settings.eval_accumulation_steps is not None:
        gathered = min(gathered, settings.eval_accumulation_steps)
    return ReplayPlan(
        optimizer=optimizer if alone is None else alone,
        clipping=clipping_temporaries(step.trainable) if clips else (),
        batches=settings.gradient_accumulation_steps,
        pieces=-(-batch_size // (settings.micro_batch_size or batch_size)),
        workspaces=workspace_bytes(chip.capability),
        eval_batches=gathered,
        empty_cache_steps=settings.torch_empty_cache_steps,
    )
