"""Make the second pass of a step out of the recorded first: it does the same, and adds its gradients to those there.

In the first pass a parameter's gradient stays where backward put it. In the second it is added in place to the one that
is there, and freed at once. Anything else that differs between passes (a cache that the model fills, a gradient that
autograd copies) is found, and the second pass is then recorded as it runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from hf_memopt.memory.recording.passes import RecordedPass
from hf_memopt.memory.step_time import VIEW, Operation, operation_of
from hf_memopt.memory.tracking import StorageTracker


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
            cost = operation_of(add, (grad, tensor), {}, grad, flops=0, in_backward=True, on_host=tracker.ignored)
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
