"""Shard a model on the meta device as torch's ``fully_shard`` does, so that a recorded step has one process's bytes.

Nothing is communicated: hooks at the places where FSDP2 has its own allocate and free what it does, in its order. Of
each parameter the process keeps a shard of the first dimension. A unit of parameters is gathered before its forward
pass into a buffer and copied out of it, freed after it, gathered again for the backward pass, one unit ahead, and its
gradients are copied into the input of a reduce-scatter, of whose output the gradients of the shards are views. Seen in
torch 2.13 (``torch/distributed/fsdp/_fully_shard``); NCCL's own buffers are outside of torch's allocator.

Units are those that accelerate 1.15 makes (``fsdp2_prepare_model``): each layer, the input embeddings, the last norm
with the head, and the rest of the model. Tied embeddings belong to the head's unit.

A parameter keeps its shape, with a storage of the shard's size, so that it counts as one; meta tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_memopt.memory.settings import NotEstimableError

_Found = tuple[tuple[nn.Module, ...], tuple[nn.Parameter, ...], bool]
"""Modules of a unit, its parameters without those of units inside, and whether it reshards."""


class FullyShardedStep:
    """A model on the meta device that is sharded while it is recorded; as before after ``sharding``.

    Parameters are gathered and gradients reduced in ``compute_dtype``, as accelerate's mixed precision has it, and what
    is trained is then float32; None for each parameter's own. ``gathered_bytes`` are those of weights that a forward
    and backward pass gathers, as often as it does. ``reduces`` says whether the next passes reduce their gradients; the
    others add up whole ones.
    """

    def __init__(
        self, model: nn.Module, world_size: int, *, compute_dtype: torch.dtype | None = None, offload: bool = False
    ) -> None:
        self._model = model
        self._compute_dtype = compute_dtype
        self._offload = offload
        classes, failing = _layer_classes(model)
        self.notes: tuple[str, ...] = ()
        if failing:
            self.notes = (
                f"accelerate cannot shard {', '.join(failing)}, which has the input embeddings inside: pass "
                f"fsdp_config={{'transformer_layer_cls_to_wrap': {classes!r}}}, as is assumed here",
            )
        self._units = [_Unit(found, world_size, compute_dtype, offload) for found in _units_of(model)]
        self.gathered_bytes = sum(sum(one.gathered_bytes) * (1 + one.reshards) for one in self._units)
        self._root = self._units[0]
        self._is_in_backward = False
        self.reduces = True
        self._forward_order: list[_Unit] = []
        self._gathered_before: torch.Tensor | None = None  # its copy-out may still run beside the next gathering
        self._reduced_before: torch.Tensor | None = None

    @contextmanager
    def sharding(self) -> Iterator[FullyShardedStep]:
        """Put shards in the parameters' place, and hooks where FSDP2 has them; all of it is undone at the end."""
        with ExitStack() as around:
            shards = {one: shard for unit in self._units for one, shard in unit.shards.items()}
            swap_parameters(self._model, shards, around)
            for unit in self._units:
                for module in unit.modules:
                    hook = partial(self._before, unit)
                    around.callback(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
                    around.callback(module.register_forward_hook(partial(self._after, unit)).remove)
            yield self

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the shards, one tensor for each unit that has some."""
        return [unit.gradients for unit in self._units if unit.gradients is not None]

    def drop_gradients(self) -> None:
        """Drop the gradients of the shards, as ``zero_grad`` does."""
        for unit in self._units:
            unit.gradients = None

    def _wait(self, unit: _Unit) -> None:
        """Copy a unit out of the buffer that it was gathered into.

        A forward pass frees the buffer when the next unit has been gathered, since its copy-out runs beside that.
        """
        buffer, unit.buffer = unit.buffer, None
        if buffer is None:
            return
        if not self._is_in_backward:
            self._gathered_before = None
        unit.gathered = [_bytes(size) for size in unit.gathered_bytes]
        if not self._is_in_backward:
            self._gathered_before = buffer

    def _before(self, unit: _Unit, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        unit.gather()
        self._wait(unit)
        args, kwargs = self._cast((args, kwargs))
        if unit.state == "backward":  # recomputed: what follows is done
            return args, kwargs
        if not unit.waiting_for:
            unit.waiting_for = set(unit.modules)
            args, kwargs = self._watch_inputs(unit, args, kwargs)
        unit.state = "forward"
        return args, kwargs

    def _after(self, unit: _Unit, module: nn.Module, args: Any, outputs: Any) -> Any:
        unit.waiting_for.discard(module)
        if unit.state != "backward" and not unit.waiting_for:
            self._end_forward(unit)
            for output in filter(_needs_gradient, tree_leaves(outputs) if torch.is_grad_enabled() else ()):
                output.register_hook(lambda gradient: self._begin_backward(unit))
        return self._cast(outputs)

    def _end_forward(self, unit: _Unit) -> None:
        if not self._is_in_backward:
            if unit.reshards:
                unit.gathered = []
            unit.places.append(len(self._forward_order))
            self._forward_order.append(unit)
        unit.state = "idle"
        if unit is self._root:
            self._gathered_before = None

    def _cast(self, values: Any) -> Any:
        """Return nested values with floating-point tensors in the dtype of the parameters."""
        dtype = self._compute_dtype
        if dtype is None:
            return values

        def cast(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
            return value.to(dtype) if is_float else value

        return tree_map(cast, values)

    def _watch_inputs(self, unit: _Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Have the backward pass of a unit end when the gradients of its inputs are known."""
        found = [*filter(_needs_gradient, tree_leaves((args, kwargs)))]
        if not found or not torch.is_grad_enabled():
            return args, kwargs
        watched = iter(_AtBackward.apply(lambda: self._end_backward(unit), *found))  # type: ignore[no-untyped-call]
        changed: tuple[Any, Any] = tree_map(
            lambda value: next(watched) if _needs_gradient(value) else value, (args, kwargs)
        )
        return changed

    def _begin_backward(self, unit: _Unit) -> None:
        self._is_in_backward = True
        if unit.state == "backward":
            return
        unit.state = "backward"
        unit.gather()
        self._wait(unit)
        place = unit.places.pop() if unit.places else 0
        if place:
            self._forward_order[place - 1].gather()

    def _end_backward(self, unit: _Unit) -> None:
        """Free a unit's parameters and reduce its gradients; the input of the reduction lives until the next one."""
        unit.state = "done"
        if not self.reduces:
            unit.gathered = []  # the whole gradients stay, and the next pass adds to them
            return
        gradients = unit.take_gradients()
        unit.gathered = []
        self._reduced_before = None
        if not gradients:
            return
        dtype = gradients[0].dtype
        count = sum(_shard_numel(one.shape, unit.world_size) for one in gradients)
        self._reduced_before = torch.empty(count * unit.world_size, dtype=dtype, device="meta")
        del gradients[:-1]  # a variable of ``foreach_reduce`` refers to the last one until it returns
        reduced = torch.empty(count, dtype=dtype, device="meta").to(unit.master_dtype)
        if self._offload:
            return
        if unit.gradients is None:
            unit.gradients = reduced  # those of the shards are views of it
        else:
            unit.gradients += reduced  # to those of an earlier micro-batch

    def end(self) -> None:
        """End a backward pass: units whose inputs need no gradient end here."""
        self._is_in_backward = True
        for unit in self._units:
            if unit.state != "done":
                self._end_backward(unit)
        for unit in self._units:
            unit.state = "idle"
            unit.buffer = None
            unit.places.clear()
        self._forward_order.clear()
        self._reduced_before = None
        self._is_in_backward = False


class _Unit:
    """Modules whose parameters are gathered together: their shards, and what is gathered of them now.

    ``reshards`` says whether they are freed after the forward pass and gathered again for the backward pass.
    """

    def __init__(self, found: _Found, world_size: int, compute_dtype: torch.dtype | None, offload: bool) -> None:
        (self.modules, parameters, self.reshards), self.world_size = found, world_size
        self.shards = {one: _shard(one, world_size, compute_dtype, offload) for one in parameters}
        numels = [_shard_numel(one.shape, world_size) for one in parameters]
        sizes = [shard.element_size() for shard in self.shards.values()]
        shards_bytes = [numel * size for numel, size in zip(numels, sizes, strict=True)]
        self.gathered_bytes = [world_size * size for size in shards_bytes]
        own = {one: _own_dtype(one, compute_dtype) for one in parameters}
        is_cast = any(own[one] != shard.dtype for one, shard in self.shards.items())
        # what is gathered from: the shards themselves, cast ones, or copies of those on the host
        self.copied_bytes = [sum(shards_bytes)] if is_cast and not offload else []
        if offload:
            self.copied_bytes = [numel * own[one].itemsize for one, numel in zip(parameters, numels, strict=True)]
            self.copied_bytes += shards_bytes if is_cast else []
        self.master_dtype = next((own[one] for one in parameters if one.requires_grad), torch.float32)
        self.state = "idle"  # "forward", "backward", "done"
        self.waiting_for: set[nn.Module] = set()
        self.places: list[int] = []  # in the order of the forward pass
        self.buffer: torch.Tensor | None = None
        self.gathered: list[torch.Tensor] = []
        self.gradients: torch.Tensor | None = None  # of the shards, reduced

    def gather(self) -> None:
        """Gather into a buffer, unless that is done."""
        if self.buffer is None and not self.gathered and self.gathered_bytes:
            copies = [_bytes(size) for size in self.copied_bytes]
            self.buffer = _bytes(sum(self.gathered_bytes))
            copies.clear()

    def take_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the backward pass made, and let go of them."""
        found = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        for shard in self.shards.values():
            shard.grad = None
        return found


def _shard_numel(shape: tuple[int, ...], world_size: int) -> int:
    """Return the elements of a shard, padding included."""
    return torch.Size(shard_shape(tuple(shape), world_size)).numel()


def _shard(parameter: nn.Parameter, world_size: int, compute_dtype: torch.dtype | None, offload: bool) -> nn.Parameter:
    """Return a parameter of this shape, in the dtype that it computes in, with the storage of its shard."""
    dtype = compute_dtype if compute_dtype is not None and parameter.is_floating_point() else parameter.dtype
    whole = torch.empty(parameter.shape, dtype=dtype, device="meta")
    shard_bytes = _shard_numel(parameter.shape, world_size) * _own_dtype(parameter, compute_dtype).itemsize
    whole.untyped_storage().resize_(0 if offload else shard_bytes)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _own_dtype(parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a shard is kept in: float32 for what is trained in mixed precision."""
    return torch.float32 if compute_dtype is not None and parameter.requires_grad else parameter.dtype


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _AtBackward(torch.autograd.Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *gradients)


# ---- Units ---------------------------------------------------------------------------------------------------------


def _units_of(model: Any) -> list[_Found]:
    """Return the units of a model: the root first, then in the order of ``modules()``."""
    groups: list[tuple[tuple[nn.Module, ...], bool]] = []
    wrapped: set[nn.Module] = set()

    def wrap(modules: tuple[nn.Module | None, ...], *, reshards: bool) -> None:
        new = tuple(dict.fromkeys(module for module in modules if module is not None and module not in wrapped))
        if new:
            wrapped.update(new)
            groups.append((new, reshards))

    names = _layer_classes(model)[0]
    for module in reversed(list(model.modules())):  # those inside first
        if module is not model and type(module).__name__ in names:
            wrap((module,), reshards=True)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and getattr(head, "weight", None) is getattr(embeddings, "weight", None)
    if not is_tied:
        wrap((embeddings,), reshards=True)
    base = getattr(model, model.base_model_prefix, None) if model.base_model_prefix else model
    children = [*base.children()] if isinstance(base, nn.Module) else []  # as accelerate looks for the last norm
    norm = next((child for child in reversed(children) if "Norm" in type(child).__name__), None)
    wrap((norm, *((embeddings,) if is_tied else ()), head), reshards=False)
    wrap((model,), reshards=False)
    order = {module: index for index, module in enumerate(model.modules())}
    taken: set[nn.Parameter] = set()
    units = []
    for modules, reshards in groups:
        own = dict.fromkeys(parameter for module in modules for parameter in _parameters(module, wrapped))
        if shared := [name for name, one in model.named_parameters() if one in own and one in taken]:
            raise NotEstimableError(
                f"not estimable: strategy='fsdp2' with {shared[0]}, which is tied to a parameter of another unit; "
                "expected tied embeddings at most, since FSDP2 stops at the first step with it. Pass strategy='ddp'"
            )
        taken.update(own)
        units.append((modules, tuple(own), reshards))
    return sorted(units, key=lambda unit: min(order[module] for module in unit[0]))


def _layer_classes(model: Any) -> tuple[list[str], list[str]]:
    """Return the classes that a model names as layers, and those among them that cannot be a unit of their own.

    accelerate makes a unit of the input embeddings, which fails where they are inside a unit already (1.15, with BERT:
    "value was None when it should not be"). Without ``transformer_layer_cls_to_wrap`` such a run stops at its start.
    """
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError as error:
        raise NotEstimableError(
            f"not estimable: strategy='fsdp2' with {type(model).__name__}, which has no get_input_embeddings(); "
            "expected one, since accelerate's FSDP2 calls it and stops at its start. Pass strategy='ddp'"
        ) from error
    around = {type(module).__name__ for module in model.modules() if embeddings in module.children()}
    names = sorted(getattr(model, "_no_split_modules", None) or ())
    return [name for name in names if name not in around], [name for name in names if name in around]


def _parameters(module: nn.Module, wrapped: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, without those of wrapped modules inside."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in wrapped:
            yield from _parameters(child, wrapped)


def shard_shape(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Return the shape of the first process's shard: FSDP2 cuts the first dimension, and no process has more.

    Examples:
        >>> shard_shape((5, 3), 2)
        (3, 3)
    """
    return (-(-shape[0] // world_size), *shape[1:]) if shape else shape


def swap_parameters(model: nn.Module, swapped: Mapping[nn.Parameter, nn.Parameter], around: ExitStack) -> None:
    """Replace parameters wherever modules hold them, tied ones too; ``around`` puts them back when it closes."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in swapped:
                around.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = swapped[parameter]
