"""Record the allocations of one step of the stock ``Trainer``, or of a hand-written loop: forward and backward, and an
evaluation batch.

What the Trainer and accelerate do around the model's own code is done here in the same order: autocast around
``model.forward`` alone, its outputs cast to float32 afterwards, label smoothing outside of it, gradients set to None
between steps. The optimizer does not run: its bytes are known (``optimizer_memory``) and are added by the replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_memopt.binding.fused_loss.deferred_logits import DeferredLogits
from hf_memopt.memory.cuda.semantics import CudaSemantics, run_backward
from hf_memopt.memory.recording.identical_layers import configs_of
from hf_memopt.memory.recording.repeated_layers import RepeatedLayers
from hf_memopt.memory.recording.repeated_slices import repeated_slices
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.step_time.operations import Operation
from hf_memopt.memory.storage_tracker import StorageTracker, recording

if TYPE_CHECKING:
    from hf_memopt.memory.distributed.fully_sharded import FullyShardedStep
    from hf_memopt.memory.distributed.zero import ZeroStep
    from hf_memopt.memory.recording.generation import DecodingSteps

__all__ = ["RecordedPass", "StepTrace", "autocast_dtype", "record_step"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the 16-bit dtype of the autocast region, or None without one."""
    return _AUTOCAST.get(precision)


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """The events of one forward pass, and its backward pass where it has one.

    Attributes:
        start: first event.
        forward_end: first event after the loss is computed.
        end: first event after the graph is freed.
        logits: numbers of the storages that the model returned as logits.
        logits_event: the event at which the first of them was allocated; ``forward_end`` if there are none.
        logits_sequences: autograd's sequence numbers from that event to the loss.
        outputs: numbers of the storages that evaluation gathers.
        generation_end: first event after what evaluation generates; 0 where it generates nothing.
        releases: (event, index of the trainable parameter, number of its gradient) for each gradient that was released.
    """

    start: int
    forward_end: int
    end: int
    logits: frozenset[int] = frozenset()
    logits_event: int = 0
    logits_sequences: range = range(0)
    outputs: tuple[int, ...] = ()
    releases: tuple[tuple[int, int, int], ...] = ()
    generation_end: int = 0


@dataclass(slots=True)
class StepTrace:
    """A recorded step: the tracker's events, the passes among them, and which storages are what.

    ``micro_batches`` has the first pass of a step, whose gradients are new, and, where a step has several, the second,
    which adds to them; under FSDP2 two such pairs (``_passes``). ``gradient_of`` has the gradients that are held after
    them, by the index of the trainable parameter. ``operations`` has (cost, times) of the operations of each of
    ``micro_batches``, in order. ``gathered_bytes`` are those of sharded weights that a pass gathers, as often as it
    does. ``notes`` say what was changed in the model for the recording. ``replayed`` keeps what replays derive from it.
    """

    tracker: StorageTracker
    weights: tuple[int, ...]
    inputs: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    gradient_of: dict[int, int] = field(default_factory=dict)
    micro_batches: list[RecordedPass] = field(default_factory=list)
    evaluation: RecordedPass | None = None
    evaluation_inputs: tuple[int, ...] = ()
    flops: list[int] = field(default_factory=list)
    operations: list[list[tuple[Operation, int]]] = field(default_factory=list)
    host_bytes: int = 0
    gathered_bytes: int = 0
    notes: tuple[str, ...] = ()
    replayed: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)


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
    layers: RepeatedLayers | None = None,
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
        layers: of ``model``: most of them are left out, and ``lengthen`` has to add their events; None for all layers.
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
    trace = StepTrace(tracker, _weights(model, tracker), _numbers(batch, tracker))
    releasing = parameters if releases_gradients else []
    recorder = _Recorder(model, settings, tracker, semantics, sharded)
    held: list[int] = []
    _to_training(model, modules)
    try:
        with ExitStack() as around:
            idle = [] if layers is None else layers.left_out(model)
            watching = tracker.watching(model, idle)
            repeating = repeated_slices(tracker)
            for context in (recording(tracker, semantics), watching, recorder.releasing(releasing), repeating):
                around.enter_context(context)
            around.enter_context(torch.inference_mode(False))  # whatever the caller is in; gradients are on with it
            trace.notes = around.enter_context(_every_layer(modules))
            if sharded is not None:
                trace.notes += sharded.notes
                trace.gathered_bytes = sharded.gathered_bytes
            if layers is not None:
                around.enter_context(layers.cut(model, tracker))
            for reduces in _passes(settings, is_cut=micro_batch is not None):
                flops = tracker.flops
                if sharded is not None:
                    sharded.begin(reduces=reduces)
                with tracker.counting():
                    trace.micro_batches.append(recorder.train(batch if micro_batch is None else micro_batch))
                trace.flops.append(tracker.flops - flops)
                if sharded is not None:
                    held += _numbers([[parameter.grad for parameter in parameters], sharded.gradients], tracker)
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
                trace.evaluation_inputs = _numbers(evaluation_batch, tracker)
                trace.evaluation = recorder.evaluate(evaluation_batch)
    except NotEstimableError:
        raise
    except Exception as error:  # of the model's code, which may raise anything
        raise _not_estimable(model, error) from error
    finally:
        tracker.close()
        _drop_gradients(weights)
        _to_training(model, modules)
    trace.host_bytes = semantics.peak_host_bytes
    trace.operations = [[(cost, 1) for _, cost in costs] for costs in tracker.operations]
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
    name, cause = type(model).__name__, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
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
    try:
        for (_, name), (holder, _) in found.items():
            setattr(holder, name, 0.0)
        yield (f"{changed}: with every layer, the most that a step takes",) if found else ()
    finally:
        for (_, name), (holder, value) in found.items():
            setattr(holder, name, value)


class _Recorder:
    """Runs passes of a model and notes the events at which their parts begin."""

    def __init__(
        self,
        model: nn.Module,
        settings: StepSettings,
        tracker: StorageTracker,
        semantics: CudaSemantics,
        sharded: FullyShardedStep | ZeroStep | None,
    ) -> None:
        self._model = model
        self._sharded = sharded
        self._settings = settings
        self._tracker = tracker
        self._semantics = semantics
        self._smoother = _label_smoother(settings.label_smoothing_factor)
        self._releases: list[tuple[int, int, int]] = []
        self._outputs: Any = None  # the variable of a hand-written loop

    def train(self, batch: Mapping[str, torch.Tensor]) -> RecordedPass:
        start = len(self._tracker.events)
        loss, outputs, logits = self._forward(batch)
        if self._settings.loop == "manual":
            self._outputs = outputs  # frees those of the pass before
        del outputs
        if self._settings.gradient_accumulation_steps > 1:
            loss = loss / self._settings.gradient_accumulation_steps
        forward_end, logits_of = len(self._tracker.events), self._logits(logits)
        gradient = torch.ones_like(loss)
        with self._tracker.backward():
            run_backward(loss, gradient)
            if self._sharded is not None:
                self._sharded.end()
        del loss, gradient
        releases, self._releases = tuple(self._releases), []
        return RecordedPass(start, forward_end, len(self._tracker.events), *logits_of, (), releases)

    def drop_outputs(self) -> None:
        """Free the outputs that a hand-written loop still holds."""
        self._outputs = None

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> RecordedPass:
        if not self._settings.predict_with_generate or self._settings.prediction_loss_only:
            return self._evaluate(batch)
        from hf_memopt.memory.recording.generation import RUN_STEPS, DecodingSteps, add_missing_steps

        steps = DecodingSteps(RUN_STEPS if batch["labels"].is_meta else None)  # a real device runs them all
        found = self._evaluate(batch, steps)
        inserted = add_missing_steps(self._tracker, steps)
        if inserted is None:
            return self._evaluate(batch, DecodingSteps(limit=None))
        events, storages, first = inserted
        return replace(
            found,
            forward_end=found.forward_end + events,
            end=found.end + events,
            logits=frozenset(number + storages for number in found.logits),
            logits_event=found.logits_event + events,
            generation_end=found.generation_end + events,
            outputs=tuple(number + storages if number >= first else number for number in found.outputs),
        )

    def _evaluate(self, batch: Mapping[str, torch.Tensor], steps: DecodingSteps | None = None) -> RecordedPass:
        start = len(self._tracker.events)
        self._model.eval()
        generated = () if steps is None else self._generated(batch, steps)
        generation_end = 0 if steps is None else len(self._tracker.events)
        with torch.no_grad():
            loss, outputs, logits = self._forward(batch)
            loss = loss.mean()
        ignored = {"loss", *getattr(self._model.config, "keys_to_ignore_at_inference", ("past_key_values",))}
        kept = {name: value for name, value in outputs.items() if name not in ignored}
        kept |= {name: batch[name] for name in ("labels", "start_positions", "end_positions") if name in batch}
        gathered = () if self._settings.prediction_loss_only else _numbers(generated or kept, self._tracker)
        forward_end = len(self._tracker.events)
        del outputs, kept, loss, generated
        of_logits = self._logits(logits)
        end = len(self._tracker.events)
        return RecordedPass(start, forward_end, end, *of_logits, gathered, generation_end=generation_end)

    def _generated(self, batch: Mapping[str, torch.Tensor], steps: DecodingSteps) -> tuple[torch.Tensor, ...]:
        """Return the tokens and labels that evaluation gathers instead of logits."""
        from hf_memopt.memory.recording.generation import generate

        around = (self._tracker, self._semantics, self._as_returned)
        return generate(self._model, batch, self._settings, *around, steps)

    def _as_returned(self, outputs: Any) -> Any:
        """Return the outputs as accelerate does: in float32 under autocast."""
        from accelerate.utils import convert_to_fp32

        return outputs if autocast_dtype(self._settings.precision) is None else convert_to_fp32(outputs)

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any, frozenset[int]]:
        """Return the loss, the outputs that accelerate returns, and the storages of the logits that the model made."""
        self._semantics.deferred_at = None
        inputs = dict(batch)
        labels = inputs.pop("labels") if self._smoother is not None and "labels" in inputs else None
        with self._semantics.autocast_region():
            outputs = self._model(**inputs)
        made = frozenset(_numbers({name: value for name, value in outputs.items() if "logits" in name}, self._tracker))
        outputs = self._as_returned(outputs)
        if labels is None or self._smoother is None:
            return outputs["loss"], outputs, made
        return self._smoother(outputs, labels, shift_labels=_is_causal(self._model)), outputs, made

    def _logits(self, logits: frozenset[int]) -> tuple[frozenset[int], int, range]:
        """Return the storages of the logits, the event of the first allocation, and the sequence numbers since then."""
        tracker, deferred = self._tracker, self._semantics.deferred_at
        if deferred is not None and not logits:
            return logits, deferred[0], range(deferred[1], tracker.sequence())
        if not logits:
            return logits, len(tracker.events), range(0)
        first = min(logits)
        return logits, tracker.allocated_at[first], range(tracker.sequences[first], tracker.sequence())

    def releasing(self, parameters: list[nn.Parameter]) -> ExitStack:
        """Return a context in which each gradient of ``parameters`` is dropped as soon as it is complete."""
        hooks = ExitStack()
        for index, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._release(index))  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)
        return hooks

    def _release(self, index: int) -> Any:
        def release(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                event = len(self._tracker.events)
                self._releases.append((event, index, self._tracker.number(parameter.grad)))
                parameter.grad = None

        return release


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


def _numbers(tensors: Any, tracker: StorageTracker) -> tuple[int, ...]:
    """Register the tensors in nested mappings and sequences and return the numbers of their storages."""
    leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
    numbers = [tracker.add(leaf) for leaf in leaves if not isinstance(leaf, DeferredLogits)]  # which have no storage
    return tuple(number for number in dict.fromkeys(numbers) if number >= 0)


def _label_smoother(factor: float) -> Any:
    if not factor:
        return None
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=factor)


def _is_causal(model: Any) -> bool:
    """Return whether stock ``Trainer.compute_loss`` shifts the labels for label smoothing."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
