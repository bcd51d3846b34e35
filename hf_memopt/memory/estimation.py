"""Estimate the GPU memory of a training step before it runs, from the real model code on the meta device.

A step of the stock ``Trainer`` is recorded (``recording``) with the allocations of CUDA (``cuda``) and replayed through
torch's allocator (``allocator``) together with the bytes of the optimizer (``optimizers``). It needs no formula per
architecture, no weights and no GPU.

Limitations: without what only a GPU shows (workspaces of cuDNN's convolutions, memory of NCCL, other processes).
What cannot be simulated raises ``NotEstimableError``; ``estimate`` lists it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_memopt.binding import versions as compat
from hf_memopt.devices.gpus import Gpu, current_gpu, find_gpu
from hf_memopt.memory.allocator.caching_allocator import AllocationError, CachingAllocator
from hf_memopt.memory.allocator.replay import Replayed, ReplayPlan, replay
from hf_memopt.memory.cuda.chip import Chip
from hf_memopt.memory.cuda.kernel_buffers import workspace_bytes
from hf_memopt.memory.models.loading import load_model
from hf_memopt.memory.optimizers.optimizer_memory import (
    OptimizerMemory,
    ParameterFacts,
    clipping_temporaries,
    memory_by_parameter,
    optimizer_memory,
)
from hf_memopt.memory.recording.step import StepTrace
from hf_memopt.memory.recording.trace_cache import RecordedStep, Shape, record_or_reuse
from hf_memopt.memory.result import Estimate
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.training_arguments import notes_of_arguments, refuse_arguments, settings_of_arguments

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
    """Return the memory that a training step of the stock ``Trainer`` needs on a GPU, without the GPU.

    Args:
        model: a module (real or meta), a configuration, a folder or hub id with ``config.json``, or a well-known name
            such as ``"bert-large-uncased"``. It is not changed, and its weights are not read.
        batch_size: examples of one forward and backward pass (``per_device_train_batch_size``).
        seq_len: tokens of the longest row, padding included; None for models of images.
        recipe: anything with ``step_settings()``, such as ``hf_memopt.recipe("4gb-gpu")``.
        gpu: a name such as ``"RTX 3050 4GB"`` or a ``Gpu``; None for the current CUDA device. Without one the kernels
            are those of compute capability 8.0, precision "auto" is fp32, and the context is unknown.
        task: the head to build where ``model`` is not a module; by default the configuration's own, or the usual one.
        labels_length: tokens of the targets of an encoder-decoder; ``seq_len`` unless given.
        overrides: fields of ``StepSettings``; they replace those of the recipe.

    Repeated calls with the same model reuse the recorded step where it is the same: for another optimizer or another
    accumulation only the replay runs again. A module, and a step with ``prepare``, are recorded at every call.

    Limitations: compiled models, Triton kernels (Liger), FlashAttention-3 and other kernels that are not installed,
    recurrent layers, models whose code reads values from the GPU (the outcome of a router, an early exit), weights
    quantised by anything but bitsandbytes, sharding over processes, and optimizers whose state is unknown.

    Raises:
        ValueError: an unknown model, GPU or setting; a batch or length below 1 or beyond the model's positions;
            settings that contradict each other or the given module, or that stop a real run at its first steps.
        NotEstimableError: this set-up cannot be simulated; the message says why.
        TypeError: an override is not a field of ``StepSettings``; ``recipe`` is not a recipe.

    Example:
        >>> found = estimate("bert-base-uncased", batch_size=8, seq_len=128, gpu="RTX 3060 12GB", precision="fp32")
        >>> found.fits, found.phase
        (True, 'backward')
    """
    found_gpu = current_gpu() if gpu is None else find_gpu(gpu)
    settings = _settings(recipe, overrides)
    shape = Shape(batch_size, seq_len, labels_length)
    return _estimate(model, shape, settings, found_gpu, task=task, weights_dtype=overrides.get("weights_dtype"))


def estimate_from_arguments(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    args: TrainingArguments,
    lengths: int | Sequence[int] | np.ndarray | None,
    *,
    gpu: str | Gpu | None = None,
    **overrides: Any,
) -> Estimate:
    """Return the memory of a training step that existing ``TrainingArguments`` describe.

    Args:
        model: as for ``estimate``.
        args: not changed. Evaluation is included where ``eval_strategy`` is not ``"no"`` or ``eval_on_start`` is set,
            with one batch unless ``eval_batches=`` gives their number.
        lengths: tokens of the examples, such as ``token_lengths(dataset)``, or of the longest; None for images.
        gpu: as for ``estimate``.
        overrides: fields of ``StepSettings`` that the arguments do not have; ``task`` and ``labels_length``.

    Raises:
        NotEstimableError: the arguments ask for something that is not simulated: compilation, Liger kernels, sharding,
            NEFTune, a key-value cache in training, metrics that get the inputs.
        ValueError, TypeError: as ``estimate`` does; ``lengths`` is empty.
    """
    refuse_arguments(args)
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
    found_gpu = current_gpu() if gpu is None else find_gpu(gpu)
    settings = settings_of_arguments(args).replace(**overrides)
    if settings.eval_batch_size is not None and "inputs" in args.include_for_metrics:
        raise NotEstimableError(
            f"not estimable: include_for_metrics={args.include_for_metrics!r}: inputs that are gathered on the GPU "
            "besides the logits are not simulated"
        )
    shape = Shape(args.per_device_train_batch_size, longest, of_model.pop("labels_length", None))
    found = _estimate(model, shape, settings, found_gpu, **of_model, weights_dtype=overrides.get("weights_dtype"))
    return replace(found, notes=(*found.notes, *notes_of_arguments(args)))


def _estimate(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    shape: Shape,
    settings: StepSettings,
    gpu: Gpu | None,
    *,
    task: str | None = None,
    weights_dtype: str | None = None,
) -> Estimate:
    """Return the estimate; ``weights_dtype`` is the caller's, None where the settings have the default."""
    settings = _with_precision(settings, gpu)
    chip = Chip.of(_ASSUMED_CAPABILITY) if gpu is None else Chip.of(gpu.compute_capability, gpu.multiprocessors)
    with torch.inference_mode(False):  # weights created in the caller's inference mode could not be trained
        loaded = load_model(
            model,
            attn_implementation=settings.attn_implementation,
            weights_dtype=settings.weights_dtype,
            task=task,
            keep_cache=settings.loop == "manual",
        )
        if loaded.key is None:
            settings = settings.replace(weights_dtype=_own_dtype(loaded.model, weights_dtype))
        step = record_or_reuse(loaded, settings, shape, chip)
    optimizer = _optimizer(step.trainable, settings)
    plan = _replay_plan(step, settings, optimizer, shape.batch_size, chip)
    replayed = _replayed(step.trace, plan, settings, gpu)
    return Estimate(
        model=loaded.name,
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        settings=settings,
        gpu=gpu,
        peak_allocated_bytes=replayed.peak_allocated,
        peak_reserved_bytes=replayed.peak_reserved,
        context_bytes=None if gpu is None else gpu.context_bytes,
        components=replayed.components,
        phase=replayed.phase,
        module=replayed.module,
        host_bytes=step.trace.host_bytes + optimizer.host_state_bytes,
        parameters=step.parameters,
        trainable_parameters=sum(fact.elements for fact in step.trainable),
        flops=step.trace.flops[0] * plan.batches * plan.micro_batches,
        timeline=replayed.timeline,
        notes=(*_notes(gpu, settings, replayed), *step.notes, *optimizer.notes),
    )


# ---- Settings -------------------------------------------------------------------------------------------------------


def _settings(recipe: Any, overrides: Mapping[str, Any]) -> StepSettings:
    """Return the settings of a recipe with the overrides."""
    if recipe is None:
        settings = StepSettings()
    elif hasattr(recipe, "step_settings"):
        settings = recipe.step_settings()
    else:
        raise TypeError(
            f"recipe={recipe!r} is not a recipe; expected an object with step_settings(). "
            "Pass recipe=hf_memopt.recipe('4gb-gpu')"
        )
    return settings.replace(**overrides)


def _with_precision(settings: StepSettings, gpu: Gpu | None) -> StepSettings:
    if settings.precision != "auto":
        return settings
    native = "fp32" if gpu is None else "bf16" if gpu.bf16 else "fp16"
    return settings.replace(precision=native)


def _own_dtype(model: nn.Module, asked: str | None) -> str:
    """Return the dtype of a module's weights, of mixed ones the dtype that most bytes have.

    Raises:
        ValueError: the caller asked for another one.
    """
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name = str(parameter.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + parameter.nbytes
    own = max(sizes, key=lambda name: sizes[name], default="float32")
    if asked is not None and asked != own:
        raise ValueError(
            f"weights_dtype={asked!r} is not that of the given module, whose weights are {own}; expected {own!r}. "
            f"Call: model.to(torch.{asked})"
        )
    return own


def _notes(gpu: Gpu | None, settings: StepSettings, replayed: Replayed) -> tuple[str, ...]:
    notes = []
    if gpu is None:
        notes.append("no GPU given: kernels of compute capability 8.0, and the context is not in the total")
    elif gpu.context_bytes is None:
        notes.append(f"the size of the CUDA context on {gpu.name} is unknown and not in the total")
    places = zip(replayed.retries, ("three steps", "the evaluation"), strict=True)
    retries = [f"{count} time(s) in {place}" for count, place in places if count]
    if retries:
        variable = f"; {compat.allocator_variable()}=expandable_segments:True may avoid it"
        avoid = "" if settings.expandable_segments else variable
        fits = gpu is not None and replayed.peak_reserved + (gpu.context_bytes or 0) <= gpu.usable_bytes
        notes.append(
            f"{'it fits' if fits else 'this total is enough'} because the allocator returns unused blocks to the "
            f"driver {' and '.join(retries)}, which costs time{avoid}"
        )
    if settings.eval_batch_size is None:
        notes.append("evaluation not included: give eval_batch_size")
    return tuple(notes)


# ---- The replay -----------------------------------------------------------------------------------------------------


def _replayed(trace: StepTrace, plan: ReplayPlan, settings: StepSettings, gpu: Gpu | None) -> Replayed:
    """Return the replay on a GPU of this size: at its limit the allocator empties its cache.

    Where even that does not help, the run would end in an out-of-memory error. Then the limit grows until the replay
    ends, from what the tensors hold at their peak in steps of 5 %. Without a limit the allocator would keep every block
    that it ever had, and the estimate would be a multiple of what the run needs.
    """
    limit_bytes = None if gpu is None else max(gpu.usable_bytes - (gpu.context_bytes or 0), 0)
    found = _replayed_within(limit_bytes, trace, plan, settings)
    if found is not None:
        return found
    unlimited = _replayed_within(None, trace, plan, settings)
    assert unlimited is not None  # an allocator without a limit does not fail
    larger_bytes = max(unlimited.peak_allocated, limit_bytes or 0)
    while larger_bytes < unlimited.peak_reserved:
        larger_bytes += larger_bytes // 20 + 1
        found = _replayed_within(larger_bytes, trace, plan, settings)
        if found is not None:
            return found
    return unlimited


def _replayed_within(
    limit_bytes: int | None, trace: StepTrace, plan: ReplayPlan, settings: StepSettings
) -> Replayed | None:
    allocator = CachingAllocator(expandable_segments=settings.expandable_segments, limit_bytes=limit_bytes)
    try:
        return replay(trace, plan, allocator)
    except AllocationError:
        return None


def _optimizer(facts: tuple[ParameterFacts, ...], settings: StepSettings) -> OptimizerMemory:
    if settings.optimizer_memory is not None:
        found = settings.optimizer_memory(facts)
        return replace(found, releases_gradients=found.releases_gradients or settings.gradient_release)
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
    step: RecordedStep, settings: StepSettings, optimizer: OptimizerMemory, batch_size: int, chip: Chip
) -> ReplayPlan:
    releases = optimizer.releases_gradients
    alone = None
    if releases and settings.optimizer_memory is not None:
        alone = [settings.optimizer_memory((fact,)) for fact in step.trainable]
    elif releases:
        alone = memory_by_parameter(step.trainable, settings.optim, **_optimizer_options(settings))
    clips = settings.max_grad_norm > 0 and not releases
    gathered = settings.eval_batches if settings.eval_batch_size is not None else 0
    if settings.batch_eval_metrics:
        gathered = min(gathered, 1)
    elif settings.eval_accumulation_steps is not None:
        gathered = min(gathered, settings.eval_accumulation_steps)
    return ReplayPlan(
        optimizer=optimizer if alone is None else alone,
        clipping=clipping_temporaries(step.trainable) if clips else (),
        batches=settings.gradient_accumulation_steps,
        micro_batches=math.ceil(batch_size / (settings.micro_batch_size or batch_size)),
        workspaces=workspace_bytes(chip.capability, settings.cublas_workspace_bytes),
        eval_batches=gathered,
        eval_concat=settings.eval_do_concat_batches,
        empty_cache_steps=settings.torch_empty_cache_steps,
        is_manual=settings.loop == "manual",
        keeps_gradients=not settings.zero_grad_to_none,
    )
