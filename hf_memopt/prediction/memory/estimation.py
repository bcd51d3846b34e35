"""Estimate the GPU memory of a training step before it runs, from the real model code on the meta device.

A step of the stock ``Trainer`` is recorded (``recording``) with the allocations of CUDA (``cuda``) and replayed through
torch's allocator (``allocator``) together with the bytes of the optimizer (``optimizers``). It needs no formula per
architecture, no weights and no GPU.

Limitations: without what only a GPU shows (workspaces of cuDNN's convolutions, memory of NCCL, other processes).
What cannot be simulated raises ``NotEstimableError``; ``estimate`` lists it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_memopt.plain_data import Count, check_value, shown
from hf_memopt.prediction.memory.allocator import Replayed, ReplayPlan, fragmentation_of, replay_on_gpu
from hf_memopt.prediction.memory.models import checked_task, default_length, load_model
from hf_memopt.prediction.memory.optimizers import optimizer_memory
from hf_memopt.prediction.memory.recording import Shape, StepTrace, collector_paused, session
from hf_memopt.prediction.memory.result import Estimate
from hf_memopt.prediction.memory.settings import (
    ROW_TOKENS,
    LengthPlan,
    StepSettings,
    checked_lengths,
    in_own_names,
    plan_lengths,
)
from hf_memopt.prediction.memory.several_gpus import launched, notes_for_one_gpu
from hf_memopt.prediction.memory.step_time import timing_of_step
from hf_memopt.training.binding import versions as compat
from hf_memopt.training.devices import Chip, Gpu, against_float16, current_gpu, find_gpu
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import nn
    from transformers import PretrainedConfig

DEFAULT_BATCH_SIZE = 8
_ASSUMED_CAPABILITY = (8, 0)


def estimate(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    recipe: Any = None,
    gpu: str | Gpu | None = None,
    task: str | None = None,
    labels_length: int | None = None,
    lengths: ArrayLike | None = None,
    **overrides: Any,
) -> Estimate:
    """Predict the memory of a training step of the stock ``Trainer`` on a GPU, without the GPU.

    Args:
        model: a module (real or meta), a configuration, a folder or hub id with ``config.json``, or a well-known name
            such as ``"bert-large-uncased"``. It is not changed, and its weights are not read.
        batch_size: examples of one forward and backward pass (``per_device_train_batch_size``); the recipe's by
            default, else 8, as in ``TrainingArguments``.
        seq_len: tokens of the longest row, padding included; by default 512, or all positions of a model that has
            fewer, which a note says. Models of images have none.
        recipe: anything with ``step_settings()``, such as ``hf_memopt.recipe("4gb-gpu")``.
        gpu: a name such as ``"RTX 3050 4GB"`` or a ``Gpu``; None for the current CUDA device. Without one the kernels
            are those of compute capability 8.0, precision "auto" is fp32, and the context is unknown.
        task: the head to build where ``model`` is not a module; by default the configuration's own, or the usual one.
        labels_length: tokens of the targets of an encoder-decoder; ``seq_len`` unless given.
        lengths: instead of ``seq_len``, the tokens of a row of every batch, padding included, in the order of the run,
            shape (batches,): such as ``[view.plan.width(i) for i in range(len(view.plan))]`` of a bucketed view with
            boundaries, or the longest of each ``batch_size`` examples of a shuffled order. The batches are
            replayed one after the other, and ``Estimate.fragmentation`` says what their gaps add with and without
            expandable segments. At most eight lengths are recorded (a batch of another length counts as the next longer
            one) and 64 batches replayed; a note says how many.
        overrides: fields of ``StepSettings``, or their names in ``TrainingArguments`` such as ``bf16=True``; they
            replace those of the recipe.

    LoRA, quantised weights and frozen parameters are settings of the step: ``estimate("Llama-3.1-8B", batch_size=1,
    seq_len=512, lora=16, load_in="nf4", gpu="RTX 4060")``.

    Repeated calls with the same model reuse the recorded step where it is the same: for another optimizer or another
    accumulation only the replay runs again. A module, and a step with ``prepare``, are recorded at every call.

    Reserved bytes may differ by GiBs between neighbouring lengths, as on a GPU: where the optimizer's first step places
    its states in freed blocks of the logits, later logits need new ones. ``lengths`` replays a run, and expandable
    segments have no such jumps.

    Limitations: compiled models, Triton kernels (Liger), FlashAttention-3 and other kernels that are not installed,
    recurrent layers, models whose code reads values from the GPU (the outcome of a router, an early exit), weights
    quantised by anything but bitsandbytes, and optimizers whose state is unknown. It is for one GPU; where
    ``WORLD_SIZE`` says that several processes train, a note has the size of DDP's gradient buckets.

    Raises:
        ValueError: an unknown model, GPU or setting; a batch or length below 1 or beyond the model's positions;
            both ``seq_len`` and ``lengths``, or ``lengths`` that are not one whole number for each batch; settings
            that contradict each other or the given module, or that stop a real run at its first steps.
        NotEstimableError: this set-up cannot be simulated; the message says why.
        TypeError: an override is not a field of ``StepSettings``; ``recipe`` is not a recipe.

    Examples:
        >>> found = estimate("bert-base-uncased", batch_size=8, seq_len=128, gpu="RTX 3060 12GB", precision="fp32")
        >>> found.fits, found.phase
        (True, 'backward')
    """
    found_gpu = current_gpu() if gpu is None else find_gpu(gpu)
    overrides = in_own_names({**overrides, **({} if batch_size is None else {"batch_size": batch_size})})
    of_recipe = getattr(recipe, "per_device_train_batch_size", DEFAULT_BATCH_SIZE)
    shape = Shape(overrides.pop("batch_size", of_recipe), seq_len, labels_length)
    settings = settings_of_recipe(recipe, overrides)
    plan = None
    if lengths is not None:
        if not settings.zero_grad_to_none:
            raise ValueError(
                "lengths=..., zero_grad_to_none=False are incompatible: each length has gradients of its own; "
                "expected only one of them. Pass seq_len= with the longest length instead"
            )
        if seq_len is not None:
            raise ValueError(
                f"seq_len={seq_len!r} and lengths both give the tokens of a row; expected only one of them. "
                "Leave seq_len out"
            )
        plan = plan_lengths(checked_lengths(lengths), settings.gradient_accumulation_steps)
        shape = replace(shape, seq_len=plan.recorded[0])
    dtype = overrides.get("weights_dtype")
    found = estimate_of_step(model, shape, settings, found_gpu, task=task, weights_dtype=dtype, lengths=plan)
    notes = notes_for_one_gpu(found, *launched(counts_gpus=gpu is None))
    if recipe is None:
        notes = (*of_own_dtype(model, settings, dtype), *notes)
    return replace(found, notes=(*found.notes, *notes))


def precision_for(model: Any, gpu: Gpu | None, task: str | None = None) -> tuple[str, str, str]:
    """Return the precision that suits GPU and model, its dtype, and why it is float32 where float16 would overflow."""
    if gpu is None or gpu.bf16:
        return "bf16", "bfloat16", ""
    problem = against_float16(gpu.name, getattr(load_model(model, task=task).model, "config", None))
    return ("fp32", "float32", problem) if problem else ("fp16", "float16", "")


OWN_DTYPE = (
    "counted with float32 weights where they are not quantised: load the model with dtype=torch.float32; for 16-bit "
    "weights give weights_dtype"
)


def of_own_dtype(model: Any, settings: StepSettings, weights_dtype: str | None) -> tuple[str, ...]:
    """Return the note on weights that are counted in float32, where a name or a folder may have others."""
    is_named = isinstance(model, str | os.PathLike) and weights_dtype is None and settings.load_in is None
    return (OWN_DTYPE,) if is_named else ()


@collector_paused()
def estimate_of_step(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    shape: Shape,
    settings: StepSettings,
    gpu: Gpu | None,
    *,
    task: str | None = None,
    weights_dtype: str | None = None,
    lengths: LengthPlan | None = None,
) -> Estimate:
    """Return the estimate; ``weights_dtype`` is the caller's, None where the settings have the default.

    ``lengths`` are those of a run whose longest batch has ``shape``.
    """
    for size in ("batch_size", "seq_len", "labels_length"):
        if getattr(shape, size) is not None:
            check_value(size, getattr(shape, size), Count, 1)
    task = checked_task(task)
    settings, quantised = with_16_bits(settings, gpu, weights_dtype)
    overflows: tuple[str, ...] = ()
    if settings.precision == "auto" and with_precision(settings, gpu).precision == "fp16":
        problem = precision_for(model, gpu, task)[2]
        overflows = (f"{problem}; pass precision='fp32', as plan does",) if problem else ()
    if settings.precision == "bf16" and gpu is not None and not gpu.bf16:
        native = with_precision(settings.replace(precision="auto"), gpu).precision
        native = "fp32" if precision_for(model, gpu, task)[2] else native
        overflows = (f"bfloat16 is only emulated on {gpu.name}, which is slow; pass precision={native!r}",)
    settings = with_precision(settings, gpu)
    _check_gpu(settings, gpu)
    chip = Chip.of(_ASSUMED_CAPABILITY) if gpu is None else Chip.of(gpu.compute_capability, gpu.multiprocessors)
    recorded = partial(_recorded, model, chip=chip, gpu=gpu, task=task, weights_dtype=weights_dtype)
    asked_length = shape.seq_len
    trace, name, of_weights, settings, shape = recorded(shape, settings)
    without_evaluation = settings.replace(eval_batch_size=None)  # the longest batch has the evaluation
    lengths_recorded = () if lengths is None else lengths.recorded[1:]
    others = [recorded(replace(shape, seq_len=length), without_evaluation)[0] for length in lengths_recorded]
    trained, on_host = trace.trainable, trace.on_host
    left = {trained[index] for index in trace.unused} if on_host is None else on_host.stepped
    stepping = tuple(fact for fact in trained if fact not in left)  # torch has no state of what gets no gradient
    optimizer = optimizer_memory(stepping, settings)
    plan = ReplayPlan.of(stepping, settings, optimizer, shape.batch_size, chip)
    if left and settings.steps_in_backward:
        plan = replace(plan, optimizer=optimizer_memory(trained, settings).alone)  # by the parameters of the recording
    fragmentation = None
    if lengths is not None:
        plan = replace(plan, order=lengths.steps)
    replayed = replay_on_gpu(trace, plan, gpu, others)
    if lengths is not None:
        fragmentation = fragmentation_of(trace, others, plan, lengths, replayed)
    step_time, step_costs, time_unknown = timing_of_step(
        [trace, *others],
        plan,
        stepping,
        optimizer,
        gpu,
        batch_size=shape.batch_size,
        lengths=(shape.seq_len,) if lengths is None else lengths.recorded,
    )
    notes = () if fragmentation is None else (fragmentation.note(shape.seq_len or 0, settings.expandable_segments),)
    return Estimate(
        model=name,
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
        host_bytes=trace.host_bytes
        + optimizer.host_state_bytes
        + (0 if on_host is None else on_host.bytes_on_host(settings)),
        parameters=trace.parameters,
        trainable_parameters=sum(fact.elements for fact in trace.trainable),
        flops=trace.flops[0] * settings.gradient_accumulation_steps * plan.micro_batches,
        timeline=replayed.timeline,
        notes=(
            *notes,
            *(() if shape.seq_len is None or asked_length is not None else (_length_note(shape.seq_len),)),
            *_notes(gpu, settings, replayed),
            *of_weights,
            *quantised,
            *overflows,
            *trace.notes,
        ),
        fragmentation=fragmentation,
        step_time=step_time,
        step_costs=step_costs,
        time_unknown=time_unknown,
        gradient_bytes=sum(fact.size_bytes for fact in trained),
        unused_parameters=tuple(trace.trainable[index].name for index in trace.unused),
    )


def _recorded(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    shape: Shape,
    settings: StepSettings,
    *,
    chip: Chip,
    gpu: Gpu | None,
    task: str | None,
    weights_dtype: str | None,
) -> tuple[StepTrace, str, tuple[str, ...], StepSettings, Shape]:
    """Return the recorded step, the model's name and notes, settings with its own dtype, the shape with a length."""
    with torch.inference_mode(False):  # weights created in the caller's inference mode could not be trained
        loaded = session().load(
            model,
            settings,
            attn_implementation=settings.attn_implementation,
            weights_dtype=settings.weights_dtype,
            task=task,
            load_in=settings.load_in,
            compute_dtype="float32" if settings.weights_dtype == "float32" else sixteen_bits(gpu),
            keep_cache=settings.loop != "trainer",
        )
        if loaded.key is None:
            settings = settings.replace(weights_dtype=own_dtype(loaded.model, weights_dtype))
        if shape.seq_len is None:
            shape = replace(shape, seq_len=default_length(loaded.model, settings))
        return session().record(loaded, settings, shape, chip), loaded.name, loaded.notes, settings, shape


def _length_note(assumed: int) -> str:
    fewer = "" if assumed == ROW_TOKENS else ", all that the model takes"
    what = fewer if assumed <= ROW_TOKENS else ", pictures included"
    return f"seq_len={assumed} by default{what}; pass the length of your longest rows"


def _check_gpu(settings: StepSettings, gpu: Gpu | None) -> None:
    """Refuse what does not run on GPUs before Ampere."""
    asked = {"attn_implementation": (settings.attn_implementation, "flash_attention_2", "sdpa")}
    asked["precision"] = settings.precision, "tf32", "fp32"
    for name, (value, refused, other) in asked.items():
        if gpu is not None and not gpu.bf16 and value == refused:
            raise ValueError(
                f"{name}={value!r} does not run on {gpu.name}, of compute capability "
                f"{'.'.join(map(str, gpu.compute_capability))}; expected 8.0 or more. Pass {name}={other!r}"
            )


def _notes(gpu: Gpu | None, settings: StepSettings, replayed: Replayed) -> tuple[str, ...]:
    unknown = "no GPU given: kernels of compute capability 8.0, and the context is not in the total"
    notes = [unknown] if gpu is None else [*gpu.notes]
    if gpu is not None and gpu.context_bytes is None:
        notes.append(f"the size of the CUDA context on {gpu.name} is unknown and not in the total")
    needed_bytes = replayed.peak_reserved + (0 if gpu is None else gpu.context_bytes or 0)
    fits = gpu is not None and needed_bytes <= gpu.usable_bytes
    steps = len(replayed.timeline.steps)
    places = zip(replayed.retries, ("three steps" if steps == 3 else f"{steps} steps", "the evaluation"), strict=True)
    retries = [f"{count} time(s) in {place}" for count, place in places if count]
    if retries:
        variable = f"; {compat.allocator_variable()}=expandable_segments:True may avoid it"
        avoid = "" if settings.expandable_segments else variable
        notes.append(
            f"{'it fits' if fits else 'this total is enough'} because the allocator returns unused blocks to the "
            f"driver {' and '.join(retries)}, which costs time{avoid}"
        )
    if gpu is not None and not fits:
        loading_bytes = replayed.timeline.phase_peaks()["load"].reserved_bytes + (gpu.context_bytes or 0)
        if loading_bytes > gpu.usable_bytes:
            notes.append(f"loading the model alone needs {format_bytes(loading_bytes)}: the run ends before a step")
    if settings.eval_batch_size is None:
        notes.append("evaluation not included: give eval_batch_size")
    elif replayed.phase == "evaluation" and not settings.prediction_loss_only:
        notes.append("evaluation keeps logits for a metric; without compute_metrics give prediction_loss_only=True")
    if settings.micro_batch_size is not None:
        notes.append("micro-batches of a known loss; any other sees all rows, whose logits and gradients come on top")
    return tuple(notes)


# ---- Settings, once recipe, GPU and model are known


def settings_of_recipe(recipe: Any, overrides: Mapping[str, Any]) -> StepSettings:
    """Return the settings of a recipe with the overrides."""
    if recipe is None:
        settings = StepSettings()
    elif hasattr(recipe, "step_settings"):
        settings = recipe.step_settings()
    else:
        raise TypeError(
            f"recipe={shown(recipe)} is not a recipe; expected an object with step_settings(). "
            "Pass recipe=hf_memopt.recipe('4gb-gpu')"
        )
    return settings.replace(**overrides)


def with_precision(settings: StepSettings, gpu: Gpu | None) -> StepSettings:
    if settings.precision != "auto":
        return settings
    scaled = "fp16" if settings.can_scale_loss else "fp32"
    native = "fp32" if gpu is None else "bf16" if gpu.bf16 else scaled
    is_plain = gpu is not None and (gpu.compute_capability < (7, 0) or against_float16(gpu.name))  # choose_precision
    return settings.replace(precision="fp32" if is_plain and settings.weights_dtype != "float16" else native)


def sixteen_bits(gpu: Gpu | None) -> str:
    return "bfloat16" if gpu is None or gpu.bf16 else "float16"


def with_16_bits(settings: StepSettings, gpu: Gpu | None, asked: str | None) -> tuple[StepSettings, tuple[str, ...]]:
    """Return the settings with 16-bit weights beside quantised ones, unless the caller asked for a dtype; and notes."""
    if settings.load_in is None:
        return settings, ()
    notes = []
    if asked is None and settings.weights_dtype == "float32" and settings.precision not in ("fp32", "tf32"):
        settings = settings.replace(weights_dtype=sixteen_bits(gpu))
        notes.append(f"weights that are not quantised are {settings.weights_dtype}: give weights_dtype for another")
    if not settings.prepare and settings.weights_dtype != "float32":
        notes.append(
            "embeddings, norms and head as loaded: call hf_memopt.prepare_quantized, not peft's "
            "prepare_model_for_kbit_training, which makes them float32, as prepare='peft' counts them"
        )
    if not settings.checkpointing and any("_for_kbit_" in getattr(one, "__name__", "") for one in settings.prepare):
        notes.append("without use_gradient_checkpointing=False peft's preparation switches on: checkpointing=True")
    return settings, tuple(notes)


def own_dtype(model: nn.Module, asked: str | None) -> str:
    """Return the dtype of a module's weights, of mixed ones the dtype that most bytes have; refuse another one."""
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.nbytes
    own = max(sizes, key=lambda name: sizes[name], default="float32")
    if asked is not None and asked != own:
        raise ValueError(
            f"weights_dtype={asked!r} is not that of the given module, whose weights are {own}; expected {own!r}. "
            f"Call: model.to(torch.{asked})"
        )
    return own
