"""Derive the trace of a step for any number of rows of a batch, at fixed length, from three recordings of it.

Why that is exact: with ``r`` rows, every dimension of a tensor is ``a + b r``. A tensor has one dimension at most that
depends on ``r``, so its bytes are ``a + b r`` too, and two recordings give both numbers. A third one, with the most
rows, has to have the same events in the same order, and every size of it has to lie on its line. Code that compares
rows with a limit shows in that: on one side of the limit the events are others than on the other.

What kernels allocate inside themselves is no line: sums split their work by blocks, norms by groups of 32 rows. In
these recordings each call of such a kernel leaves one placeholder, and its arguments are kept as shapes. For ``r`` rows
the rule of the kernel is asked again, with the arguments that ``r`` rows give.

Limitations: a single row, whose tensors are contiguous where others are not, is recorded by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_memopt.memory.cuda.kernel_buffers import has_buffers
from hf_memopt.memory.recording.step import RecordedPass, StepTrace
from hf_memopt.memory.step_time.operations import Operation, affine_operations
from hf_memopt.memory.storage_tracker import Hidden

__all__ = ["LEAST_ROWS", "AffineTrace", "KernelCalls", "NotAffineError"]

LEAST_ROWS = 2
_PLACEHOLDER = 2**62  # more bytes than any storage has; the number of the call is added


class NotAffineError(Exception):
    """The recordings differ in more than sizes, or a size is on no line."""


class KernelCalls:
    """Stands in for the rules of kernels while a step is recorded: a call allocates one placeholder.

    Attributes:
        calls: operator, arguments, options and results, tensors as ``_Shape``.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, ...]:
        if not has_buffers(func):
            return ()
        call = (func, _shapes(args), _shapes(tuple(kwargs.items())), _shapes(out))
        number = self._numbers.setdefault((call, repr(call)), len(self.calls))  # repr: True == 1 == 1.0
        if number == len(self.calls):
            self.calls.append(call)
        return (_PLACEHOLDER + number,)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kernel's rule reads of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Line:
    """A number that depends on the rows."""

    base: int
    slope: int


class AffineTrace:
    """The traces of one set-up for ``LEAST_ROWS`` rows and more, up to those of the last recording.

    Args:
        record: returns the trace for a number of rows; the ``KernelCalls`` are called in place of kernels' rules.
        most_rows: the largest number of rows.

    Raises:
        NotAffineError: three recordings are no line.
    """

    def __init__(self, record: Callable[[int, Hidden], StepTrace], most_rows: int) -> None:
        if most_rows < LEAST_ROWS + 2:
            raise NotAffineError("three recordings are not less than one of each")
        self.most_rows = most_rows
        asked = [(rows, KernelCalls()) for rows in (LEAST_ROWS, LEAST_ROWS + 1, most_rows)]
        found = [(record(rows, calls), calls) for rows, calls in asked]
        (first, its_calls), (second, second_calls), (last, last_calls) = found
        self._trace = second
        structure = _structure(second)
        if _structure(first) != structure or _structure(last) != structure:
            raise NotAffineError("the events of two numbers of rows differ")
        sizes = [np.array(trace.tracker.sizes, np.int64) for trace, _ in found]
        self._kernels = [bool(size >= _PLACEHOLDER) for size in sizes[1]]
        self._slopes = np.where(self._kernels, 0, sizes[1] - sizes[0])
        self._bases = np.where(self._kernels, 0, sizes[0] - LEAST_ROWS * self._slopes)
        self._calls: dict[int, tuple[int, int]] = {}
        self._lines: list[Any] = []
        numbers: dict[tuple[int, int], int] = {}
        for storage in np.flatnonzero(self._kernels):
            pair = int(sizes[0][storage]) - _PLACEHOLDER, int(sizes[1][storage]) - _PLACEHOLDER
            if pair not in numbers:
                numbers[pair] = len(self._lines)
                self._lines.append(_line(its_calls.calls[pair[0]], second_calls.calls[pair[1]]))
            self._calls[int(storage)] = numbers[pair], int(sizes[2][storage]) - _PLACEHOLDER
        self._flops = [_line(*pair) for pair in zip(first.flops, second.flops, strict=True)]
        self._host_bytes = _line(first.host_bytes, second.host_bytes)
        self._operations = first.operations, second.operations
        self._prove(last, sizes[2], last_calls)

    def _prove(self, last: StepTrace, sizes: Any, calls: KernelCalls) -> None:
        rows = self.most_rows
        predicted = [_at(line, rows) for line in self._lines]
        proven = (
            np.array_equal(np.where(self._kernels, 0, sizes), self._bases + rows * self._slopes)
            and [_at(line, rows) for line in self._flops] == last.flops
            and _at(self._host_bytes, rows) == last.host_bytes
            and self._operations_at(rows) == last.operations
            and all(repr(predicted[line]) == repr(calls.calls[call]) for line, call in set(self._calls.values()))
        )
        if not proven:
            raise NotAffineError(f"{rows} rows are not on the line of {LEAST_ROWS} and {LEAST_ROWS + 1}")

    def at(self, rows: int, hidden: Hidden) -> StepTrace:
        """Return the trace for a number of rows; ``hidden`` has the rules of kernels, as for a ``StorageTracker``."""
        blocks = [
            hidden(func, _tensors(args), dict(_tensors(options)), _tensors(out))
            for func, args, options, out in (_at(line, rows) for line in self._lines)
        ]
        trace = _WithBuffers(
            self._trace, (self._bases + rows * self._slopes).tolist(), self._kernels, self._calls, blocks
        ).trace
        trace.flops = [_at(line, rows) for line in self._flops]
        trace.tracker.flops = sum(trace.flops)
        trace.host_bytes = _at(self._host_bytes, rows)
        trace.operations = self._operations_at(rows)
        return trace

    def _operations_at(self, rows: int) -> list[list[tuple[Operation, int]]]:
        """Return the operations of each pass for a number of rows."""
        passes = zip(*self._operations, strict=True)
        try:
            return [affine_operations(few, more, rows - LEAST_ROWS) for few, more in passes]
        except ValueError as error:
            raise NotAffineError(str(error)) from None


class _WithBuffers:
    """Writes a trace with the blocks of kernels in place of their placeholders; numbers and positions move."""

    def __init__(
        self,
        old: StepTrace,
        sizes: Sequence[int],
        kernels: Sequence[bool],
        calls: dict[int, tuple[int, int]],
        blocks: Sequence[tuple[int, ...]],
    ) -> None:
        tracker = old.tracker
        self._events: list[tuple[int, int]] = []
        self._columns: tuple[list[int], ...] = ([], [], [], [])
        self._numbers = [-1] * len(sizes)
        self._positions: list[int] = []
        allocated_at = tracker.allocated_at
        for event, (number, _) in enumerate(tracker.events):
            self._positions.append(len(self._events))
            if allocated_at[number] != event:
                if not kernels[number]:
                    self._events.append((self._numbers[number], -sizes[number]))
            elif kernels[number]:
                inside = blocks[calls[number][0]]
                held = [self._allocate(size, tracker.sequences[number], tracker.places[number]) for size in inside]
                self._events += [(block, -size) for block, size in zip(held, inside, strict=True)]
            else:
                size, sequence, place = sizes[number], tracker.sequences[number], tracker.places[number]
                self._numbers[number] = self._allocate(size, sequence, place)
        self._positions.append(len(self._events))
        new = copy.copy(tracker)
        new.events = self._events
        new.sizes, new.allocated_at, new.sequences, new.places = self._columns
        new.recomputed = [(self._positions[begin], self._positions[end]) for begin, end in tracker.recomputed]
        self.trace = replace(
            old,
            tracker=new,
            weights=self._moved(old.weights),
            inputs=self._moved(old.inputs),
            gradients=self._moved(old.gradients),
            gradient_of={index: self._number(number) for index, number in old.gradient_of.items()},
            micro_batches=[self._pass(part) for part in old.micro_batches],
            evaluation=None if old.evaluation is None else self._pass(old.evaluation),
            evaluation_inputs=self._moved(old.evaluation_inputs),
        )

    def _allocate(self, size_bytes: int, sequence: int, place: int) -> int:
        sizes, allocated_at, sequences, places = self._columns
        sizes.append(size_bytes)
        allocated_at.append(len(self._events))
        sequences.append(sequence)
        places.append(place)
        self._events.append((len(sizes) - 1, size_bytes))
        return len(sizes) - 1

    def _number(self, number: int) -> int:
        return self._numbers[number] if number >= 0 else number  # -1: not counted

    def _moved(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self._number, numbers))

    def _pass(self, part: RecordedPass) -> RecordedPass:
        positions = self._positions
        return replace(
            part,
            start=positions[part.start],
            forward_end=positions[part.forward_end],
            end=positions[part.end],
            logits=frozenset(self._moved(tuple(part.logits))),
            logits_event=positions[part.logits_event],
            outputs=self._moved(part.outputs),
            releases=tuple((positions[event], index, self._number(number)) for event, index, number in part.releases),
            generation_end=positions[part.generation_end] if part.generation_end else 0,
        )


def _structure(trace: StepTrace) -> Any:
    """Return all that has to be equal in traces of different rows: everything but sizes."""
    tracker = trace.tracker
    numbers = range(len(tracker.sizes))

    def parts() -> Iterator[Any]:
        for part in (*trace.micro_batches, *([] if trace.evaluation is None else [trace.evaluation])):
            # the sequence numbers themselves depend on what ran in the process before
            yield replace(part, logits_sequences=range(0))
            yield [number for number in numbers if tracker.sequences[number] in part.logits_sequences]

    return (
        [number for number, _ in tracker.events],
        [(size >= _PLACEHOLDER, tracker.module_number(number)) for number, size in enumerate(tracker.sizes)],
        (tracker.allocated_at, tracker.places, tracker.recomputed, tracker.modules),
        (trace.weights, trace.inputs, trace.gradients, trace.gradient_of, trace.evaluation_inputs, trace.notes),
        list(parts()),
    )


def _shapes(value: Any) -> Any:
    """Return nested arguments with shapes in place of tensors, and tuples of lists."""
    if isinstance(value, torch.Tensor):
        return _Shape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes, value))
    return value


def _tensors(value: Any) -> Any:
    """Return what ``_shapes`` was given, with meta tensors."""
    if isinstance(value, _Shape):
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(map(_tensors, value))
    return value


def _line(one: Any, other: Any) -> Any:
    """Return what two nested values of ``LEAST_ROWS`` and one row more have in common, with lines for their numbers.

    Raises:
        NotAffineError: they differ in something else.
    """
    if type(one) is int and type(other) is int:
        return one if one == other else _Line(one - LEAST_ROWS * (other - one), other - one)
    if isinstance(one, _Shape) and isinstance(other, _Shape) and one.dtype == other.dtype:
        return _Shape(_line(one.size, other.size), _line(one.stride, other.stride), one.dtype)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_line, one, other))
    if type(one) is type(other) and one == other:
        return one
    raise NotAffineError("the arguments of a kernel differ in more than sizes")


def _at(line: Any, rows: int) -> Any:
    """Return the values for a number of rows."""
    if isinstance(line, _Line):
        return line.base + rows * line.slope
    if isinstance(line, _Shape):
        return _Shape(_at(line.size, rows), _at(line.stride, rows), line.dtype)
    if isinstance(line, tuple):
        return tuple(_at(part, rows) for part in line)
    return line
