"""Record the allocations of one step of the stock ``Trainer``, or of a hand-written loop: forward and backward, and an
evaluation batch.

``passes`` runs the parts as the Trainer and accelerate do. The optimizer does not run: its bytes are known
(``optimizer_memory``) and are added by the replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_memopt.binding.handles import set_attribute, undo_all
from hf_memopt.errors import reason
from hf_memopt.memory.cuda.semantics import CudaSemantics
from hf_memopt.memory.recording.isolation import configs_of, recording
from hf_memopt.memory.recording.passes import PassRecorder, autocast_dtype, storage_numbers
from hf_memopt.memory.recording.step_trace import StepTrace
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.storage_tracker import StorageTracker

if TYPE_CHECKING:
    from hf_memopt.memory.distributed.fully_sharded import FullyShardedStep
    from hf_memopt.memory.distributed.zero import ZeroStep

__all__ = ["record_step"]


def record_step(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    settings: StepSettings,
    *,
    micro_batch: Mapping[str, torch.Tensor] | None = None,
    releases_gradients: bool = False,
    evaluation_batch: Mapping[str, torch.Tensor] | None = None,
    tracker: StorageTracker | None = None,
    semantics: CudaSemantics | None = None,
    sharded: FullyShardedStep | ZeroStep | None = None,
) -> StepTrace:
    """Record a step of ``model`` on ``batch``; both stay on their device, meta or a real CPU.

    Layers that are dropped at random (``layerdrop``) all run, the most that a step can take.

    Args:
        model: in training mode afterwards, without gradients.
        batch: of one forward and backward pass of the Trainer.
        settings: with nothing "auto".
        micro_batch: the first rows of ``batch``, where it is cut into micro-batches; None for the whole.
        releases_gradients: whether each parameter steps, and frees its gradient, within the backward pass.
        evaluation_batch: of one evaluation pass; None for no evaluation.
        tracker: counts; a new one for the meta device unless given.
        semantics: of the device to simulate; CUDA's, unless given.
        sharded: simulates the sharding of ``model`` over processes; None for a whole model.

    Raises:
        ValueError: the model has no trainable parameter.
        NotEstimableError: the model's code asks for values that only real data has, or fails; a recurrent layer of
            cuDNN.
    """
    weights = list(model.parameters())
    parameters = [parameter for parameter in weights if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"model=<{type(model).__name__}> has no trainable parameter; expected one or more with requires_grad=True. "
            "Call model.requires_grad_(True)"
        )
    modules = list(model.modules())
    _refuse_recurrent_layers(model, modules)
    tracker = StorageTracker(padding=settings.padding) if tracker is None else tracker
    if semantics is None:
        autocast = autocast_dtype(settings.precision)
        semantics = CudaSemantics(autocast=autocast, cache=settings.autocast_cache, tracker=tracker)
    _drop_gradients(weights)
    trace = StepTrace(tracker, _weights(model, tracker), storage_numbers(batch, tracker))
    releasing = parameters if releases_gradients else []
    recorder = PassRecorder(model, settings, tracker, semantics, sharded)
    held: list[int] = []
    _to_training(model, modules)
    try:
        with ExitStack() as around:
            for context in (recording(tracker, semantics), tracker.watching(model), recorder.releasing(releasing)):
                around.enter_context(context)
            around.enter_context(torch.inference_mode(False))  # whatever the caller is in; gradients are on with it
            trace.notes = around.enter_context(_every_layer(modules))
            if sharded is not None:
                trace.notes += sharded.notes
                trace.gathered_bytes = sharded.gathered_bytes
            for reduces in _passes(settings, is_cut=micro_batch is not None):
                flops = tracker.flops
                if sharded is not None:
                    sharded.reduces = reduces
                with tracker.counting():
                    trace.micro_batches.append(recorder.train(batch if micro_batch is None else micro_batch))
                trace.flops.append(tracker.flops - flops)
                if sharded is not None:
                    held += storage_numbers([[parameter.grad for parameter in parameters], sharded.gradients], tracker)
            recorder.drop_outputs()
            gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
            trace.gradient_of = {index: tracker.number(grad) for index, grad in gradients if grad is not None}
            del gradients
            released = [number for _, _, number in trace.micro_batches[0].releases]
            trace.gradients = tuple(dict.fromkeys([*held, *trace.gradient_of.values(), *released]))
            _drop_gradients(weights)
            if sharded is not None:
                sharded.drop_gradients()
            if evaluation_batch is not None:
                trace.evaluation_inputs = storage_numbers(evaluation_batch, tracker)
                trace.evaluation = recorder.evaluate(evaluation_batch)
    except (NotEstimableError, MemoryError):
        raise
    except Exception as error:  # of the model's code, which may raise anything
        raise _not_estimable(model, error) from error
    finally:
        tracker.close()
        _drop_gradients(weights)
        _to_training(model, modules)
    trace.host_bytes = semantics.peak_host_bytes
    return trace


def _passes(settings: StepSettings, *, is_cut: bool) -> tuple[bool, ...]:
    """Return the passes to record: for each, whether its gradients are reduced over processes that share weights.

    The first pass of a step has new gradients, and each later one adds to them, so two say what all do. Under FSDP2
    those of all accumulation steps but the last add up whole gradients, which accelerate's ``no_sync`` asks for; those
    of the last one, several where the batch is cut, reduce them, each to the gradients of the shards.
    """
    steps, keeps = settings.gradient_accumulation_steps, not settings.zero_grad_to_none
    if settings.engine != "fsdp2":
        return (True,) * (2 if steps > 1 or is_cut or keeps else 1)
    waiting = min((steps - 1) * (2 if is_cut else 1), 2)
    return (False,) * waiting + (True,) * (2 if is_cut or keeps else 1)


def _drop_gradients(weights: Iterable[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None


def _to_training(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    if not all(module.training for module in modules):
        model.train()


def _refuse_recurrent_layers(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.RNNBase):
            name = next(name for name, found in model.named_modules() if found is module)
            raise NotEstimableError(
                f"not estimable: {name or 'the model'} is an nn.{type(module).__name__}, for which cuDNN reserves "
                "memory by undocumented rules; expected a model without recurrent layers. Measure the step on the GPU"
            )


def _not_estimable(model: nn.Module, error: Exception) -> NotEstimableError:
    """Return the error that quotes what the model's code failed with."""
    name, cause = type(model).__name__, reason(error).splitlines()[0]
    if "meta" in str(error).lower():
        return NotEstimableError(
            f"not estimable: {name} does not run on the meta device, where tensors have shapes but no values ({cause})"
        )
    return NotEstimableError(f"not estimable: {name} fails with this batch and set-up ({cause})")


@contextmanager
def _every_layer(modules: Sequence[nn.Module]) -> Iterator[tuple[str, ...]]:
    """Let no layer be dropped at random inside; yield a note about it, or nothing where none would be dropped."""
    holders = [*modules, *configs_of(modules)]
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

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                numbers.setdefault(tracker.add(tensor))

    visit(model)
    return tuple(number for number in numbers if number >= 0)
