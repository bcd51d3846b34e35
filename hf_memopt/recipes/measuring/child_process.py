"""``measure``: train a few real steps, put the prediction beside them, and leave the Trainer as it was.

Memory is measured in two steps of the longest rows of the data, time in the steps after them, with the run's own
batches. Evaluation, saving and logging are left out.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from hf_memopt.binding import checkpointing_of
from hf_memopt.binding.model import unwrap_optimizer
from hf_memopt.binding.model_changes import is_quantized
from hf_memopt.binding.undo import FOREIGN, KeptState, RandomState
from hf_memopt.devices import GPUS, current_gpu
from hf_memopt.devices.readings import read_memory, read_process
from hf_memopt.memory import estimate_of
from hf_memopt.memory.settings import BatchShape, NotEstimableError
from hf_memopt.memory.tracking import COMPONENTS
from hf_memopt.plain_data import Count, check_value
from hf_memopt.recipes.measuring.recorder import WARM_UP_STEPS, StepRecorder
from hf_memopt.reports import DEFAULT_STEPS, PACKAGES, Figures, Measurement
from hf_memopt.whole_files import check_target

if TYPE_CHECKING:
    import torch
    from transformers import Trainer

    from hf_memopt.memory import Estimate


def measure(
    trainer: Trainer, *, steps: int = DEFAULT_STEPS, path: str | os.PathLike[str] | None = None, force: bool = False
) -> Measurement:
    """Return what a few real optimizer steps of a Trainer take, beside what ``estimate`` says of them.

    Three steps come before those that are timed. Afterwards ``trainer.train()`` trains as if nothing had been measured:
    weights, gradients, optimizer, random numbers, state, callbacks and views are put back. Running out of memory is an
    answer too, in ``Measurement.out_of_memory``.

    Args:
        trainer: a stock Trainer, attached or not, that has not begun to train; one process, one device.
        steps: to time. A run that has fewer is measured to its end.
        path: of a file to write the result to as JSON, for ``plan(..., measured=path)``; None for none.
        force: whether a file that exists is overwritten.

    What is trained is copied to the host meanwhile. Callbacks run with their attributes put back afterwards, but do not
    hear of the end of epochs and of training; those of ``report_to``, progress bars and memory reports are set aside.

    Limitations: evaluation, checkpoints and resuming; what callbacks and collators do outside of Python's objects (a
    file, a request); streams that can be read only once. On a CPU the bytes are those of tensors (``recorder``).

    Raises:
        TypeError: ``trainer`` is not a Trainer.
        ValueError: ``steps`` is below 1; the file exists, or its folder does not.
        RuntimeError: several GPUs or processes.

    Examples:
        >>> from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
        >>> config = BertConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": 0}] * 32
        >>> args = TrainingArguments(report_to="none", use_cpu=True, per_device_train_batch_size=2)
        >>> found = measure(Trainer(BertForSequenceClassification(config), args, train_dataset=rows), steps=2)
        >>> found.fits, found.batch_size, found.seq_len, len(found.step_seconds)
        (True, 2, 4, 2)
    """
    check_value("steps", steps, Count, DEFAULT_STEPS)
    check_trainer(trainer)
    if path is not None:
        check_target("path", path, force=force)
    recorder = StepRecorder(trainer, steps)
    with restored(trainer):
        recorder.run(trainer.train)
    found = measurement_of(trainer, recorder)
    if path is not None:
        found.write(path, force=force)
    return found


_LIBRARIES = tuple(name for name in FOREIGN if name != "hf_memopt")


@contextmanager
def restored(trainer: Trainer) -> Iterator[None]:
    """Put everything back that training inside has changed, as if the Trainer had never trained.

    What is trained is copied to the host and put back. Optimizer, scheduler, state, control and loaders that the steps
    make are dropped; callbacks, views and arguments get their attributes back; random numbers go on where they were.
    """
    model: Any = trainer.model
    handler, accelerator = trainer.callback_handler, trainer.accelerator
    optimizer = unwrap_optimizer(trainer.optimizer)
    random_state = RandomState.capture(trainer.args.device)
    kept = KeptState(_LIBRARIES, what="a measured step")
    of_model = KeptState(_LIBRARIES, largest_copy_bytes=2**62)  # buffers of any size
    objects = [trainer, trainer.args, trainer.control, handler, *handler.callbacks, trainer.train_dataset]
    for one in (*objects, accelerator, accelerator.gradient_state, accelerator.scaler):
        if hasattr(one, "__dict__"):
            kept.look_at(one)
    for one in (*model.modules(), *([] if optimizer is None else [optimizer])):
        of_model.look_at(one)
    for state in () if optimizer is None else optimizer.state.values():  # of any number of weights
        of_model.keep(state, "optimizer.state")
    modes = [(module, module.training) for module in model.modules()]
    weights = [
        (one, one.requires_grad, one.grad, one.data, one.detach().to("cpu", copy=True) if one.requires_grad else None)
        for one in model.parameters()
    ]
    try:
        yield
    finally:
        made = unwrap_optimizer(trainer.optimizer)
        if made is not optimizer and hasattr(made, "handle"):
            made.handle.remove()  # the hooks by which gradients are released
        accelerator.free_memory()
        for parameter, requires_grad, gradient, data, values in weights:
            if values is not None:
                parameter.data = data.copy_(values)
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
        of_model.restore()
        kept.restore()
        random_state.restore()


def check_trainer(trainer: Any) -> None:
    """Refuse what is not a Trainer, and several GPUs or processes, as ``measure`` does."""
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer=<{type(trainer).__name__}> is not a transformers.Trainer; expected the Trainer that trains. "
            "Call measure(Trainer(model, ...))"
        )
    if trainer.args.n_gpu > 1:
        raise RuntimeError(
            f"n_gpu={trainer.args.n_gpu} GPUs are visible to this one process; expected one, as a step is measured. "
            "Call: CUDA_VISIBLE_DEVICES=0 hf-memopt measure train.py"
        )
    if trainer.args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise RuntimeError(
            f"world_size={trainer.args.world_size} processes, or a sharded model, cannot be measured; expected one "
            "process with the whole model. Call: CUDA_VISIBLE_DEVICES=0 hf-memopt measure train.py, without torchrun, "
            "DeepSpeed and FSDP"
        )


def measurement_of(trainer: Trainer, recorder: StepRecorder) -> Measurement:
    """Return what was recorded of a Trainer beside what ``estimate`` says of it."""
    args, model, device = trainer.args, cast(nn.Module, trainer.model), recorder.meter.device
    largest = recorder.largest
    timed = [shape for of_step in recorder.shapes[WARM_UP_STEPS : recorder.steps] for shape in of_step]
    estimated, predicted, told = _predicted(trainer, largest, timed, device)
    counts = [shape.tokens for shape in timed]
    known = [count for count in counts if count is not None]
    timed_steps = max(len(recorder.seconds), 1)
    notes = [recorder.longest.note]
    if not recorder.seconds and not recorder.out_of_memory:
        notes.append(f"the run has {recorder.steps} steps, and {WARM_UP_STEPS} come before the first that is timed")
    notes += told
    gpu = current_gpu()
    trainable = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return Measurement(
        model=type(model).__name__,
        parameters=_base_parameters(model, estimated),
        trainable_parameters=trainable,
        device=str(device),
        gpu="" if device.type == "cpu" else read_memory(device).device_name if gpu is None else gpu.name,
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
        method="qlora" if is_quantized(model) else "lora" if hasattr(model, "peft_config") else "full",
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "tf32" if args.tf32 else "fp32",
        optim=str(getattr(args.optim, "value", args.optim)),
        checkpointing=bool(checkpointing_of(args)[0]),
        accumulation_steps=args.gradient_accumulation_steps,
        batch_size=0 if largest is None else largest.rows,
        seq_len=None if largest is None else largest.seq_len,
        steps=recorder.steps,
        out_of_memory=recorder.out_of_memory,
        step_seconds=tuple(recorder.seconds),
        examples=sum(shape.rows for shape in timed) / timed_steps,
        tokens=sum(known) / timed_steps if timed and len(known) == len(counts) else None,
        host_peak_bytes=read_process()[1],
        measured=_measured(recorder),
        predicted=predicted,
        notes=tuple(filter(None, notes)),
    )


def _base_parameters(model: nn.Module, found: Estimate | None) -> int:
    """Return the elements of all parameters but those of PEFT's adapters; packed 4-bit weights as the estimate does."""
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    added = sum(size for name, size in sizes.items() if ".lora_" in name or ".modules_to_save." in name)
    return (sum(sizes.values()) if found is None else found.parameters) - added


def _measured(recorder: StepRecorder) -> Figures:
    phases = recorder.peaks.summary
    reserved = [peaks["peak_reserved_bytes"] for peaks in phases.values() if "peak_reserved_bytes" in peaks]
    allocated = {
        phase: peaks.get("peak_allocated_bytes", peaks.get("allocated_bytes", 0)) for phase, peaks in phases.items()
    }
    seconds = recorder.seconds
    return Figures(
        allocated_bytes=max(allocated.values(), default=0),
        reserved_bytes=max(reserved, default=None),
        context_bytes=recorder.context_bytes,
        phases=allocated,
        components=recorder.components,
        seconds=median(seconds) if seconds else None,
        low=min(seconds, default=None),
        high=max(seconds, default=None),
    )


def _predicted(
    trainer: Trainer, largest: BatchShape | None, timed: list[BatchShape], device: torch.device
) -> tuple[Any, Figures | None, tuple[str, ...]]:
    """Return the estimate of the largest batch, its figures with the time of the timed batches, and notes."""
    if largest is None:
        return None, None, ("memory ran out before the first batch",)
    try:
        found = estimate_of(trainer, largest, eval_batch_size=None)
        in_time = None if device.type == "cpu" or not timed else found
        if in_time is not None and any(shape.padded_tokens != largest.padded_tokens for shape in timed):
            in_time = estimate_of(trainer, _mean(timed), eval_batch_size=None)
    except (NotEstimableError, ValueError) as error:
        return None, None, (f"not predicted: {error}",)
    if device.type == "cpu":
        notes: tuple[str, ...] = (
            "on a CPU bytes are those of tensors and of its own kernels, and seconds are not predicted",
        )
    else:
        notes = (f"seconds are not predicted: {found.time_unknown}",) if found.time_unknown else ()
    return found, predicted_figures(found, in_time), notes


def _mean(shapes: list[BatchShape]) -> BatchShape:
    """Return a batch of the mean size; a step's seconds grow nearly along a line with it."""
    rows = max(round(fmean(shape.rows for shape in shapes)), 1)
    lengths = [(shape.seq_len, shape.rows) for shape in shapes if shape.seq_len is not None]
    weight = sum(number for _, number in lengths)
    mean = round(sum(length * number for length, number in lengths) / weight) if weight else None
    return replace(shapes[0], rows=rows, seq_len=mean)


_KEPT = [COMPONENTS.index(name) for name in ("activations", "logits and loss", "temporaries")]


def predicted_figures(found: Estimate, timed: Estimate | None) -> Figures:
    """Return what an estimate says of what is measured."""
    timeline = found.timeline
    on_gpu = found.gpu is not None
    workspace = COMPONENTS.index("workspace")
    held = {name: int(timeline.components[:, COMPONENTS.index(name)].max()) for name in COMPONENTS[:3]}
    # a CPU has no workspace of matrix products, nothing reserved and no context
    without = 0 if on_gpu else int(timeline.components[:, workspace].max())
    peaks = {name: peak.allocated_bytes - (0 if name == "load" else without) for name, peak in found.phases.items()}
    starts = [first for first, name in timeline.phases if name == "backward" and first]
    kept = max((int(timeline.components[first - 1, _KEPT].sum()) for first in starts), default=0)  # by a forward pass
    time = None if timed is None else timed.step_time
    return Figures(
        allocated_bytes=found.peak_allocated_bytes - without,
        reserved_bytes=found.peak_reserved_bytes if on_gpu else None,
        context_bytes=None if found.gpu is None else GPUS.get(found.gpu.name, found.gpu).context_bytes,
        phases=peaks,
        components={**held, "activations and logits": kept},
        seconds=None if time is None else time.seconds,
        low=None if time is None else time.low,
        high=None if time is None else time.high,
    )
