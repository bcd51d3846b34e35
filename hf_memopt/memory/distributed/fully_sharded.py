"""Shard a model on the meta device as torch's ``fully_shard`` does, so that a recorded step has one process's bytes.

Nothing is communicated: hooks at the places where FSDP2 has its own allocate and free what it does, in its order. Of
each parameter the process keeps a shard of the first dimension. A unit of parameters is gathered before its forward
pass into a buffer and copied out of it, freed after it, gathered again for the backward pass, one unit ahead, and its
gradients are copied into the input of a reduce-scatter, of whose output the gradients of the shards are views. Seen in
torch 2.13 (``torch/distributed/fsdp/_fully_shard``); NCCL's own buffers are outside of torch's allocator.

A parameter keeps its shape, with a storage of the shard's size, so that it counts as one; meta tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hf_memopt.memory.distributed.units import Unit, layer_classes, shard_shape, swap_parameters, units_of

__all__ = ["FullyShardedStep"]


class FullyShardedStep:
    """A model that is sharded while it is recorded.

    Args:
        model: on the meta device; as before after ``sharding``.
        world_size: processes that share the parameters.
        compute_dtype: that parameters are gathered in and gradients reduced in, as accelerate's mixed precision has it;
            what is trained is then float32. None for each parameter's own.
        offload: whether shards and their gradients are in host memory between uses.

    Attributes:
        gathered_bytes: of weights that a forward and backward pass gathers, as often as it does.
        notes: what a run needs besides.
    """

    def __init__(
        self, model: nn.Module, world_size: int, *, compute_dtype: torch.dtype | None = None, offload: bool = False
    ) -> None:
        self._model = model
        self._compute_dtype = compute_dtype
        self._offload = offload
        classes, failing = layer_classes(model)
        self.notes: tuple[str, ...] = ()
        if failing:
            self.notes = (
                f"accelerate cannot shard {', '.join(failing)}, which has the input embeddings inside: pass "
                f"fsdp_config={{'transformer_layer_cls_to_wrap': {classes!r}}}, as is assumed here",
            )
        self._units = [_ShardedUnit(unit, world_size, compute_dtype, offload) for unit in units_of(model)]
        self.gathered_bytes = sum(sum(one.gathered_bytes) * (1 + one.unit.reshards) for one in self._units)
        self._root = self._units[0]
        self._is_in_backward = False
        self._reduces = True
        self._forward_order: list[_ShardedUnit] = []
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
                    before = module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
                    around.callback(before.remove)
                    around.callback(module.register_forward_hook(self._after(unit)).remove)
            yield self

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the shards, one tensor for each unit that has some."""
        return [unit.gradients for unit in self._units if unit.gradients is not None]

    def drop_gradients(self) -> None:
        """Drop the gradients of the shards, as ``zero_grad`` does."""
        for unit in self._units:
            unit.gradients = None

    def begin(self, *, reduces: bool) -> None:
        """Begin a forward and backward pass, which adds up whole gradients if it does not reduce them."""
        self._reduces = reduces

    # ---- Gathering --------------------------------------------------------------------------------------------------

    def _wait(self, unit: _ShardedUnit) -> None:
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

    # ---- Hooks ------------------------------------------------------------------------------------------------------

    def _before(self, unit: _ShardedUnit) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
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

        return before

    def _after(self, unit: _ShardedUnit) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, outputs: Any) -> Any:
            unit.waiting_for.discard(module)
            if unit.state != "backward" and not unit.waiting_for:
                self._end_forward(unit)
                if torch.is_grad_enabled():
                    tree_map(lambda output: self._watch_output(unit, output), outputs)
            return self._cast(outputs)

        return after

    def _end_forward(self, unit: _ShardedUnit) -> None:
        if not self._is_in_backward:
            if unit.unit.reshards:
                unit.free()
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

    def _watch_inputs(self, unit: _ShardedUnit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Have the backward pass of a unit end when the gradients of its inputs are known."""
        found: list[torch.Tensor] = []
        tree_map(lambda value: found.append(value) if _needs_gradient(value) else None, (args, kwargs))
        if not found or not torch.is_grad_enabled():
            return args, kwargs
        watched = iter(_AtBackward.apply(lambda: self._end_backward(unit), *found))  # type: ignore[no-untyped-call]
        changed: tuple[Any, Any] = tree_map(
            lambda value: next(watched) if _needs_gradient(value) else value, (args, kwargs)
        )
        return changed

    def _watch_output(self, unit: _ShardedUnit, output: Any) -> None:
        if _needs_gradient(output):
            output.register_hook(lambda gradient: self._begin_backward(unit))

    def _begin_backward(self, unit: _ShardedUnit) -> None:
        self._is_in_backward = True
        if unit.state == "backward":
            return
        unit.state = "backward"
        unit.gather()
        self._wait(unit)
        place = unit.places.pop() if unit.places else 0
        if place:
            self._forward_order[place - 1].gather()

    def _end_backward(self, unit: _ShardedUnit) -> None:
        """Free a unit's parameters and reduce its gradients; the input of the reduction lives until the next one."""
        unit.state = "done"
        if not self._reduces:
            unit.free()  # the whole gradients stay, and the next pass adds to them
            return
        gradients = unit.take_gradients()
        unit.free()
        self._reduced_before = None
        if not gradients:
            return
        dtype = gradients[0].dtype
        count = sum(shard_numel(one.shape, unit.world_size) for one in gradients)
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


class _ShardedUnit:
    """The parameters of a unit: their shards, and what is gathered of them now."""

    def __init__(self, unit: Unit, world_size: int, compute_dtype: torch.dtype | None, offload: bool) -> None:
        self.unit, self.modules, self.world_size = unit, unit.modules, world_size
        self.shards = {one: _shard(one, world_size, compute_dtype, offload) for one in unit.parameters}
        numels = [shard_numel(one.shape, world_size) for one in unit.parameters]
        sizes = [shard.element_size() for shard in self.shards.values()]
        shards_bytes = [numel * size for numel, size in zip(numels, sizes, strict=True)]
        self.gathered_bytes = [world_size * size for size in shards_bytes]
        own = {one: _own_dtype(one, compute_dtype) for one in unit.parameters}
        is_cast = any(own[one] != shard.dtype for one, shard in self.shards.items())
        # what is gathered from: the shards themselves, cast ones, or copies of those on the host
        self.copied_bytes = [sum(shards_bytes)] if is_cast and not offload else []
        if offload:
            self.copied_bytes = [numel * own[one].itemsize for one, numel in zip(unit.parameters, numels, strict=True)]
            self.copied_bytes += shards_bytes if is_cast else []
        self.master_dtype = next((own[one] for one in unit.parameters if one.requires_grad), torch.float32)
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

    def free(self) -> None:
        """Free the gathered parameters."""
        self.gathered = []

    def take_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the backward pass made, and let go of them."""
        found = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        for shard in self.shards.values():
            shard.grad = None
        return found


def shard_numel(shape: tuple[int, ...], world_size: int) -> int:
    """Return the elements of a shard, padding included."""
    return torch.Size(shard_shape(tuple(shape), world_size)).numel()


def _shard(parameter: nn.Parameter, world_size: int, compute_dtype: torch.dtype | None, offload: bool) -> nn.Parameter:
    """Return a parameter of this shape, in the dtype that it computes in, with the storage of its shard."""
    dtype = compute_dtype if compute_dtype is not None and parameter.is_floating_point() else parameter.dtype
    whole = torch.empty(parameter.shape, dtype=dtype, device="meta")
    shard_bytes = shard_numel(parameter.shape, world_size) * _own_dtype(parameter, compute_dtype).itemsize
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
