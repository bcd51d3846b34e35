"""Find the modules that work on each position alone, by asking the model and never by the name of a class.

The base model runs over random token ids in training mode, at two lengths. A module passes where what it returns is
what it returns for parts of its input, joined, and where no bit of that depends on another position. The parts run last
first: a module that carries a state would else go on where it left off. What draws random numbers or changes a buffer
is refused, and so is a router, which chooses among values: its scores are recorded at each call, and its experts, which
pass by themselves, may have room for a number of tokens. Modules alike in class, settings and shapes are asked once.

Limitations: text models whose modules take (rows, positions, ...) or (rows * positions, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hf_memopt.training.binding.model import unwrap_model
from hf_memopt.training.binding.undo import KeptState, RandomState, override_method, remove_all, set_attribute

PROBES = ((2, 13), (3, 7))  # rows and positions: no two products or factors are alike
METHODS = ("forward", "feed_forward_chunk", "ff_chunk")  # the others are what stock's chunk_size_feed_forward cuts
WORTH = 3.5  # kept numbers per number of the input: MLPs keep 4 to 30, norms 1 to 3, linear layers 0
DRAWS, MIXES, SWAPPED = "draws random numbers in training", "mixes positions", "takes (positions, rows, ...)"
_CHOICES = {torch.ops.aten.topk, torch.ops.aten.argmax, torch.ops.aten.sort, torch.ops.aten.max}

Axes = tuple[Any, ...]  # by leaf: 1 of (rows, positions, ...), 0 of (rows * positions, ...), None where it is not cut


@dataclass(frozen=True, slots=True)
class Call:
    """What a method is called with: the leaves of its arguments, tensors or not, and what holds them."""

    method: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec

    @property
    def form(self) -> tuple[Any, ...]:
        """The arguments without their values: what holds the leaves, and which of them are tensors."""
        return self.spec, *map(torch.is_tensor, self.leaves)

    def cut(self, axes: Axes, length: int) -> list[Call]:
        """Return calls with ``length`` positions each, the last with the rest."""
        pieces = [[x] if axis is None else x.split(length, axis) for x, axis in zip(self.leaves, axes, strict=True)]
        tiles = range(len(pieces[0]))
        return [replace(self, leaves=[piece[i if len(piece) > 1 else 0] for piece in pieces]) for i in tiles]

    def __call__(self) -> Any:
        """Make the call, with contiguous tensors: experts and ``Conv1D`` call ``view``, which parts would not bear."""
        args, kwargs = tree_unflatten([x.contiguous() if torch.is_tensor(x) else x for x in self.leaves], self.spec)
        return self.method(*args, **kwargs)


class Place(NamedTuple):
    """A method that works on each position alone, by the name of its module or, where it is only a part of it, its own.

    ``axes`` and ``form`` are those of its calls, ``kept_bytes`` what it keeps for the backward pass beside weights and
    inputs, per position of a row; ``kind`` is equal for modules that are alike.
    """

    name: str
    module: nn.Module
    method: str
    axes: Axes
    form: tuple[Any, ...]
    kept_bytes: int
    kind: tuple[Any, ...]


def join(outputs: list[Any], axis: int) -> Any:
    """Return the outputs of parts, joined; all of them have to be tensors."""
    leaves, specs = zip(*map(tree_flatten, outputs), strict=True)
    return tree_unflatten([torch.cat(parts, axis) for parts in zip(*leaves, strict=True)], specs[0])


def find_places(model: nn.Module) -> tuple[list[Place], dict[str, str]]:
    """Return the outermost places that are worth it, most kept bytes first, and why others are none, by their names.

    The model and the random numbers are as before afterwards.
    """
    places: list[Place] = []
    around: tuple[str, ...] = ()  # the names of modules whose parts are in a place already
    reasons: dict[str, str] = {}
    known: dict[tuple[Any, ...], tuple[str, Axes, int]] = {}
    with _in_training(model) as device:
        recorded = [_recorded(model, device, *probe) for probe in PROBES]
        for name, module, method in ((*named, method) for named in model.named_modules() for method in METHODS):
            calls = [calls[module, method] for calls in recorded if (module, method) in calls]
            if len(calls) < len(PROBES) or name.startswith(around):
                continue
            label = name if method == "forward" else f"{name}.{method}"
            shapes = ((x.shape, x.dtype) if torch.is_tensor(x) else type(x) for x in calls[0].leaves)
            kind = (type(module), method, repr(module), *shapes)
            if kind not in known:
                known[kind] = _asked(module, calls)
            reasons[label], axes, kept_bytes = known[kind]
            if not reasons[label]:
                places.append(Place(label, module, method, axes, calls[0].form, kept_bytes, kind))
                around += (f"{name}.",)
    return sorted(places, key=lambda place: -place.kept_bytes), reasons


@contextmanager
def _in_training(model: nn.Module) -> Iterator[torch.device]:
    device = next(model.parameters()).device
    kept, drawn = KeptState(what="a probe for tiles"), RandomState.capture(device)
    for module in model.modules():
        kept.look_at(module)
    modes = [set_attribute(module, "training", True) for module in model.modules()]
    try:
        with torch.no_grad():
            yield device
    finally:
        remove_all(modes)
        kept.restore()
        drawn.restore()


def _recorded(model: nn.Module, device: torch.device, rows: int, positions: int) -> dict[tuple[nn.Module, str], Call]:
    """Return what each method is called with first in a forward pass of random token ids."""
    calls: dict[tuple[nn.Module, str], Call] = {}

    def record(key: tuple[nn.Module, str], before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))  # copied, since some change their input in place
        calls.setdefault(key, Call(before, [x.clone() if torch.is_tensor(x) else x for x in leaves], spec))
        return before(*args, **kwargs)

    inner = unwrap_model(model)
    vocabulary = inner.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary // 2, vocabulary, (rows, positions), device=device)  # special tokens come first
    methods = [(module, name) for module in model.modules() for name in METHODS if hasattr(module, name)]
    handles = [override_method(*key, partial(record, key)) for key in methods]
    try:
        inner.base_model(ids, **({"decoder_input_ids": ids} if inner.config.is_encoder_decoder else {}))
    except Exception as error:
        raise ValueError(
            f"model=<{type(inner).__name__}> does not tile: it fails for random token ids ({error}); expected a text "
            "model of transformers. Train it without tiles"
        ) from error
    finally:
        remove_all(handles)
    return calls


def _asked(module: nn.Module, calls: list[Call]) -> tuple[str, Axes, int]:
    """Return why a method is no place, or "", the dimensions of its positions, and its kept bytes per position."""
    source, *_ = calls[0].leaves or [None]
    axes, others = (_axes(call.leaves, *probe) for call, probe in zip(calls, PROBES, strict=True))
    if axes != others or axes[:1] in ((), (None,)) or {0, 1} <= {*axes} or not source.is_floating_point():
        return SWAPPED if torch.is_tensor(source) and source.shape[:2] == PROBES[0][::-1] else MIXES, axes, 0
    try:
        numbers, kept_bytes = _kept(module, calls[0])
        little = "" if numbers >= WORTH * source.numel() else "keeps little"
        reason = little or next(filter(None, (_why_not(module, call, axes) for call in calls)), "")
    except Exception as error:  # foreign code that does not take a part
        return f"does not take a part of the positions ({type(error).__name__})", axes, 0
    return reason, axes, kept_bytes // (PROBES[0][0] * PROBES[0][1])


def _axes(leaves: list[Any], rows: int, positions: int) -> Axes:
    shapes = [tuple(x.shape[:2]) if torch.is_tensor(x) else () for x in leaves]
    whole = {(rows, positions), (1, positions)}
    return tuple(1 if shape in whole else 0 if shape[:1] == (rows * positions,) else None for shape in shapes)


def _kept(module: nn.Module, call: Call) -> tuple[int, int]:
    """Return how many numbers, and bytes, a call keeps for the backward pass beside weights and inputs."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x for x in call.leaves]
    own = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *leaves) if torch.is_tensor(x)}
    seen: dict[int, torch.Tensor] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        return seen.setdefault(x.untyped_storage().data_ptr(), x)

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        _alive = replace(call, leaves=leaves)()
    sizes = [(x.untyped_storage().nbytes(), x.element_size()) for place, x in seen.items() if place not in own]
    return sum(size // each for size, each in sizes), sum(size for size, _ in sizes)


def _why_not(module: nn.Module, call: Call, axes: Axes) -> str:
    length = call.leaves[0].shape[axes[0]] // 3
    buffers = [buffer.clone() for buffer in module.buffers()]
    reason = difference(call, axes, length)
    if reason == DRAWS:  # does it, but for that?
        modes = [set_attribute(part, "training", False) for part in module.modules()]
        reason = difference(call, axes, length) or _mixing(call, axes, length) or DRAWS
        remove_all(modes)
    changed = not all(map(torch.equal, buffers, module.buffers()))
    return "changes its buffers" if changed else reason or _mixing(call, axes, length)


def difference(call: Call, axes: Axes, length: int) -> str:
    """Return what a call does that its parts of ``length`` positions, joined, do not; "" where they are the same."""
    before = RandomState.capture(call.leaves[0].device)
    with _Choices() as choices:
        whole = call()
    if choices.found:
        return "contains a router"
    if not before.is_same(RandomState.capture(before.device)):
        return DRAWS
    parts = join([part() for part in reversed(call.cut(axes, length))][::-1], axes[0])
    pairs = zip(tree_flatten(whole)[0], tree_flatten(parts)[0], strict=True)
    return "" if all(_is_close(*pair) for pair in pairs) else MIXES


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Notices operators that choose among values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A router has scores of each position; bitsandbytes asks for the largest value of a flat tensor.
        self.found |= func.overloadpacket in _CHOICES and args[0].is_floating_point() and args[0].dim() > 1
        return func(*args, **(kwargs or {}))


def _is_close(whole: torch.Tensor, parts: torch.Tensor) -> bool:
    """Return whether outputs differ by no more than other kernels for another size round."""
    most = max(1e-5, 8 * torch.finfo(whole.dtype).eps)  # 1e-5: stock computes some in float32
    largest = float(whole.abs().nan_to_num().max())
    return whole.shape == parts.shape and torch.allclose(whole, parts, most, most * largest, equal_nan=True)


def _mixing(call: Call, axes: Axes, length: int) -> str:
    """Return MIXES where other values at the first or last positions change a bit of what is computed at the others.

    In 16 bits less than a rounding may tell the parts from the whole: attention beside a large residual.
    """
    source, *others = call.leaves
    rest = source.shape[axes[0]] - length
    before = tree_flatten(call())[0]
    for start, same in ((0, length), (rest, 0)):
        changed = source.clone()
        changed.narrow(axes[0], start, length).normal_()
        after = tree_flatten(replace(call, leaves=[changed, *others])())[0]
        kept = ([x.narrow(axes[0], same, rest) for x in pair] for pair in zip(before, after, strict=True))
        if not all(torch.equal(*pair) for pair in kept):
            return MIXES
    return ""
