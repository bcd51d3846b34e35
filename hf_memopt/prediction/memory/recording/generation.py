"""Record what ``Seq2SeqTrainer`` generates in evaluation (``predict_with_generate``): encoder, key-value cache, beams.

The model's own ``generate`` runs, on the meta device too. It asks for values at a few places only, whether all rows are
finished above all, and is told that no row ends before the length limit: the most that an evaluation can take.

Every decoding step allocates what the one before did, a token longer, so a few are run and the others are computed from
them (``add_missing_steps``); where three steps do not prove that, all are run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationMixin, StoppingCriteria

from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.binding.model import unwrap_model
from hf_memopt.training.binding.undo import set_attribute

RUN_STEPS = 7  # the prompt, a step that grows the first cache, three that prove the period, one copied, the last
_DEFAULT_LENGTH = 20  # of GenerationConfig, transformers 5.8.1 to 5.23.0


@dataclass(slots=True)
class DecodingSteps:
    """The decoding steps of a recorded generation."""

    limit: int | None  # steps to run at most; None for all
    starts: list[int] = field(default_factory=list)  # the event at which the forward pass of each begins
    missing: int = 0  # how many were not run
    loop_end: int = 0  # the event at which the last of them ended


def check_generation(model: nn.Module) -> None:
    """Raise ValueError for a model whose class has no ``generate``."""
    if not isinstance(unwrap_model(model), GenerationMixin):
        raise ValueError(
            f"predict_with_generate=True needs a model that generates, which {type(unwrap_model(model)).__name__} does "
            "not; expected an encoder-decoder or a causal LM. Pass predict_with_generate=False"
        )


def generate(
    model: Any,
    batch: Mapping[str, torch.Tensor],
    settings: StepSettings,
    tracker: StorageTracker,
    semantics: CudaSemantics,
    as_returned: Callable[[Any], Any],
    steps: DecodingSteps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate as ``Seq2SeqTrainer.prediction_step`` does and return the tokens and the padded labels.

    accelerate puts an autocast region around ``model.forward``, and ``as_returned`` is what it does to the outputs; the
    encoder, which ``generate`` calls by itself, runs outside of it.
    """
    # made from the labels, which Seq2SeqTrainer takes out
    batch = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    options = {"max_length": settings.generation_max_length, "num_beams": settings.generation_num_beams}
    given = {name: value for name, value in options.items() if value is not None}
    most = settings.generation_max_length or int(model.generation_config.max_length or _DEFAULT_LENGTH)
    if settings.generation_max_length is None and (new := model.generation_config.max_new_tokens) is not None:
        most = new + (1 if model.config.is_encoder_decoder else batch["input_ids"].shape[1])
    longest = _Longest(most, steps, tracker)
    inner: Any = unwrap_model(model)
    forward = inner.forward

    @wraps(forward)  # generate reads the parameters of forward
    def as_accelerate(*args: Any, **kwargs: Any) -> Any:
        steps.starts.append(len(tracker.events))
        if inner is not model:  # PEFT's generate calls the model within, past what accelerate put around its own
            return forward(*args, **kwargs)
        with semantics.autocast_region():
            outputs = forward(*args, **kwargs)
        return as_returned(outputs)

    handle = set_attribute(inner, "forward", as_accelerate)
    try:
        with tracker.answering(longest.answer):
            tokens = _run(model, batch)(**given, stopping_criteria=[longest])
    finally:
        handle.remove()
    return tokens, _padded(batch["labels"], most)


def _run(model: Any, batch: Mapping[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the model's ``generate`` with the batch as its arguments.

    Whisper's own reads the tokens on the host to go on to the next window of 30 seconds. Of it only the decoding of one
    window is run, from the copy of the features that it cuts out.
    """
    inner: Any = unwrap_model(model)
    if type(inner).generate is GenerationMixin.generate:
        return partial(model.generate, **batch)
    one_window: Any = partial(GenerationMixin.generate, inner)
    return partial(one_window, **{**batch, "input_features": batch["input_features"].clone()})


@dataclass
class _Longest(StoppingCriteria):
    """No row is finished before it has ``most`` tokens; answers what ``generate`` asks about values accordingly."""

    _most: int
    _steps: DecodingSteps
    _tracker: StorageTracker
    _done: bool = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
        missing = self._most - input_ids.shape[1]
        self._done = missing <= 0 or len(self._steps.starts) == self._steps.limit
        self._steps.missing = max(missing, 0)
        return torch.full((input_ids.shape[0],), self._done, device=input_ids.device, dtype=torch.bool)  # type: ignore[return-value]

    def answer(self, function: str, dtype: torch.dtype) -> bool | int:
        """Return what the function reads: beam search whether it goes on, a loop of samples whether it has ended.

        Beam search also reads the length of what it made. Everything else asks for something unusual in the inputs.
        """
        if dtype != torch.bool:
            return self._most
        self._steps.loop_end = len(self._tracker.events)
        return not self._done if function == "_beam_search" else self._done


def _padded(labels: torch.Tensor, length: int) -> torch.Tensor:
    """Return the labels padded to ``length`` in a new tensor, as the Trainer does, or as they are."""
    if labels.shape[-1] >= length:
        return labels
    padded = torch.ones((labels.shape[0], length), dtype=labels.dtype, device=labels.device)
    padded[:, : labels.shape[-1]] = labels
    return padded


# ---- Steps that were not run ----------------------------------------------------------------------------------------


class Inserted(NamedTuple):
    """How many events and storages were inserted, and the first storage whose number grew by that."""

    events: int
    storages: int
    first: int


def add_missing_steps(tracker: StorageTracker, steps: DecodingSteps) -> Inserted | None:
    """Insert the decoding steps that were not run into a closed recording, before the last one.

    Each is a copy of the step before it: the same events, each storage as much larger as it grew from step to step, and
    in place of the storages of a step those of the next. The last step is the one that was run, with larger storages.

    Returns:
        None if the steps do not repeat; then the recording is as it was.
    """
    count, last = steps.missing, steps.starts[-1]
    if not count:
        return Inserted(0, 0, len(tracker.sizes))
    ranges = [*zip(steps.starts[-4:-1], steps.starts[-3:], strict=True), (last, len(tracker.events))]
    before, between, copied, ending = (_Step.of(tracker, *pair) for pair in ranges)
    loop_events = steps.loop_end - last
    growth = copied.growth(between)
    if (
        before.pattern != between.pattern
        or between.pattern != copied.pattern
        or ending.pattern[:loop_events] != copied.pattern[:loop_events]
        or growth != between.growth(before)
        or any(place < -len(before.sizes) for place, _ in copied.pattern)  # frees what is older than the step before
    ):
        return None
    allocations = len(copied.sizes)
    in_loop = sum(is_new for _, is_new in ending.pattern[:loop_events])
    sizes = [
        size + number * more for number in range(1, count + 1) for size, more in zip(copied.sizes, growth, strict=True)
    ]
    sizes += [size + count * more for size, more in zip(ending.sizes[:in_loop], growth, strict=False)]
    tracker.sizes[ending.first : ending.first + in_loop] = sizes
    origins = slice(copied.first, ending.first)
    for column in (tracker.sequences, tracker.places):
        column[ending.first : ending.first] = column[origins] * count
    shift = count * allocations
    moved = (
        (copied.first + place + number * allocations, is_new)
        for number in range(1, count + 1)
        for place, is_new in copied.pattern
    )
    ends = ((ending.first + place, is_new) for place, is_new in ending.pattern)
    shifted = ((storage + shift if storage >= between.first else storage, is_new) for storage, is_new in ends)
    events, allocated_at, sizes = tracker.events, tracker.allocated_at, tracker.sizes
    del events[last:], allocated_at[ending.first :]
    for storage, is_new in chain(moved, shifted):
        if is_new:
            allocated_at.append(len(events))
        events.append((storage, sizes[storage] if is_new else -sizes[storage]))
    return Inserted(count * len(copied.pattern), shift, between.first)


@dataclass(frozen=True, slots=True)
class _Step:
    """A stretch of events: (storage, counted from the first one that it allocates; whether it is allocated)."""

    first: int
    sizes: list[int]
    pattern: list[tuple[int, bool]]

    @classmethod
    def of(cls, tracker: StorageTracker, start: int, end: int) -> _Step:
        first, last = (bisect_left(tracker.allocated_at, event) for event in (start, end))
        numbers = (number for number, _ in tracker.events[start:end])
        pattern = [
            (number - first, tracker.allocated_at[number] == event) for event, number in enumerate(numbers, start)
        ]
        return cls(first, tracker.sizes[first:last], pattern)

    def growth(self, before: _Step) -> list[int]:
        """Return how much larger each storage is than in the step before."""
        return [size - smaller for size, smaller in zip(self.sizes, before.sizes, strict=False)]
