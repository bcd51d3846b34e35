"""What the tests of recordings share: a step on meta or real memory, what can be compared of it, and real peaks."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from host_semantics import HostSemantics
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt import estimate
from hf_memopt.prediction.memory.allocator import ReplayPlan
from hf_memopt.prediction.memory.allocator.replay import replay
from hf_memopt.prediction.memory.cuda import CudaSemantics, run_backward
from hf_memopt.prediction.memory.models import example_batch as example_batch
from hf_memopt.prediction.memory.optimizers import OptimizerMemory, parameter_facts
from hf_memopt.prediction.memory.recording import RecordedPass, StepTrace
from hf_memopt.prediction.memory.recording.passes import autocast_dtype
from hf_memopt.prediction.memory.recording.sessions import _checkpoint, _prepared
from hf_memopt.prediction.memory.recording.step import record_step, recording
from hf_memopt.prediction.memory.recording.streamed import RecordedStream
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding.model_changes import add_adapters
from hf_memopt.types import StepSettings


def prepared(model: Any, settings: StepSettings) -> Any:
    """Return the model with what the settings change in it: techniques, adapters, frozen layers, checkpointing."""
    if settings.lora is not None and _device_of(model) != "meta":  # the recording's own adapters are on meta
        with torch.device("cpu"):
            model, settings = (
                add_adapters(model, settings.lora, lora_targets=settings.lora_targets),
                settings.replace(lora=None, lora_targets="auto"),
            )
    model = _prepared(model, settings)
    if settings.checkpointing:
        _checkpoint(model, settings)
    return model


def record(
    model: Any,
    batch: Mapping[str, torch.Tensor],
    settings: StepSettings,
    semantics: Any = HostSemantics,
    *,
    evaluate: bool = False,
) -> StepTrace:
    """Record a step where the model is, on meta or the CPU, with the kernels and lists of the CPU, or of "cuda"."""
    tracker = StorageTracker(device_type=_device_of(model))
    kind = CudaSemantics if semantics == "cuda" else semantics
    around = kind(autocast=autocast_dtype(settings.precision), cache=settings.autocast_cache, tracker=tracker)
    evaluated = batch if evaluate else None
    return record_step(model, batch, settings, tracker=tracker, semantics=around, evaluation_batch=evaluated)


def peak_bytes(trace: StepTrace | StorageTracker, part: RecordedPass | None = None) -> int:
    """Return the most that is alive at once, or that a part of the recording adds."""
    tracker = trace if isinstance(trace, StorageTracker) else trace.tracker
    alive = peak = 0
    for _, delta in tracker.events[slice(None) if part is None else slice(part.start, part.end)]:
        alive += delta
        peak = max(peak, alive)
    return peak


def sizes(trace: StepTrace) -> list[int]:
    """Return the deltas in order, less those of scalars and empty tensors.

    A fresh key-value cache is an empty tensor on real devices only; transformers below 5.23 makes the mask's least
    value a scalar there.
    """
    return [delta for _, delta in trace.tracker.events if abs(delta) > 8]


def origins(trace: StepTrace) -> list[tuple[int, str]]:
    """Return size and module of every allocation in order, less those of scalars."""
    return [(delta, trace.tracker.module_of(number)) for number, delta in trace.tracker.events if delta > 8]


def made(trace: StepTrace) -> list[int]:
    """Return the sizes of allocations, sorted, less rotary angles: transformers below 5.23 leaves autocast there."""
    return sorted(delta for delta, module in origins(trace) if not module.endswith("rotary_emb"))


@contextmanager
def allocator_peak(*held: Any) -> Iterator[list[int]]:
    """Yield a list that gets the peak of torch's CPU allocator inside: beside models and batches that are ``held``.

    None of our modes is on. Without oneDNN, which reorders 16-bit operands in memory of its own.
    """
    tensors = [one for each in held for one in (each.values() if isinstance(each, Mapping) else _state(each))]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    found: list[int] = []
    gc.collect()
    gc.disable()
    try:
        with (
            torch.backends.mkldnn.flags(enabled=False),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            yield found
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert len(events) > 100
    alive = peak = sum(storages.values())
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    found.append(peak)


def _device_of(model: torch.nn.Module) -> str:
    return "meta" if any(parameter.is_meta for parameter in model.parameters()) else "cpu"


def _state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def surroundings() -> list[Any]:
    """Return what of the process a recording must leave as it was."""
    return [
        *(torch.get_rng_state().tolist(), random.getstate(), gc.isenabled(), torch.get_num_threads()),
        *(torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        *(torch.get_autocast_dtype("cuda"), torch.get_default_dtype(), torch.get_default_device()),
        fx_config.meta_nonzero_assume_all_nonzero,
        torch.overrides._get_current_function_mode_stack(),  # private, as the next: modes that are still on
        torch._C._len_torch_dispatch_stack(),
    ]


class ExactAllocator:
    """Bytes as requested, without blocks: what a CPU allocator counts."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = self.reserved = self.peak_reserved = self.retries = 0
        self._sizes: dict[Hashable, int] = {}

    def malloc(self, key: Hashable, size_bytes: int) -> int:
        self._sizes[key] = size_bytes
        self.allocated += size_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return size_bytes

    def free(self, key: Hashable) -> int:
        size_bytes = self._sizes.pop(key)
        self.allocated -= size_bytes
        return size_bytes

    def rename(self, key: Hashable, new_key: Hashable) -> None:
        self._sizes[new_key] = self._sizes.pop(key)

    def state(self) -> object:
        return object()  # unlike every other: each pass is replayed

    def empty_cache(self) -> None:
        pass


def replayed_peak(
    trace: StepTrace, settings: StepSettings, optimizer: OptimizerMemory | None = None, micro_batches: int = 1
) -> int:
    """Return the most that the replayed steps of a recording hold, without rounding, clipping and cuBLAS."""
    plan = ReplayPlan(settings, optimizer or OptimizerMemory((), 0, (), ()), (), micro_batches, workspaces=())
    return replay(trace, plan, ExactAllocator()).peak_allocated  # type: ignore[arg-type]


def record_streamed(model: Any, batch: Mapping[str, torch.Tensor], settings: StepSettings) -> tuple[StepTrace, Any]:
    """Record a step on meta whose layers wait on the host; return it and what the host holds and copies."""
    tracker = StorageTracker(padding=False)
    stream = RecordedStream(model, settings, tracker, parameter_facts(model))
    with stream.streaming():
        trace = record_step(model, batch, settings, tracker=tracker, semantics=HostSemantics(tracker=tracker))
    return trace, stream.weights(1)


def uncounted(config: Any, **settings: Any) -> list[str]:
    """Return the notes of an estimate about kernels that allocate what nobody knows."""
    found = estimate(config, **{"batch_size": 2, "gpu": "A100 80GB", "precision": "bf16", **settings})
    return [note for note in found.notes if "beside their outputs" in note]


class Operators(TorchDispatchMode):
    """The operators that run, by their names without namespace and overload."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


@dataclass
class Ran:
    """What a call under CUDA's semantics returned, allocated and ran, and what the host held at most."""

    out: Any
    deltas: list[int]
    operators: list[str]
    flops: int
    host_bytes: int


def under_cuda(
    call: Callable[[], Any], *given: Any, backward: bool = False, in_region: bool = True, **options: Any
) -> Ran:
    """Run a call in an autocast region under CUDA's semantics, and the backward pass of what it returned.

    The tensors that are ``given`` are counted before; deltas are those of the call alone.
    """
    tracker, operators = StorageTracker(), Operators()
    semantics = CudaSemantics(tracker=tracker, **options)
    for tensor in given:
        if tensor is not None:
            tracker.add(tensor)
    start = len(tracker.events)
    with recording(tracker, operators, semantics):
        with semantics.autocast_region() if in_region else nullcontext():
            out = call()
            end = len(tracker.events)
        if backward:
            with tracker.backward():
                run_backward(out, torch.ones_like(out))
    deltas = [delta for _, delta in tracker.events[start:end] if delta]
    return Ran(out, deltas, operators.seen, tracker.flops, semantics.peak_host_bytes)
