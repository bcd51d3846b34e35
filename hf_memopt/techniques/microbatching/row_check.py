"""Where the rows of a batch lie in what a module takes and returns, and whether they depend on each other.

Both are decided by value, on the batch that is about to run, by forward passes without gradients, dropout and autocast:

- The outputs of parts, joined, are those of the whole batch. This finds the dimension of the rows in each input and
  output (a shape alone may have it by chance), and whatever depends on the number of rows or on all of them.
- The outputs of some rows stay the same when others get the content of further rows. Shapes do not change here, so
  next to no rounding does, and a dependence of 1e-9 shows in float64. The first time a kind of call is met, any two
  rows are told apart by this; later checks draw half of the rows at random.
- A forward pass changes nothing in the module: no buffer, no attribute, no tensor kept for later.

The price: for n rows 3 + 2 log2(n) forward passes for the first call of a kind, 4 for a later check.

Limitations: randomness other than dropout whose draws depend on the number of rows (SpecAugment) is refused, since its
values cannot be compared. In 16 bits a dependence below 1 % of the largest value may pass.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten  # private, as transformers uses it (2.6 to 2.13)
from transformers import Cache

from hf_memopt.binding.foreign_code import foreign_hooks, is_listed_module
from hf_memopt.binding.handles import set_attribute
from hf_memopt.binding.kept_state import KeptState
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.devices.random_state import RandomState

__all__ = ["DependentRowsError", "Layout", "ModuleCall", "check_rows"]

ROWS_FIRST = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
    "decoder_input_ids",
    "hidden_states",
    "attention_mask",
)
"""The number of rows is the first dimension of the first of these that a call has, else of its first tensor."""
_WITHOUT_TOKENS = ("pixel_values", "input_values", "input_features")

DROPOUTS = (
    "p",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "layerdrop",
    "dropout_p",
    "dropout_prob",
    "drop_prob",
    "jitter_noise",
)
"""Attributes of modules that hold a probability of dropping something, or the width of a noise."""

MOST_LAYOUTS = 8  # tried, where several dimensions have as many entries as there are rows
MOST_MARKED = 1000  # entries of a container in an attribute
PLAIN = (int, float, bool, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


class DependentRowsError(ValueError):
    """Rows cannot run apart, for this reason."""


class _ChangesItselfError(DependentRowsError):
    """A forward pass leaves something in the module, or in its inputs."""


class Layout(NamedTuple):
    """The dimension of the rows in each input and output, flattened; None for what all rows share."""

    into: tuple[int | None, ...]
    out: tuple[int | None, ...]


class ModuleCall:
    """A call of a module, to be run on some of its rows.

    Attributes:
        rows: how many it has; 0 if no tensor shows it.
        columns: tokens of each row; None for images and sounds.
        has_graph: whether it was called with gradients.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.module, self._forward, self.has_graph = module, forward, torch.is_grad_enabled()
        self.leaves: list[Any]
        self.leaves, self._spec = tree_flatten((args, kwargs))
        self._main = self._find_main(args, kwargs)
        main = None if self._main is None else self.leaves[self._main]
        self.rows: int = 0 if main is None else main.shape[0]
        self.columns: int | None = None
        if main is not None and main.dim() > 1 and not any(kwargs.get(name) is main for name in _WITHOUT_TOKENS):
            self.columns = int(main.shape[1])

    def _find_main(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        given = [kwargs, *(value for value in args if isinstance(value, Mapping))]
        named = [mapping.get(name) for name in ROWS_FIRST for mapping in given]
        for value in (*named, *self.leaves):
            if torch.is_tensor(value) and value.dim() > 0:
                return next(index for index, leaf in enumerate(self.leaves) if leaf is value)
        return None

    def kind(self) -> Any:
        """Return what calls have in common whose rows lie alike: not the sizes, but which of them agree by chance."""
        return self._spec, self.module.training, self.has_graph, tuple(map(self._kind_of, self.leaves))

    def _kind_of(self, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf)
        is_column = leaf.shape == (self.rows,) and not leaf.is_floating_point()
        has_repeats = is_column and len(torch.unique(leaf)) < self.rows  # rows of one group, perhaps
        return leaf.dtype, leaf.dim(), self._candidates_of(leaf), has_repeats

    def _candidates_of(self, leaf: torch.Tensor) -> tuple[int, ...]:
        return tuple(d for d, size in enumerate(leaf.shape) if size == self.rows)

    def candidates(self) -> Iterator[tuple[int | None, ...]]:
        """Yield the dimensions of the rows in each input, by shape; the input that the number comes from is cut."""
        choices: list[tuple[int | None, ...]] = []
        for index, leaf in enumerate(self.leaves):
            found: tuple[int | None, ...] = self._candidates_of(leaf) if torch.is_tensor(leaf) else ()
            choices.append(found[:1] if index == self._main else (*found, None))
        return islice(product(*choices), MOST_LAYOUTS)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the module; return its outputs, flattened."""
        return self.run_with_spec(leaves)[0]

    def run_with_spec(self, leaves: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
        """The same with what puts them together again."""
        args, kwargs = tree_unflatten(list(leaves), self._spec)
        with warnings.catch_warnings():
            if not torch.is_grad_enabled():  # no graph is wanted, whatever reentrant checkpointing thinks of that
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            leaves, spec = tree_flatten(self._forward(*args, **kwargs))
        if self.has_graph:  # a cache of generation, which training does not read: None, so that reading it would fail
            leaves = [None if isinstance(leaf, Cache) else leaf for leaf in leaves]
        return leaves, spec

    def rows_from(self, into: Sequence[int | None], start: int, stop: int) -> list[Any]:
        """Return the inputs of some rows; views."""
        return [
            leaf if dim is None else leaf.narrow(dim, start, stop - start)
            for leaf, dim in zip(self.leaves, into, strict=True)
        ]

    def try_rows(self, into: Sequence[int | None], start: int, stop: int) -> list[Any]:
        """Run the module with copies of the inputs of some rows; return its outputs, flattened.

        Raises:
            DependentRowsError: it changes an input in place.
        """
        given = self.rows_from(into, start, stop)
        copies = [leaf.clone() if torch.is_tensor(leaf) else leaf for leaf in given]
        found = self.run(copies)
        for leaf, other in zip(given, copies, strict=True):
            if torch.is_tensor(leaf) and other._version and not torch.equal(leaf, other):
                raise _ChangesItselfError(
                    f"it changes an input of shape {tuple(leaf.shape)} in place, which parts would change twice"
                )
        return found

    def reason_against(self) -> str | None:
        """Return why its inputs cannot be cut, or run twice; None if nothing is against it."""
        other = next((leaf for leaf in self.leaves if not (torch.is_tensor(leaf) or isinstance(leaf, PLAIN))), None)
        if other is not None:  # a cache of generation, for example
            return f"its input <{type(other).__name__}> may be changed by each pass"
        args, kwargs = tree_unflatten(self.leaves, self._spec)
        for name, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, list) and len(value) == self.rows:
                return f"its input {name} is a list with an entry for each row, and only tensors are cut"
        return None

    def devices(self) -> list[torch.device]:
        """Return the devices of inputs and weights; the host's generators are read in any case."""
        tensors = [leaf for leaf in self.leaves if torch.is_tensor(leaf)]
        found = {tensor.device for tensor in (*tensors, *self.module.parameters())}
        return sorted(found - {torch.device("cpu"), torch.device("meta")}, key=str) or [torch.device("cpu")]


def check_rows(call: ModuleCall, size: int, *, draw: random.Random | None = None) -> Layout:
    """Return where the rows lie, having checked that parts of ``size`` rows give what the whole gives.

    Module, buffers and all generators are left as they were. Where the whole does not fit into memory, as many rows
    are looked at as do.

    Args:
        call: of more than ``size`` rows.
        size: rows of a part.
        draw: draws the rows that keep their content; None: any two rows are told apart.

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
                return _check(call, count, min(size, count - 1), restart, draw)
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

    with ExitStack() as stack:
        for module in call.module.modules():
            for name in DROPOUTS:
                if isinstance(getattr(module, name, None), float):
                    stack.callback(set_attribute(module, name, 0.0).remove)
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


def _check(call: ModuleCall, count: int, size: int, restart: Callable[[], None], draw: random.Random | None) -> Layout:
    reasons: list[str] = []
    for into in call.candidates():
        try:
            with _autocast_off(call, into) as is_off:
                limit = _tolerance(call.module, is_off)
                whole, out = _compare(call, into, count, size, restart, limit)
                if not any(dim is not None for dim in out):
                    raise DependentRowsError("none of its outputs has rows")
                _refuse_shared_outputs(call, into, whole, out)
                _exchange(call, Layout(tuple(into), tuple(out)), whole, _kept_rows(count, draw), limit)
                return Layout(tuple(into), tuple(out))
        except _ChangesItselfError:
            raise
        except DependentRowsError as error:
            reasons.append(str(error))
    restart()
    into = next(call.candidates())
    first, before = call.try_rows(into, 0, count), _state_of(call.module)
    second = call.try_rows(into, 0, count)  # goes on with the generators of the first
    if any(_difference(*pair) > 0 for pair in zip(first, second, strict=True) if torch.is_tensor(pair[0])):
        _refuse_changes(call.module, before)
        raise DependentRowsError(
            "it draws random numbers other than dropout's, so that parts draw others than the whole"
        )
    raise DependentRowsError(reasons[0])


def _refuse_shared_outputs(
    call: ModuleCall, into: Sequence[int | None], whole: Sequence[Any], out: Sequence[int | None]
) -> None:
    """Refuse what the modules inside do better: parts of texts beside all images, whose outputs are in every part, and
    a loss that is 0 by chance or a learned scale, whose gradient parts cannot pass on.

    A tensor that has as many entries by chance, such as the numbers of columns, is no output of its own.
    """
    pairs = zip(call.leaves, into, strict=True)
    is_left = any(d is None and torch.is_tensor(x) and x.shape[:1] == (call.rows,) for x, d in pairs)
    for index, (value, dim) in enumerate(zip(whole, out, strict=True)):
        if is_left and dim is None and torch.is_tensor(value) and value.is_floating_point():
            shown = f"its output {index} of shape {tuple(value.shape)}"
            raise DependentRowsError(f"{shown} comes from inputs of which every part needs all rows")
        if dim is None and torch.is_tensor(value) and value.dim() == 0 and value.is_floating_point():
            raise DependentRowsError(f"its output {index} is one number for all rows, as a loss or a scale is")


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


def _compare(
    call: ModuleCall,
    into: Sequence[int | None],
    count: int,
    size: int,
    restart: Callable[[], None],
    limit: float,
) -> tuple[list[Any], list[int | None]]:
    """Return the outputs of the whole and the dimension of their rows, if parts give them."""

    def run(start: int, stop: int) -> list[Any]:
        restart()
        return call.try_rows(into, start, stop)

    ends = [*range(0, count, size), count]
    try:
        whole = run(0, count)
        parts = [run(start, stop) for start, stop in pairwise(ends)]
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, _ChangesItselfError):
            raise
        text = f"{type(error).__name__}: {str(error)[:80]}"
        raise DependentRowsError(f"a part of the rows fails where all of them run ({text})") from None
    if any(len(part) != len(whole) for part in parts):
        raise DependentRowsError("a part of the rows has other outputs than all of them")
    sizes = [stop - start for start, stop in pairwise(ends)]
    return whole, [_rows_of(i, value, [part[i] for part in parts], sizes, limit) for i, value in enumerate(whole)]


def _rows_of(index: int, whole: Any, parts: Sequence[Any], sizes: Sequence[int], limit: float) -> int | None:
    """Return the dimension of the rows in one output, None for a value that all parts share."""
    if not torch.is_tensor(whole):
        if isinstance(whole, PLAIN):
            return None
        name = type(whole).__name__
        raise DependentRowsError(f"its output {index} is a {name}, which has no rows")
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


def _kept_rows(count: int, draw: random.Random | None) -> list[tuple[int, list[int]]]:
    """Return the number of rows and those that keep their content, for each exchange; without ``draw`` so that any
    two rows are told apart.
    """
    if draw is not None:
        return [(count, sorted(draw.sample(range(count), max(1, count // 2))))]
    bits = range((count - 1).bit_length())
    return [(count, [row for row in range(count) if (row >> bit) % 2 == value]) for bit in bits for value in (0, 1)]


def _exchange(
    call: ModuleCall,
    layout: Layout,
    whole: Sequence[Any],
    exchanges: Sequence[tuple[int, list[int]]],
    limit: float,
) -> None:
    """Raise DependentRowsError if rows change with the content of others, or if a forward pass leaves a trace."""
    before: dict[str, Any] = {}
    for number, (count, kept) in enumerate(exchanges):
        shift = 1 + number % (count - 1)
        order = torch.tensor([row if row in kept else (row + shift) % count for row in range(count)])
        moved = [
            leaf if dim is None else leaf.index_select(dim, order.to(leaf.device))
            for leaf, dim in zip(call.leaves, layout.into, strict=True)
        ]
        is_last = number == len(exchanges) - 1
        before = _state_of(call.module) if is_last else before
        found = call.run(moved)  # with other random numbers too
        if is_last:
            _refuse_changes(call.module, before)
        for index, (value, other, dim) in enumerate(zip(whole, found, layout.out, strict=True)):
            if torch.is_tensor(value) and (error := _difference(*_pair(value, other, dim, kept, count))) > limit:
                raise DependentRowsError(
                    f"rows depend on each other: its output {index} of shape {tuple(value.shape)} changes by "
                    f"{error:.1e} with the content of other rows"
                )


def _pair(
    value: torch.Tensor, other: Any, dim: int | None, rows: list[int], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries of some rows of two outputs; all of what has no rows."""
    if dim is None or value.shape != other.shape:
        return value, other
    index = torch.tensor(rows, device=value.device)
    first, second = (tensor.unflatten(dim, (count, -1)).index_select(dim, index) for tensor in (value, other))
    return first, second


def _refuse_changes(module: nn.Module, before: Mapping[str, Any]) -> None:
    if changed := _changed(before, _state_of(module)):
        raise _ChangesItselfError(f"its forward pass changes {changed}, which parts would change several times")


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers of a module and those inside, as far as a change would show."""
    skipped = ("_parameters", "_buffers", "_modules", "forward")
    found: dict[str, Any] = {
        f"{name}.{key}".lstrip("."): _mark(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in skipped
    }
    found.update((name, buffer.clone()) for name, buffer in module.named_buffers())
    return found


def _mark(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return repr(value)
    if torch.is_tensor(value):
        return id(value), value._version
    if isinstance(value, (list, dict, set, tuple)):
        inside = value.values() if isinstance(value, dict) else value
        return id(value), len(value), [id(each) for each in islice(inside, MOST_MARKED)]
    return id(value)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the name of what changed."""
    for name, value in after.items():
        old = before.get(name)
        is_same = torch.equal(old, value) if torch.is_tensor(value) and torch.is_tensor(old) else bool(old == value)
        if name not in before or not is_same:
            return name
    return None
