"""What a recording of a step says, and its forward and backward passes and evaluation batches, as the stock ``Trainer``
and accelerate run them.

What they do around the model's own code is done here in the same order: autocast around ``model.forward`` alone, its
outputs cast to float32 afterwards, label smoothing outside of it.

The second pass of a step is made of the recorded first where it does the same but for its gradients: in the first one
they stay where backward put them, in the second each is added in place to the one that is there, and freed at once. Any
other difference (a cache that the model fills, a gradient that autograd copies) is found, and the second pass recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_memopt.prediction.memory.cuda import CudaSemantics, run_backward
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.memory.step_time import VIEW, Operation, operation_of
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.fused_loss import DeferredLogits, loss_alone
from hf_memopt.training.binding.model import unwrap_model

if TYPE_CHECKING:
    from hf_memopt.prediction.memory.optimizers import ParameterFacts
    from hf_memopt.prediction.memory.recording.generation import DecodingSteps
    from hf_memopt.prediction.memory.recording.streamed import HostWeights
    from hf_memopt.prediction.memory.recording.trainer_loss import TrainerLoss

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """The events of one forward pass, and its backward pass where it has one."""

    start: int  # first event
    forward_end: int  # first event after the loss is computed
    end: int  # first event after the graph is freed
    logits: frozenset[int] = frozenset()  # numbers of the storages that the model returned as logits
    logits_event: int = 0  # at which the first of them was allocated; ``forward_end`` if there are none
    logits_sequences: range = range(0)  # autograd's sequence numbers from that event to the loss
    outputs: tuple[int, ...] = ()  # numbers of the storages that evaluation gathers
    releases: tuple[tuple[int, int, int], ...] = ()  # event, index of the parameter, number of its gradient
    generation_end: int = 0  # first event after what evaluation generates; 0 where it generates nothing
    computed: range = range(0)  # events of the decoding steps that were computed, not run, in steps of one of them


@dataclass(slots=True)
class StepTrace:
    """A recorded step: the tracker's events, the passes among them, and which storages are what.

    ``micro_batches`` has the first pass of a step, whose gradients are new, and, where a step has several, the second,
    which adds to them. ``tracker.operations`` are those of each of them.
    """

    tracker: StorageTracker
    weights: tuple[int, ...]
    inputs: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    gradient_of: dict[int, int] = field(default_factory=dict)  # held after the passes, by the trainable parameter
    unused: tuple[int, ...] = ()  # trainable parameters to which no pass gives a gradient
    micro_batches: list[RecordedPass] = field(default_factory=list)
    evaluation: RecordedPass | None = None
    evaluation_inputs: tuple[int, ...] = ()
    flops: list[int] = field(default_factory=list)
    host_bytes: int = 0
    notes: tuple[str, ...] = ()  # what was changed in the model for the recording, and assumed of it
    trainable: tuple[ParameterFacts, ...] = ()
    parameters: int = 0  # the number of all weights
    loading: tuple[tuple[tuple[Any, int], ...], ...] = ()  # of quantised weights: events between two emptied caches
    on_host: HostWeights | None = None
    replayed: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)  # what replays derive from it


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the 16-bit dtype of the autocast region, or None without one."""
    return _AUTOCAST.get(precision)


@dataclass(slots=True, eq=False)
class PassRecorder:
    """Runs passes of a model and notes the events at which their parts begin."""

    model: nn.Module
    settings: StepSettings
    tracker: StorageTracker
    semantics: CudaSemantics
    loss: TrainerLoss | None = None
    _releases: list[tuple[int, int, int]] = field(default_factory=list)
    _outputs: Any = None  # the variable of a hand-written loop

    def train(self, batch: Mapping[str, torch.Tensor]) -> RecordedPass:
        start = len(self.tracker.events)
        loss, outputs, logits = self._forward(batch)
        if self.settings.loop != "trainer":
            self._outputs = outputs  # frees those of the pass before
        del outputs
        if self.settings.gradient_accumulation_steps > 1:
            loss = loss / self.settings.gradient_accumulation_steps
        forward_end, logits_of = len(self.tracker.events), self._logits(logits)
        gradient = torch.ones_like(loss)
        with self.tracker.backward():
            run_backward(loss, gradient)
        del loss, gradient
        releases, self._releases = tuple(self._releases), []
        found = RecordedPass(start, forward_end, len(self.tracker.events), *logits_of, (), releases)
        if self.settings.loop == "function":
            self.drop_outputs()  # after the events of the pass: the optimizer steps before the function returns
        return found

    def drop_outputs(self) -> None:
        """Free the outputs that a hand-written loop still holds."""
        self._outputs = None

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> RecordedPass:
        if not self.settings.predict_with_generate or self.settings.prediction_loss_only:
            return self._evaluate(batch)
        from hf_memopt.prediction.memory.recording.generation import RUN_STEPS, DecodingSteps, add_missing_steps

        steps = DecodingSteps(RUN_STEPS if batch["labels"].is_meta else None)  # a real device runs them all
        found = self._evaluate(batch, steps)
        inserted = add_missing_steps(self.tracker, steps)
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
            computed=range(steps.starts[-1], steps.starts[-1] + events, max(events // max(steps.missing, 1), 1)),
            outputs=tuple(number + storages if number >= first else number for number in found.outputs),
        )

    def _evaluate(self, batch: Mapping[str, torch.Tensor], steps: DecodingSteps | None = None) -> RecordedPass:
        start = len(self.tracker.events)
        self.model.eval()
        generated: tuple[torch.Tensor, ...] = ()
        if steps is not None:
            from hf_memopt.prediction.memory.recording.generation import generate

            around = self.tracker, self.semantics, self._as_returned
            generated = generate(self.model, batch, self.settings, *around, steps)
        generation_end = 0 if steps is None else len(self.tracker.events)
        with torch.no_grad(), loss_alone() if self.settings.prediction_loss_only else nullcontext():
            loss, outputs, logits = self._forward(batch)
            loss = loss.mean()
        ignored = {"loss", *getattr(self.model.config, "keys_to_ignore_at_inference", versions.CACHES)}
        kept = {name: value for name, value in outputs.items() if name not in ignored}
        kept |= {name: batch[name] for name in ("labels", "start_positions", "end_positions") if name in batch}
        gathered = () if self.settings.prediction_loss_only else storage_numbers(generated or kept, self.tracker)
        forward_end = len(self.tracker.events)
        del outputs, kept, loss, generated
        of_logits = self._logits(logits)
        end = len(self.tracker.events)
        return RecordedPass(start, forward_end, end, *of_logits, gathered, generation_end=generation_end)

    def _as_returned(self, outputs: Any) -> Any:
        """Return the outputs as accelerate does: in float32 under autocast."""
        from accelerate.utils import convert_to_fp32

        return outputs if autocast_dtype(self.settings.precision) is None else convert_to_fp32(outputs)

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any, frozenset[int]]:
        """Return the loss, the outputs that accelerate returns, and the storages of the logits that the model made."""
        self.semantics.deferred_at = None
        if self.loss is not None:
            wants_outputs = not (self.model.training or self.settings.prediction_loss_only)
            return *self.loss.compute(self.model, batch, with_outputs=wants_outputs), frozenset()
        inputs = dict(batch)
        factor = self.settings.label_smoothing_factor
        labels = inputs.pop("labels", None) if factor else None
        with self.semantics.autocast_region():
            outputs = self.model(**inputs)
        made = frozenset(
            storage_numbers({name: value for name, value in outputs.items() if "logits" in name}, self.tracker)
        )
        outputs = self._as_returned(outputs)
        if labels is None:
            return outputs["loss"], outputs, made
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.trainer_pt_utils import LabelSmoother

        is_causal = type(unwrap_model(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return LabelSmoother(epsilon=factor)(outputs, labels, shift_labels=is_causal), outputs, made

    def called(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Return what a model that accelerate has prepared returns."""
        with self.semantics.autocast_region():
            outputs = forward(*args, **inputs)
        return self._as_returned(outputs)

    def _logits(self, logits: frozenset[int]) -> tuple[frozenset[int], int, range]:
        """Return the storages of the logits, the event of the first allocation, and the sequence numbers since then."""
        tracker, deferred = self.tracker, self.semantics.deferred_at
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
            release = partial(self._release, index)
            handle = parameter.register_post_accumulate_grad_hook(release)  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)
        return hooks

    def _release(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            event = len(self.tracker.events)
            self._releases.append((event, index, self.tracker.number(parameter.grad)))
            parameter.grad = None


def storage_numbers(tensors: Any, tracker: StorageTracker) -> tuple[int, ...]:
    """Register the tensors in nested mappings and sequences and return the numbers of their storages."""
    leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
    numbers = [tracker.add(leaf) for leaf in leaves if not isinstance(leaf, DeferredLogits)]  # which have no storage
    return tuple(number for number in dict.fromkeys(numbers) if number >= 0)


# ---- The second pass of a step --------------------------------------------------------------------------------------


class Complete(NamedTuple):
    """A gradient that is complete."""

    event: int  # the first after it
    number: int  # of its storage
    adding: Operation  # what it costs to add it to one that is there


@contextmanager
def noting_gradients(parameters: Iterable[nn.Parameter], tracker: StorageTracker) -> Iterator[list[Complete]]:
    """Yield a list to which each gradient that is complete inside is added."""
    found: list[Complete] = []

    def note(tensor: torch.Tensor) -> None:
        if (grad := tensor.grad) is not None:
            add = torch.ops.aten.add_.Tensor
            cost = operation_of(add, (grad, tensor), {}, grad, in_backward=True, on_host=tracker.ignored)
            found.append(Complete(len(tracker.events), tracker.number(grad), cost))

    with ExitStack() as hooks:
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)
        yield found


def second_pass(tracker: StorageTracker, first: RecordedPass, complete: Sequence[Complete]) -> RecordedPass | None:
    """Add the events and operations of the second pass to the tracker's; None where it may do something else."""
    events, of_first = tracker.events, tracker.events[first.start : first.end]
    seen = Counter(number for number, _ in of_first)  # twice where it is freed
    gradients = {one.number for one in complete}
    stays = {number for number, times in seen.items() if times == 1}
    if stays != gradients or len(gradients) < len(complete) or len(events) > first.end:
        return None
    # what was there before, and gradients that the engine itself made: copies, and sums over several uses
    if any(tracker.allocated_at[number] < first.start for number in seen) or any(
        tracker.sequences[number] < 0 for number in gradients
    ):
        return None
    start, places = len(events), [one.event for one in complete]
    names = {number: len(tracker.sizes) + place for place, number in enumerate(seen)}

    def moved(event: int, frees: int) -> int:
        return start + event - first.start + frees

    for column in (tracker.sizes, tracker.sequences, tracker.places):
        column += [column[number] for number in seen]
    allocated_at = (tracker.allocated_at[number] for number in seen)
    tracker.allocated_at += [moved(event, bisect_right(places, event)) for event in allocated_at]
    done = first.start
    for one in complete:
        events += [(names[number], delta) for number, delta in of_first[done - first.start : one.event - first.start]]
        events.append((names[one.number], -tracker.sizes[one.number]))
        done = one.event
    events += [(names[number], delta) for number, delta in of_first[done - first.start :]]
    tracker.recomputed += [
        (moved(begin, bisect_right(places, begin)), moved(end, bisect_left(places, end)))
        for begin, end in tracker.recomputed
        if begin >= first.start
    ]
    operations = tracker.operations[-1] + Counter(one.adding for one in complete)
    operations[VIEW[True]] -= len(complete)  # by which the first pass takes a gradient as it is
    tracker.operations.append(+operations)
    return replace(
        first,
        start=start,
        forward_end=moved(first.forward_end, 0),
        end=len(events),
        logits=frozenset(names[number] for number in first.logits),
        logits_event=moved(first.logits_event, 0),
    )
