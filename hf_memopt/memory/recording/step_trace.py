"""What a recording of a step says: the events of its passes, and which storages are what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_memopt.memory.storage_tracker import StorageTracker

__all__ = ["RecordedPass", "StepTrace"]


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
    them, by the index of the trainable parameter. ``tracker.operations`` are those of each of ``micro_batches``.
    ``gathered_bytes`` are those of sharded weights that a pass gathers, as often as it does. ``notes`` say what was
    changed in the model for the recording. ``replayed`` keeps what replays derive from it.
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
    host_bytes: int = 0
    gathered_bytes: int = 0
    notes: tuple[str, ...] = ()
    replayed: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
