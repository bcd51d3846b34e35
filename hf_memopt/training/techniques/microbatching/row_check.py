"""Where the rows of a batch lie in what a module takes and returns, and whether they depend on each other.

Both are decided by value, on the batch that is about to run, by forward passes without gradients, dropout and autocast:

- The outputs of parts, joined, are those of the whole batch. This finds the dimension of the rows in each input and
  output (a shape alone may have it by chance), and whatever depends on the number of rows or on all of them.
- The outputs of some rows stay the same when others get the content of further rows. Shapes do not change here, so
  next to no rounding does, and a dependence of 1e-9 shows in float64. The first time a kind of call is met, any two
  rows are told apart by this; later checks draw half of the rows at random.
- A forward pass changes nothing in the module: no buffer, no weight that needs no gradient, no attribute, no tensor
  kept for later, also in containers and objects that attributes hold.

The price: for n rows 3 + 2 log2(n) forward passes for the first call of a kind, 4 for a later check.

Limitations: random numbers other than those that ``without_dropout`` switches off (dropout, SpecAugment, ...), whose
values cannot be compared, are refused, and so is a dropout of a user's own class that calls its probability ``p``. What
is switched off draws other numbers of the same distribution in each part. In 16 bits a
dependence below 1 % of the largest value may pass. What a forward pass changes outside of the module, such as a global
list that it appends to, is not seen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_memopt.training.binding.losses import foreign_hooks, is_listed_module
from hf_memopt.training.binding.trials import without_dropout
from hf_memopt.training.binding.undo import FOREIGN, KeptState, RandomState
from hf_memopt.training.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.training.techniques.microbatching.module_call import (
    DRAWS,
    PLAIN,
    ChangesItselfError,
    DependentRowsError,
    Layout,
    ModuleCall,
    is_same_value,
)
from hf_memopt.training.techniques.microbatching.own_weights import address_of, own_weights_put_back

MOST_MARKED = 1000  # entries of a container in an attribute
DEEPEST = 5  # containers and objects inside each other: module -> memory -> banks -> name -> its list


def check_rows(call: ModuleCall, size: int, *, draw: random.Random | None = None) -> Layout:
    """Return where the rows lie, having checked that parts of ``size`` rows give what the whole gives.

    Module, buffers and all generators are left as they were. Where the whole does not fit into memory, as many rows
    are looked at as do.

    Raises:
        DependentRowsError: rows depend on each other, or something in the module cannot run twice.
        torch.OutOfMemoryError: not even two rows fit, without gradients.
    """
    own = [hooks for kind, hooks in vars(call.module).items() if kind.endswith("_hooks")]  # these see whole calls
    for name, hooks, _ in foreign_hooks(call.module):
        if not any(hooks is each for each in own):
            raise DependentRowsError(f"{name} would see parts of a batch, without a graph")
    if (reason := call.reason_against()) is not None:
        raise DependentRowsError(reason)
    count = call.rows
    while True:
        try:
            with torch.no_grad(), _repeatable(call) as restart:
                return _Check(call, count, restart).layout(min(size, count - 1), draw)
        except Exception as error:
            if not is_out_of_memory(error) or count == 2:
                raise
        free_failed_step()
        count = max(2, count // 2)


@contextmanager
def _repeatable(call: ModuleCall) -> Iterator[Callable[[], None]]:
    """Switch dropout and autocast off, and put everything back; yields what sets the generators to the beginning."""
    states = [RandomState.capture(device) for device in call.devices()]
    buffers = [(buffer, buffer.clone()) for buffer in call.module.buffers()]

    def restart() -> None:
        for state in states:
            state.restore()

    with without_dropout(call.module, mixes=True), own_weights_put_back(call.module):
        kept = KeptState(what="a check that rows are independent", others=call.module.buffers())
        for module in call.module.modules():
            if not is_listed_module(type(module).__module__):  # a user's own
                kept.look_at(module)
        try:
            yield restart
        finally:
            kept.restore()
            for buffer, value in buffers:
                if not torch.equal(buffer, value):  # else a graph that has kept it would find it changed
                    buffer.copy_(value)
            restart()


class _Check:
    """Compares what the first ``count`` rows of a call give with what they give otherwise."""

    def __init__(self, call: ModuleCall, count: int, restart: Callable[[], None]) -> None:
        self._call, self._count, self._restart = call, count, restart

    def layout(self, size: int, draw: random.Random | None) -> Layout:
        """Return the first layout under which parts of ``size`` rows give what the whole gives."""
        reasons: list[str] = []
        for into in self._call.candidates():
            try:
                with _autocast_off(self._call, into) as is_off:
                    return self._compared(into, size, draw, _tolerance(self._call.module, is_off))
            except ChangesItselfError:
                raise
            except DependentRowsError as error:
                reasons.append(str(error))
        self._refuse_random_numbers()
        raise DependentRowsError(reasons[0])

    def _compared(self, into: tuple[int | None, ...], size: int, draw: random.Random | None, limit: float) -> Layout:
        """Return the layout, given the dimensions of the rows in the inputs and the largest error tolerated."""
        ends = [*range(0, self._count, size), self._count]
        try:
            whole = self._run(into, 0, self._count)
            parts = [self._run(into, start, stop) for start, stop in pairwise(ends)]
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, ChangesItselfError):
                raise
            text = f"{type(error).__name__}: {str(error)[:80]}"
            raise DependentRowsError(f"a part of the rows fails where all of them run ({text})") from None
        if any(len(part) != len(whole) for part in parts):
            raise DependentRowsError("a part of the rows has other outputs than all of them")
        sizes = [stop - start for start, stop in pairwise(ends)]
        out = [_rows_of(i, value, [part[i] for part in parts], sizes, limit) for i, value in enumerate(whole)]
        layout = Layout(into, tuple(out))
        if not any(dim is not None for dim in out):
            raise DependentRowsError("none of its outputs has rows")
        self._refuse_shared_outputs(layout, whole)
        self._exchange(layout, whole, draw, limit)
        return layout

    def _run(self, into: tuple[int | None, ...], start: int, stop: int) -> list[Any]:
        self._restart()
        return self._call.try_rows(into, start, stop)

    def _refuse_shared_outputs(self, layout: Layout, whole: Sequence[Any]) -> None:
        """Refuse what the modules inside do better: parts of texts beside all images, whose outputs are in every part,
        and a loss that is 0 by chance or a learned scale, whose gradient parts cannot pass on.

        A tensor that has as many entries by chance, such as the numbers of columns, is no output of its own.
        """
        pairs = zip(self._call.leaves, layout.into, strict=True)
        is_left = any(d is None and torch.is_tensor(x) and x.shape[:1] == (self._call.rows,) for x, d in pairs)
        for index, (value, dim) in enumerate(zip(whole, layout.out, strict=True)):
            if dim is not None or not torch.is_tensor(value) or not value.is_floating_point():
                continue
            if is_left:
                shown = f"its output {index} of shape {tuple(value.shape)}"
                raise DependentRowsError(f"{shown} comes from inputs of which every part needs all rows")
            if value.dim() == 0:
                raise DependentRowsError(f"its output {index} is one number for all rows, as a loss or a scale is")

    def _exchange(self, layout: Layout, whole: Sequence[Any], draw: random.Random | None, limit: float) -> None:
        """Raise DependentRowsError if rows change with the content of others, or if a forward pass leaves a trace."""
        exchanges = self._kept_rows(draw)
        for number, kept in enumerate(exchanges):
            shift = 1 + number % (self._count - 1)
            order = torch.tensor([row if row in kept else (row + shift) % self._count for row in range(self._count)])
            moved = [
                leaf if dim is None else leaf.index_select(dim, order.to(leaf.device))
                for leaf, dim in zip(self._call.leaves, layout.into, strict=True)
            ]
            is_last = number == len(exchanges) - 1
            before = _state_of(self._call.module) if is_last else {}
            try:
                found = self._call.run(moved)  # with other random numbers too
            except Exception as failed:
                if is_out_of_memory(failed):
                    raise
                text = f"{type(failed).__name__}: {str(failed)[:80]}"
                raise DependentRowsError(f"it fails where rows have the content of others ({text})") from None
            if is_last:
                _refuse_changes(self._call.module, before)
            for index, (value, other, dim) in enumerate(zip(whole, found, layout.out, strict=True)):
                if not torch.is_tensor(value):
                    _refuse_other_value(index, value, other)
                    continue
                error = _difference(*(self._rows_in(tensor, dim, kept) for tensor in (value, other)))
                if error > limit:
                    raise DependentRowsError(
                        f"rows depend on each other: its output {index} of shape {tuple(value.shape)} changes by "
                        f"{error:.1e} with the content of other rows"
                    )

    def _kept_rows(self, draw: random.Random | None) -> list[list[int]]:
        """Return the rows that keep their content in each exchange; without ``draw`` so that any two are told apart."""
        rows = range(self._count)
        if draw is not None:
            return [sorted(draw.sample(rows, max(1, self._count // 2)))]
        bits = range((self._count - 1).bit_length())
        return [[row for row in rows if (row >> bit) % 2 == value] for bit in bits for value in (0, 1)]

    def _rows_in(self, value: torch.Tensor, dim: int | None, rows: list[int]) -> torch.Tensor:
        """Return the entries of some rows of an output; all of what has no rows."""
        if dim is None or value.shape[dim] % self._count:
            return value
        index, by_row = torch.tensor(rows, device=value.device), (self._count, -1)
        return value.unflatten(dim, by_row).index_select(dim, index)  # type: ignore[no-any-return, no-untyped-call]

    def _refuse_random_numbers(self) -> None:
        """Raise DependentRowsError if two passes differ, as that explains whatever else was found."""
        into = next(self._call.candidates())
        first, before = self._run(into, 0, self._count), _state_of(self._call.module)
        second = self._call.try_rows(into, 0, self._count)  # goes on with the generators of the first
        if any(_difference(*pair) > 0 for pair in zip(first, second, strict=True) if torch.is_tensor(pair[0])):
            _refuse_changes(self._call.module, before)
            raise DependentRowsError(DRAWS)


@contextmanager
def _autocast_off(call: ModuleCall, into: Sequence[int | None]) -> Iterator[bool]:
    """Leave autocast, if the module runs without it: weights may be of two dtypes. Yields whether it is off."""
    kinds = [kind for kind in {device.type for device in call.devices()} if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if kinds:
            try:
                call.try_rows(into, 0, 1)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                stack.close()
                yield False
                return
        yield True


def _tolerance(module: nn.Module, is_off: bool) -> float:
    """Return the largest error that is tolerated, in parts of the largest value."""
    found = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    found |= {
        kind for part in module.modules() if isinstance(kind := getattr(part, "compute_dtype", None), torch.dtype)
    }
    is_narrow = not is_off or any(dtype.itemsize <= 2 for dtype in found)
    if is_narrow:
        return 2**-6
    return 64 * (torch.finfo(torch.float64).eps if found == {torch.float64} else torch.finfo(torch.float32).eps)


def _rows_of(index: int, whole: Any, parts: Sequence[Any], sizes: Sequence[int], limit: float) -> int | None:
    """Return the dimension of the rows in one output, None for a value that all parts share."""
    if not torch.is_tensor(whole):
        if not isinstance(whole, PLAIN):
            raise DependentRowsError(f"its output {index} is a {type(whole).__name__}, which has no rows")
        for part in parts:
            _refuse_other_value(index, whole, part)
        return None
    rows = sum(sizes)
    fitting = (
        d
        for d, entries in enumerate(whole.shape)
        if entries
        and entries % rows == 0
        and all(
            part.dim() == whole.dim()
            and part.shape[d] * rows == entries * size
            and part.select(d, 0).shape == parts[0].select(d, 0).shape
            for part, size in zip(parts, sizes, strict=True)
        )
    )
    dim = next(fitting, None)
    joined = [*parts] if dim is None else [torch.cat(list(parts), dim)]
    error = max((_difference(whole, value) for value in joined), default=0.0)
    if error > limit:
        shown = f"its output {index} of shape {tuple(whole.shape)}"
        if error == float("inf"):
            raise DependentRowsError(f"parts of {shown} have shapes that do not join")
        raise DependentRowsError(f"rows depend on each other: parts of {shown} differ from the whole by {error:.1e}")
    return dim


def _refuse_other_value(index: int, whole: Any, other: Any) -> None:
    if not is_same_value(whole, other):
        shown = f"its output {index}, the {type(whole).__name__} {str(whole)[:40]},"
        raise DependentRowsError(f"rows depend on each other: {shown} is another one for other rows")


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference in parts of the largest value; infinite where shapes or infinities differ."""
    if one.shape != other.shape:
        return float("inf")
    if one.numel() == 0 or torch.equal(one, other):
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return float("inf")
    is_number = one.isfinite() & other.isfinite()
    if not torch.equal(one[~is_number].nan_to_num(0), other[~is_number].nan_to_num(0)):
        return float("inf")
    one, other = one[is_number], other[is_number]
    largest = one.abs().max().clamp(min=torch.finfo(one.dtype).tiny) if one.numel() else torch.ones(())
    return float((one - other).abs().max() / largest) if one.numel() else 0.0


def _refuse_changes(module: nn.Module, before: Mapping[str, Any]) -> None:
    if changed := _changed(before, _state_of(module)):
        raise ChangesItselfError(f"its forward pass changes {changed}, which parts would change several times")


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes, buffers and fixed weights of a module and those inside, as far as a change would show."""
    skipped = ("_parameters", "_buffers", "_modules", "forward")
    seen = set(map(id, module.modules()))
    found: dict[str, Any] = {
        f"{name}.{key}".lstrip("."): _mark(value, seen)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in skipped
    }
    found.update((name, address_of(weight)) for name, weight in module.named_parameters() if not weight.requires_grad)
    found.update((name, buffer.clone()) for name, buffer in module.named_buffers())
    return found


def _mark(value: Any, seen: set[int], depth: int = 0) -> Any:
    """Return what shows a change of a value, or of what its containers, arrays and objects of a user's hold."""
    if isinstance(value, PLAIN):
        return repr(value)
    if torch.is_tensor(value):
        return id(value), value._version
    if id(value) in seen or depth > DEEPEST:
        return id(value)
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return id(value), hash(value.tobytes())
    inside: Any = ()
    if isinstance(value, (list, set, tuple, deque)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif hasattr(value, "__dict__") and not _is_foreign(value):
        inside = vars(value).values()
    return id(value), len(inside), [_mark(each, seen, depth + 1) for each in islice(inside, MOST_MARKED)]


def _is_foreign(value: Any) -> bool:
    """Return whether an object keeps nothing of a forward pass, or is looked at by itself, as modules inside are."""
    package = type(value).__module__.partition(".")[0]
    return package in FOREIGN or is_listed_module(package)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the name of what changed."""
    for name, value in after.items():
        old = before.get(name)
        is_same = torch.equal(old, value) if torch.is_tensor(value) and torch.is_tensor(old) else bool(old == value)
        if name not in before or not is_same:
            return name
    return None
