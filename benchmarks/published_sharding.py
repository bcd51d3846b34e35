"""The FSDP of 2024, FullyShardedDataParallel with flat parameters, for measurements of runs on several GPUs.

What differs from ``fully_shard`` of today: the parameters of a unit are one flat tensor, of which each process has an
equal part; it is gathered in place, without a copy; the gradients of a unit are put together into one flat tensor
before they are reduced, and a unit that checkpointing recomputes is freed and gathered once more between its
recomputation and its backward pass. Embeddings, last norm and head are the root's unit, gathered from the beginning of
the forward pass to the end of the backward pass.

A unit whose own parameters are frozen learns from a hook on its inputs when its backward pass is over. The handle of
that hook lives until the end of the whole backward pass, and with it the inputs that reentrant checkpointing made anew
and their gradients: two tensors (batch, seq, hidden) of each layer, where a single GPU frees both.

That the measured runs had this one, and not ``fully_shard``, is in the harness's own file for accelerate: sharding
strategy 1 with backward prefetch, options of version 1, of a release that has no other; and it loads 4-bit weights
with ``bnb_4bit_quant_storage`` set to bfloat16, so that they are cut too.

Source: github:foundation-model-stack/fms-acceleration 24bdadb scripts/benchmarks/accelerate.yaml,
plugins/accelerated-peft/src/fms_acceleration_peft/framework_plugin_bnb.py; github:pytorch/pytorch v2.4.1
torch/distributed/fsdp/_runtime_utils.py (_register_post_backward_reshard_only_hook), _flat_param.py,
torch/autograd/graph.py (register_multi_grad_hook);
github:huggingface/accelerate v1.0.1 accelerator.py, prepare_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hf_memopt.memory.optimizers import OptimizerMemory, ParameterFacts, optimizer_memory
from hf_memopt.memory.settings import StepSettings


def sharded_optimizer(optim: str, world_size: int) -> Callable[[Sequence[ParameterFacts]], OptimizerMemory]:
    """Return the memory of an optimizer whose parameters are parts of flat tensors."""

    def memory(facts: Sequence[ParameterFacts]) -> OptimizerMemory:
        parts = [replace(fact, shape=(-(-fact.elements // world_size),)) for fact in facts]
        return optimizer_memory(parts, StepSettings(optim=optim))

    return memory


@dataclass(eq=False)
class _Unit:
    """The parameters of a unit, and the flat tensor while it is gathered.

    Each adapter in a layer is a unit of its own, which run last before the layer ends: what the backward pass of the
    layer gathers ahead are these few bytes, not the layer before it.
    """

    parameters: list[nn.Parameter]
    flat_bytes: int
    is_root: bool
    has_adapters: bool
    flat: torch.Tensor | None = None
    place: int | None = None
    is_done: bool = False

    def gather(self) -> None:
        if self.flat is None:
            self.flat = _bytes(self.flat_bytes)


@dataclass(eq=False)
class FlatShards:
    """Shard a model in place, as ``prepare=`` of an estimate takes it; see the module."""

    world_size: int
    order: list[_Unit] = field(default_factory=list)
    units: list[_Unit] = field(default_factory=list)
    is_backward: bool = False
    kept: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, model: Any) -> Any:
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        taken: set[int] = set()
        for module in [*layers, model]:
            own = [one for one in module.parameters() if id(one) not in taken]
            taken.update(map(id, own))
            has_adapters = module is not model and len({one.requires_grad for one in own}) > 1
            unit = _Unit(own, sum(one.nbytes for one in own), module is model, has_adapters)
            self.units.append(unit)
            module.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after(unit))
            for one in own:
                one.untyped_storage().resize_(-(-one.nbytes // self.world_size))
        return model

    def _before(self, unit: _Unit) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if unit.is_root:
                for one in self.units:
                    one.is_done, one.place = False, None
                self.order.clear()
            unit.gather()
            found: list[torch.Tensor] = []
            tree_map(lambda value: found.append(value) if _trains(value) else None, (args, kwargs))
            if not found or not torch.is_grad_enabled() or unit.is_root:
                return args, kwargs
            if unit.has_adapters:
                self.kept += found
                for value in found:
                    value.retain_grad()
            watched = iter(_Then.apply(lambda: self._end(unit), *found))
            return tree_map(lambda value: next(watched) if _trains(value) else value, (args, kwargs))

        return before

    def _after(self, unit: _Unit) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, outputs: Any) -> None:
            if not unit.is_root:
                unit.flat = None
            if unit.place is None:
                unit.place = len(self.order)
            self.order.append(unit)
            if torch.is_grad_enabled():
                tree_map(
                    lambda value: value.register_hook(lambda _: self._begin(unit)) if _trains(value) else None, outputs
                )

        return after

    def _begin(self, unit: _Unit) -> None:
        if unit.is_root and not self.is_backward:
            self.is_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        unit.gather()
        if unit.place and not unit.has_adapters:
            before = self.order[unit.place - 1]
            if not before.is_done:
                before.gather()

    def _end(self, unit: _Unit) -> None:
        """Put the gradients together, free the parameters, and keep the reduced part of the gradients."""
        if unit.is_done:
            return
        unit.is_done = True
        trained = [one for one in unit.parameters if one.grad is not None]
        flat = None
        if trained:
            flat = torch.empty(sum(one.numel() for one in trained), dtype=trained[0].dtype, device="meta")
            for one in trained:
                one.grad = None
        unit.flat = None
        if flat is not None:
            shard = torch.empty(-(-flat.numel() // self.world_size), dtype=flat.dtype, device="meta")
            for one in trained:
                one.grad = shard.as_strided(one.shape, (0,) * one.dim())

    def _finish(self) -> None:
        for unit in self.units:
            self._end(unit)
        self.is_backward = False
        self.kept.clear()


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="meta")


def _trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Then(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: torch.Tensor) -> Any:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return (None, *gradients)
