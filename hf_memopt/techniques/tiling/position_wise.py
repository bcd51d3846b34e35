"""Find the modules that work on each position alone, by asking the model and never by the name of a class.

The base model runs over random token ids in training mode, at two lengths, and what each module is called with is
recorded. A module passes where its outputs, and the gradient of its input, are those of parts of the input, joined, and
where no bit of an output depends on another position. The parts run last first: a module that carries a state from one
to the next would else go on where it left off. What draws random numbers or changes a buffer is refused, and so is what
chooses among values, as a router does: its scores are recorded at each call, and its experts may have room for a number
of tokens (they pass by themselves).

Limitations: text models whose modules take (rows, positions, ...) or (rows * positions, ...). A module that is alike to
another, by class, settings and shapes, is not asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hf_memopt.binding.model import unwrap_model
from hf_memopt.binding.undo import KeptState, RandomState, override_method, remove_all, set_attribute

PROBES = ((2, 13), (3, 7))  # rows and positions: no two products or factors are alike
METHODS = ("forward", "feed_forward_chunk", "ff_chunk")  # the others are what stock's chunk_size_feed_forward cuts
WORTH = 3.5  # kept numbers per number of the input: MLPs keep 4 to 30, norms 1 to 3, linear layers 0
DRAWS, MIXES = "draws random numbers in training", "mixes positions"
_CHOICES = {torch.ops.aten.topk, torch.ops.aten.argmax, torch.ops.aten.sort, torch.ops.aten.max}


@dataclass(frozen=True, slots=True)
class Call:
    """What a method is called with.

    Attributes:
        method: bound to its module.
        leaves: of its arguments, tensors and others.
        spec: the arguments around them.
    """

    method: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, method: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        """Return a call of ``method(*args, **kwargs)``."""
        return cls(method, *tree_flatten((args, kwargs)))

    def with_leaves(self, leaves: list[Any]) -> Call:
        """Return the same call with other values."""
        return Call(self.method, leaves, self.spec)

    def with_leaf(self, leaf: int, value: Any) -> Call:
        """Return the same call with one other value."""
        return self.with_leaves([*self.leaves[:leaf], value, *self.leaves[leaf + 1 :]])

    @property
    def form(self) -> tuple[TreeSpec, tuple[bool, ...]]:
        """The arguments, and which of their leaves are tensors."""
        return self.spec, tuple(map(is_tensor, self.leaves))

    def cut(self, axes: Axes, length: int) -> list[Call]:
        """Return calls with ``length`` positions each, the last with the rest."""
        pieces = [(x,) if axis is None else x.split(length, axis) for x, axis in zip(self.leaves, axes, strict=True)]
        count = max(map(len, pieces))
        return [self.with_leaves([piece[i if len(piece) > 1 else 0] for piece in pieces]) for i in range(count)]

    def __call__(self) -> Any:
        """Make the call, with contiguous tensors: experts and ``Conv1D`` call ``view``, which parts would not bear."""
        leaves = [x.contiguous() if is_tensor(x) else x for x in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.method(*args, **kwargs)


Axes = tuple[int | None, ...]
"""By leaf, the dimension of positions: 1 of (rows, positions, ...), 0 of (rows * positions, ...), None of no such."""


@dataclass(frozen=True, slots=True)
class Place:
    """A method that works on each position alone.

    Attributes:
        name: in the model, of its module or, where that is not called as a whole, of the method.
        module: which.
        method: its name.
        axes: of what it is called with.
        form: of what it is called with.
        kept_bytes: what it keeps for the backward pass beside weights and inputs, per position of a row.
        kind: equal for modules that are alike.
    """

    name: str
    module: nn.Module
    method: str
    axes: Axes
    form: tuple[TreeSpec, tuple[bool, ...]]
    kept_bytes: int
    kind: tuple[Any, ...]


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


def join(outputs: list[Any], axis: int) -> Any:
    """Return the outputs of parts, joined; all of them have to be tensors."""
    leaves, specs = zip(*map(tree_flatten, outputs), strict=True)
    return tree_unflatten([torch.cat(parts, axis) for parts in zip(*leaves, strict=True)], specs[0])


def first_axis(axes: Axes) -> tuple[int, int]:
    """Return the first leaf that is cut, and its dimension."""
    return next((leaf, axis) for leaf, axis in enumerate(axes) if axis is not None)


# ---- What is asked ---------------------------------------------------------------------------------------------------


def find_places(model: nn.Module, patterns: Iterable[str] | None) -> tuple[list[Place], dict[str, str]]:
    """Return the outermost modules that work on each position alone, most kept bytes first, and why others do not.

    The model is as before afterwards, and so are the random numbers.

    Args:
        model: in training or evaluation mode; asked in training mode.
        patterns: globs of the names to look at, however little they keep; None for all that are worth it.
    """
    modes, device = {module: module.training for module in model.modules()}, next(model.parameters()).device
    kept, drawn = KeptState(what="a probe for tiles"), RandomState.capture(device)
    for module in model.modules():
        kept.look_at(module, leave=("training",))
    model.train()
    try:
        recorded = [_recorded(model, device, *probe) for probe in PROBES]
        return _accepted(model, recorded, None if patterns is None else tuple(patterns))
    finally:
        for module, mode in modes.items():
            module.training = mode
        kept.restore()
        drawn.restore()


def _recorded(model: nn.Module, device: torch.device, rows: int, positions: int) -> dict[tuple[nn.Module, str], Call]:
    """Return what each method is called with first in a forward pass of random token ids."""
    calls: dict[tuple[nn.Module, str], Call] = {}

    def record(key: tuple[nn.Module, str], before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if key not in calls:
            call = Call.of(before, args, kwargs)  # copied, since some change their input in place
            calls[key] = call.with_leaves([x.clone() if is_tensor(x) else x for x in call.leaves])
        return before(*args, **kwargs)

    inner = unwrap_model(model)
    base = getattr(inner, "base_model", inner)
    vocabulary = inner.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary // 2, vocabulary, (rows, positions), device=device)  # special tokens come first
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if inner.config.is_encoder_decoder else {})}
    methods = [(module, name) for module in model.modules() for name in METHODS if hasattr(module, name)]
    handles = [override_method(*key, partial(record, key)) for key in methods]
    try:
        with torch.no_grad():
            base(**inputs)
    except Exception as error:
        raise ValueError(
            f"model=<{type(inner).__name__}> cannot be asked what to tile: a forward pass of {rows} x {positions} "
            f"token ids failed with {type(error).__name__}: {error}; expected a text model. Train it without tiles"
        ) from error
    finally:
        remove_all(handles)
    return calls


def _accepted(
    model: nn.Module, recorded: list[dict[tuple[nn.Module, str], Call]], patterns: tuple[str, ...] | None
) -> tuple[list[Place], dict[str, str]]:
    places: list[Place] = []
    around: tuple[str, ...] = ()  # the names of modules whose parts run in tiles already
    reasons: dict[str, str] = {}
    known: dict[tuple[Any, ...], tuple[str, int]] = {}
    for name, module in model.named_modules():
        for method in METHODS:
            label = name if method == METHODS[0] else f"{name}.{method}"
            is_asked = patterns is None or any(fnmatchcase(label, pattern) for pattern in patterns)
            if not is_asked or name.startswith(around) or not hasattr(module, method):
                continue
            calls = [calls[module, method] for calls in recorded if (module, method) in calls]
            if len(calls) < len(PROBES):
                reasons[label] = "is not called in a forward pass of the base model"
                continue
            axes = {_axes(call.leaves, *probe) for call, probe in zip(calls, PROBES, strict=True)}
            kind = (type(module), method, repr(module), *(str(_shapes(call.leaves)) for call in calls))
            if kind not in known:
                known[kind] = _asked(module, calls, axes, 0.0 if patterns else WORTH)
            reasons[label], kept_bytes = known[kind]
            if not reasons[label]:
                places.append(Place(label, module, method, axes.pop(), calls[0].form, kept_bytes, kind))
                around += (f"{name}.",)
    return sorted(places, key=lambda place: -place.kept_bytes), reasons


def _shapes(leaves: list[Any]) -> list[Any]:
    return [(x.shape, x.dtype) if is_tensor(x) else type(x) for x in leaves]


def _axes(leaves: list[Any], rows: int, positions: int) -> Axes:
    shapes = [tuple(x.shape[:2]) if is_tensor(x) else () for x in leaves]
    whole = {(rows, positions), (1, positions)}
    return tuple(1 if shape in whole else 0 if shape[:1] == (rows * positions,) else None for shape in shapes)


def _asked(module: nn.Module, calls: list[Call], axes: set[Axes], worth: float) -> tuple[str, int]:
    """Return why a module does not work on each position alone, or "", and its kept bytes per position."""
    found = next(iter(axes))
    if len(axes) > 1 or len(set(found) - {None}) != 1:
        swapped = any(tuple(x.shape[:2]) == PROBES[0][::-1] for x in calls[0].leaves if is_tensor(x))
        return "takes (positions, rows, ...)" if swapped else "takes no (rows, positions, ...)", 0
    leaf, _ = first_axis(found)
    if not calls[0].leaves[leaf].is_floating_point():
        return "takes token ids", 0
    try:
        numbers, kept_bytes = _kept(module, calls[0])
        share = numbers / calls[0].leaves[leaf].numel()
        if share < worth:
            return f"keeps only {share:.1f} times its input for the backward pass", kept_bytes
        for call in calls:
            drawn = torch.randn_like(call.leaves[leaf])
            for one in (call, call.with_leaf(leaf, drawn)):
                if reason := _why_not(module, one, found):
                    return reason, kept_bytes
    except Exception as error:  # foreign code that does not take a part, or another dtype
        return f"cannot be called with a part of the positions ({type(error).__name__})", 0
    return "", kept_bytes // (PROBES[0][0] * PROBES[0][1])


def _why_not(module: nn.Module, call: Call, axes: Axes) -> str:
    buffers = [buffer.clone() for buffer in module.buffers()]
    reason = _problem(call, axes)
    if not all(map(torch.equal, buffers, module.buffers())):
        return "changes its buffers"
    if reason == DRAWS:  # does it, but for that?
        handles = [set_attribute(part, "training", False) for part in module.modules()]
        try:
            return _problem(call, axes) or DRAWS
        finally:
            remove_all(handles)
    return reason


def _problem(call: Call, axes: Axes) -> str:
    leaf, axis = first_axis(axes)
    length = call.leaves[leaf].shape[axis] // 3
    return difference(call, axes, length, gradients=True) or (MIXES if _reads_others(call, axes, length) else "")


def _reads_others(call: Call, axes: Axes, length: int) -> bool:
    """Return whether another value of the first or last positions changes a bit of what is computed at the others.

    In 16 bits the parts of a module may differ from the whole by less than rounding: attention beside a large residual.
    """
    leaf, axis = first_axis(axes)
    source = call.leaves[leaf]
    size = source.shape[axis]
    with torch.no_grad():
        before = tree_flatten(call())[0]
        for start, others in ((0, range(length, size)), (size - length, range(size - length))):
            changed, kept = source.clone(), torch.tensor(others, device=source.device)
            changed.narrow(axis, start, length).normal_()
            after = tree_flatten(call.with_leaf(leaf, changed)())[0]
            pairs = zip(before, after, strict=True)
            if not all(torch.equal(*(x.index_select(axis, kept) for x in pair)) for pair in pairs):
                return True
    return False


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types of it
    """Notices operators that choose among values."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func.overloadpacket in _CHOICES and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def difference(call: Call, axes: Axes, length: int, *, gradients: bool = False) -> str:
    """Return how the parts of a call, joined, differ from the whole; "" where they do not.

    Args:
        call: what is compared.
        axes: of its leaves.
        length: positions of a part.
        gradients: compare the gradient of the input too.
    """
    leaf, axis = first_axis(axes)
    source = call.leaves[leaf].detach().clone().requires_grad_(gradients)
    version = source._version
    call = call.with_leaf(leaf, source)
    before = RandomState.capture(source.device)
    with torch.set_grad_enabled(gradients):
        with _Choices() as choices:  # type: ignore[no-untyped-call]
            whole = call()
        if choices.found:
            return "contains a router; its experts tile by themselves"
        if not before.is_same(RandomState.capture(source.device)):
            return DRAWS
        if source._version != version:
            return "changes its input in place"
        parts = join([part() for part in reversed(call.cut(axes, length))][::-1], axis)
        pairs = list(zip(tree_flatten(whole)[0], tree_flatten(parts)[0], strict=True))
        if gradients:
            pairs.append(tuple(_gradient([pair[i] for pair in pairs], source) for i in (0, 1)))  # type: ignore[arg-type]
    return "" if all(_is_close(*pair) for pair in pairs) else MIXES


def _gradient(outputs: list[torch.Tensor], source: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sum of the squared outputs, which is another one at each position."""
    squares = [output.square().sum() for output in outputs if output.requires_grad]
    return torch.autograd.grad(sum(squares, source.sum()), source)[0]


def _is_close(whole: torch.Tensor, parts: torch.Tensor) -> bool:
    """Return whether no position differs by more than other kernels for another size round."""
    if whole.shape != parts.shape:
        return False
    most = max(1e-5, 4 * torch.finfo(whole.dtype).eps) if whole.is_floating_point() else 0.0  # 1e-5: stock's float32
    wide = torch.promote_types(whole.dtype, torch.float32)
    one, other = (x.to(wide).nan_to_num(0.0, 1.0, -1.0) for x in (whole, parts))
    apart, scale = (torch.linalg.vector_norm(x, dim=-1).max() for x in (one - other, one))
    return bool(apart <= most * scale)


def _kept(module: nn.Module, call: Call) -> tuple[int, int]:
    """Return how many numbers, and bytes, a call keeps for the backward pass beside weights and inputs."""
    leaves = [x.detach().clone().requires_grad_() if is_tensor(x) and x.is_floating_point() else x for x in call.leaves]
    own = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *leaves) if is_tensor(x)}
    seen: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if (place := x.untyped_storage().data_ptr()) not in own:
            seen[place] = x
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _alive = call.with_leaves(leaves)()
    sizes = {place: x.untyped_storage().nbytes() for place, x in seen.items()}
    return sum(sizes[place] // seen[place].element_size() for place in seen), sum(sizes.values())
