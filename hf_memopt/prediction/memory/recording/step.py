"""Record the allocations of one step of the stock ``Trainer``, or of a hand-written loop: forward and backward, and an
evaluation batch.

``passes`` runs the parts as the Trainer and accelerate do. The optimizer does not run: its bytes are known
(``optimizer_memory``) and are added by the replay. What a recording changes belongs to the whole process, so one thread
records at a time, and all of it is restored.
"""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from logging import ERROR
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_memopt.errors import reason
from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.recording.passes import (
    Complete,
    PassRecorder,
    StepTrace,
    autocast_dtype,
    noting_gradients,
    second_pass,
    storage_numbers,
)
from hf_memopt.prediction.memory.recording.threads import OfThread
from hf_memopt.prediction.memory.recording.trainer_loss import loss_among
from hf_memopt.prediction.memory.settings import NotEstimableError, StepSettings
from hf_memopt.prediction.memory.tracking import HOST_GENERATOR, StorageTracker, all_nonzero
from hf_memopt.training.binding.model_changes import is_quantized
from hf_memopt.training.binding.undo import set_attribute, undo_all

RECORDING_LOCK = threading.RLock()
"""Held by ``recording``, which changes process-wide state: garbage collector, warnings, torch's flags."""


def record_step(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    settings: StepSettings,
    *,
    micro_batch: Mapping[str, torch.Tensor] | None = None,
    evaluation_batch: Mapping[str, torch.Tensor] | None = None,
    tracker: StorageTracker | None = None,
    semantics: CudaSemantics | None = None,
) -> StepTrace:
    """Record a step of ``model`` on ``batch``; both stay on their device, meta or a real CPU.

    Layers that are dropped at random (``layerdrop``) all run, the most that a step can take. The model is in training
    mode afterwards, without gradients. ``micro_batch`` are the first rows of a batch that is cut.

    Raises:
        ValueError: the model has no trainable parameter.
        NotEstimableError: the model's code asks for values of real data, or fails; a recurrent layer of cuDNN.
    """
    weights = list(model.parameters())
    parameters = [parameter for parameter in weights if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"model=<{type(model).__name__}> has no trainable parameter; expected one or more with requires_grad=True. "
            "Call model.requires_grad_(True)"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise NotEstimableError(
                f"not estimable: {name or 'the model'} is an nn.{type(module).__name__}, for which cuDNN reserves "
                "memory by undocumented rules; expected a model without recurrent layers. Measure the step on the GPU"
            )
    tracker = StorageTracker(padding=has_padding(batch, settings)) if tracker is None else tracker
    if semantics is None:
        autocast = autocast_dtype(settings.precision)
        semantics = CudaSemantics(autocast=autocast, cache=settings.autocast_cache, tracker=tracker)
    _drop_gradients(weights)
    loss = loss_among(settings)
    models = model if loss is None else nn.ModuleList([model, *loss.references])
    trace = StepTrace(tracker, _weights(models, tracker), storage_numbers(batch, tracker))
    if not settings.streamed and is_quantized(model):  # streamed ones are loaded on the host
        from hf_memopt.prediction.memory.quantized import load_events  # bitsandbytes takes a second to import

        trace.loading = load_events(model, tracker.number)
    tracker.know((batch, evaluation_batch))
    releasing = parameters if settings.steps_in_backward else []
    repeats = not settings.streamed and not releasing and settings.loop == "trainer"
    repeats = repeats and all(weight.is_meta for weight in weights)  # real passes are run, to compare with
    complete: list[Complete] = []
    recorder = PassRecorder(model, settings, tracker, semantics, loss)
    model.train()
    try:
        with ExitStack() as around:
            for context in (recording(tracker, semantics), tracker.watching(model), recorder.releasing(releasing)):
                around.enter_context(context)
            around.enter_context(torch.inference_mode(False))  # whatever the caller is in; gradients are on with it
            if loss is not None:
                around.enter_context(loss.recording(model, recorder.called))
            trace.notes = around.enter_context(_every_layer(model))
            passes = _passes(settings, is_cut=micro_batch is not None)
            noting = around.enter_context(ExitStack())
            if repeats and passes > 1:
                complete = noting.enter_context(noting_gradients(parameters, tracker))
            for _ in range(passes):
                if complete and (second := second_pass(tracker, trace.micro_batches[0], complete)) is not None:
                    trace.micro_batches.append(second)
                    trace.flops.append(trace.flops[0])
                    break
                flops = tracker.flops
                with tracker.counting():
                    trace.micro_batches.append(recorder.train(batch if micro_batch is None else micro_batch))
                noting.close()
                trace.flops.append(tracker.flops - flops)
            recorder.drop_outputs()
            gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
            trace.gradient_of = {index: tracker.number(grad) for index, grad in gradients if grad is not None}
            del gradients
            released = [number for _, _, number in trace.micro_batches[0].releases]
            reached = {*trace.gradient_of, *(index for _, index, _ in trace.micro_batches[0].releases)}
            trace.unused = tuple(index for index in range(len(parameters)) if index not in reached)
            trace.gradients = tuple(dict.fromkeys([*trace.gradient_of.values(), *released]))
            _drop_gradients(weights)
            if evaluation_batch is not None:
                trace.evaluation_inputs = storage_numbers(evaluation_batch, tracker)
                tracker.padding = has_padding(evaluation_batch, settings)
                trace.evaluation = recorder.evaluate(evaluation_batch)
    except (NotEstimableError, MemoryError):
        raise
    except Exception as error:  # of the model's code, which may raise anything
        raise _not_estimable(model, error) from error
    finally:
        tracker.close()
        semantics.close()
        _drop_gradients(weights)
        model.train()
    trace.host_bytes = semantics.peak_host_bytes
    return trace


def has_padding(batch: Mapping[str, torch.Tensor], settings: StepSettings) -> bool:
    """Return whether rows of a batch are padded: unless the settings say so, where several rows have tokens."""
    if settings.padding is not None:
        return bool(settings.padding)
    ids = (one for one in batch.values() if isinstance(one, torch.Tensor) and one.dtype == torch.int64)
    return any(one.dim() > 1 and one.numel() > one.shape[-1] for one in ids)


def cut_batch(batch: Mapping[str, torch.Tensor], batch_size: int, rows: int) -> dict[str, torch.Tensor]:
    """Return the first ``rows`` of the ``batch_size`` examples; tensors without one row per example stay whole.

    What is returned are views, which share the storage of the batch.
    """
    return {name: one[:rows] if one.dim() and len(one) == batch_size else one for name, one in batch.items()}


def _passes(settings: StepSettings, *, is_cut: bool) -> int:
    """Return how many passes to record: the first has new gradients, and each later one adds to them, as the second."""
    adds = settings.gradient_accumulation_steps > 1 or is_cut or not settings.zero_grad_to_none
    return 2 if adds else 1


def _drop_gradients(weights: Iterable[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None


def _not_estimable(model: nn.Module, error: Exception) -> NotEstimableError:
    """Return the error that quotes what the model's code failed with."""
    name, cause = type(model).__name__, reason(error).splitlines()[0]
    if "meta" in str(error).lower():
        return NotEstimableError(
            f"not estimable: {name} does not run on the meta device, where tensors have shapes but no values ({cause})"
        )
    return NotEstimableError(f"not estimable: {name} fails with this batch and set-up ({cause})")


@contextmanager
def _every_layer(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Let no layer be dropped at random inside; yield a note about it, or nothing where none would be dropped."""
    holders: list[Any] = [one for module in model.modules() for one in (module, getattr(module, "config", None))]
    found = {
        (id(holder), name): (holder, value)
        for holder in holders
        for name, value in getattr(holder, "__dict__", {}).items()
        if "layerdrop" in name and isinstance(value, float) and value > 0
    }
    changed = ", ".join(sorted({f"{name}={value:g}" for (_, name), (_, value) in found.items()}))
    with undo_all(*(set_attribute(holder, name, 0.0) for (_, name), (holder, _) in found.items())):
        yield (f"{changed}: with every layer, the most that a step takes",) if found else ()


def _weights(model: nn.Module, tracker: StorageTracker) -> tuple[int, ...]:
    """Register parameters and buffers in the order in which ``model.to(device)`` allocates them; tied ones once."""
    numbers: dict[int, None] = {}

    for tensor in _children_first(model):
        if tensor is not None:
            numbers.setdefault(tracker.add(tensor))
    return tuple(number for number in numbers if number >= 0)


def _children_first(module: nn.Module) -> Iterator[torch.Tensor | None]:
    for child in module.children():
        yield from _children_first(child)
    yield from (*module._parameters.values(), *module._buffers.values())


# ---- Around a recording ----------------------------------------------------------------------------------------------


@contextmanager
def recording(*modes: Any) -> Iterator[None]:
    """Enter the modes, and keep out what would disturb a recording; everything is restored afterwards.

    The garbage collector is paused: it would free storages at random moments and costs more than the recording. Random
    numbers come from one seed, and no generator of the process is touched. transformers logs errors only. One thread
    records at a time.
    """
    from transformers.utils import logging

    with collector_paused(), ExitStack() as stack:
        stack.enter_context(_own_generators())
        # masks are small, and threads that wait for the next one take longer than they save
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        stack.enter_context(_autocast_of_cuda(modes))
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity(max(logging.get_verbosity(), ERROR))
        stack.enter_context(warnings.catch_warnings())
        # torch's checkpoint enters CUDA's autocast where it recomputes; a build without CUDA warns each time
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda', but CUDA is not available")
        stack.enter_context(all_nonzero())
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextmanager
def _autocast_of_cuda(modes: Iterable[Any]) -> Iterator[None]:
    """Let autocast of meta tensors be CUDA's, and count in each mode the open regions that switch it off."""
    autocast: Any = torch.autocast
    dtype_of: Any = torch.get_autocast_dtype
    init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__
    counting = [mode for mode in modes if hasattr(mode, "switched_off")]

    @wraps(init)
    def of_cuda(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cuda" if device_type == "meta" else device_type, *args, **kwargs)  # PEFT opens it for meta
        asked = kwargs.get("enabled", args[1] if len(args) > 1 else True)
        self._is_off = device_type == "meta" and not asked

    def count(self: Any, step: int) -> None:
        for mode in counting:
            mode.switched_off += step * getattr(self, "_is_off", False)

    def entered(self: Any) -> Any:
        count(self, 1)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        count(self, -1)
        return leave(self, *error)

    with (
        set_attribute(torch, "get_autocast_dtype", lambda kind: dtype_of("cuda" if kind == "meta" else kind)),
        set_attribute(autocast, "__init__", of_cuda),
        set_attribute(autocast, "__enter__", entered),
        set_attribute(autocast, "__exit__", left),
    ):
        yield


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector inside, one thread at a time.

    A replay makes hundreds of thousands of objects, and each of the collections that they cause looks through all that
    torch and transformers have made.
    """
    with RECORDING_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@contextmanager
def _own_generators() -> Iterator[None]:
    """Draw what this thread draws on the host from generators of its own, each with one seed.

    Models use functions of torch, numpy and Python that draw from one generator for all threads, where a training may
    be drawing at the same time. ``torch.random.default_generator`` is what checkpoints capture and restore; operations
    of torch draw from ``HOST_GENERATOR`` by themselves (``run_on_meta``).
    """
    with ExitStack() as stack:
        for module, own in ((random, random.Random(0)), (np.random, np.random.RandomState(0))):
            for name in (name for name in module.__all__ if hasattr(own, name)):
                one = OfThread(getattr(own, name), getattr(module, name))
                stack.callback(set_attribute(module, name, one).remove)
        one = OfThread(HOST_GENERATOR.manual_seed(0), torch.default_generator)
        stack.callback(set_attribute(torch.random, "default_generator", one).remove)
        yield


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore what the modules of a model refer to, such as a cache that a forward pass fills, at the end.

    A weight on the meta device whose dtype changed inside, as bitsandbytes casts biases, gets its own again.
    """
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    inside = [(held, dict(held)) for _, values in kept for held in values.values() if isinstance(held, dict)]
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    try:
        yield
    finally:
        for values, copied in [*kept, *inside]:
            values.clear()
            values.update(copied)
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype and parameter.is_meta:
                parameter.data = torch.empty_like(parameter.data, dtype=dtype)
