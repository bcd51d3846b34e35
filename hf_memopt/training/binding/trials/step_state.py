"""What a user's step may have changed by the time memory runs out, so that it can be repeated, or is not.

A step that is repeated must find everything as it was. Gradients (``Gradients``), random numbers, values and small
tensors that the Trainer, the user's own loss and modules hold (``StepState``) are put back, and a changed weight, a
large tensor or an iterator, of which there is no copy, is named.

The price: each floating-point weight is read once for its norm, about 1 % of a step, since a change through ``.data``
leaves no other trace. Only steps whose code is not known to be stock's need it.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_memopt.changes import CHANGES
from hf_memopt.training.binding.losses import is_listed_module
from hf_memopt.training.binding.model import unwrap_parallel
from hf_memopt.training.binding.undo import KeptState, RandomState

NORM_ELEMENTS = 2**22  # of a weight at a time


class StepState:
    """What a Trainer holds as a step begins; of a step ``of_stock`` the random numbers alone.

    ``others`` are tensors that the caller puts back. Without ``keeps_norms``, of no use to whom only restores,
    ``lost`` does not see changed weights.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        of_stock: bool = False,
        others: Iterable[torch.Tensor] = (),
        keeps_norms: bool = True,
        largest_copy_bytes: int = 2**20,
    ) -> None:
        self._trainer, self._random = trainer, RandomState.capture(trainer.args.device)
        self._kept = KeptState(largest_copy_bytes=largest_copy_bytes, what="a repeated step", others=others)
        self._buffers: list[tuple[str, torch.Tensor, int]] = []
        self._norms: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        if of_stock:
            return
        self._kept.look_at(trainer, leave=_names_of_stock())
        self._look_into_own_code(trainer)
        self._kept.keep(trainer.state.log_history, "trainer.state.log_history")  # of a loss that logs
        self._buffers = [(name, buffer, buffer._version) for name, buffer in trainer.model.named_buffers()]
        seen: set[int] = set()
        for owner, module in _modules_of(trainer):
            for part in module.modules():
                # of a step that failed before it removed them
                for hooks in (part._forward_hooks, part._forward_pre_hooks):
                    self._kept.keep(hooks, owner)
                # transformers notes in a model that its layers have hooks that record
                if isinstance(part, PreTrainedModel) or not is_listed_module(type(part).__module__):
                    self._kept.look_at(part)
            for name, buffer in module.named_buffers():
                self._kept.keep(buffer, f"{owner}.{name}")
            if not keeps_norms:
                continue
            is_trained = module in (trainer.model, trainer.model_wrapped)
            for name, weight in module.named_parameters():
                if id(weight) in seen or not weight.is_floating_point() or not (weight.requires_grad or not is_trained):
                    continue
                if hasattr(weight, "device_mesh"):  # a norm of shards waits for the other processes
                    continue
                seen.add(id(weight))
                self._norms.append((f"{owner}.{name}", weight, norm_of(weight)))

    def _look_into_own_code(self, trainer: Any) -> None:
        """Remember what the user's loss and classes of Trainers may change, and what they add to objects of stock."""
        if trainer.compute_loss_func is not None:
            self._kept.look_into(trainer.compute_loss_func)
        for kind in type(trainer).__mro__:
            if kind is object or is_listed_module(kind.__module__) or _is_installed(kind):
                continue
            self._classes.append((kind, {name: value for name, value in vars(kind).items() if not _is_dunder(name)}))
            for value in vars(kind).values():
                if inspect.isfunction(value):
                    self._kept.look_into(value)
        self._kept.look_at(trainer.args)
        self._kept.look_at(trainer.state, leave=[one.name for one in fields(trainer.state)])
        config = getattr(unwrap_parallel(trainer.model), "config", None)
        if hasattr(config, "__dict__"):
            self._kept.look_at(config)

    def lost(self) -> str | None:
        """Return what cannot be put back: a weight or a large tensor that was changed, an iterator."""
        changed = (name for name, weight, norm in self._norms if bool(norm_of(weight) != norm))
        name = next(iter(self._kept.lost()), None) or next(changed, None)
        if name is not None:
            return f"{name} was changed within it"
        iterator = self._kept.iterator
        return f"{iterator}, an iterator, may have moved on within it" if iterator else None

    def changed_buffer(self) -> str | None:
        """Return the name of a buffer of the model that was changed since."""
        now = dict(self._trainer.model.named_buffers())  # dynamic RoPE puts others in their place
        changed = (name for name, one, version in self._buffers if now.get(name) is not one or one._version != version)
        return next(changed, None)

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since."""
        return not self._random.is_same(RandomState.capture(self._trainer.args.device))

    def restore(self) -> None:
        """Put back all else, but for what this package has recorded."""
        changes = getattr(self._trainer, CHANGES, None)
        self._kept.restore()
        for kind, before in self._classes:
            for name in [name for name in vars(kind) if not _is_dunder(name) and name not in before]:
                delattr(kind, name)
            for name, value in before.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
        if changes is not None:
            setattr(self._trainer, CHANGES, changes)
        self._random.restore()


class Gradients:
    """The gradients of a model, and of what else a Trainer's optimizer trains, as a window begins.

    There are none, unless the user keeps some: stock drops those of the model alone after each update.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        groups = getattr(trainer.optimizer, "param_groups", ())
        weights = dict.fromkeys([*model.parameters(), *(weight for group in groups for weight in group["params"])])
        self._before = [(weight, None if weight.grad is None else weight.grad.clone()) for weight in weights]

    def restore(self) -> None:
        """Put them back, as often as needed."""
        for weight, gradient in self._before:
            weight.grad = None if gradient is None else gradient.clone()


def _is_installed(kind: type) -> bool:
    """Return whether a class is of an installed package, whose Trainers keep what they count themselves."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@cache
def _names_of_stock() -> frozenset[str]:
    """Return the attributes that stock's Trainer sets: its loop goes on between the steps that are repeated."""
    functions = map(inspect.unwrap, filter(inspect.isfunction, vars(Trainer).values()))
    steps = (step for function in functions for step in dis.get_instructions(function))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def norm_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the norm by which a changed weight is known."""
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    # torch copies all that it takes a norm of to the wider dtype: of a vocabulary's weights that is gigabytes
    own = weight.detach()
    own = own.to_local() if hasattr(own, "to_local") else own  # the shard of this process, under FSDP2
    slices = own.flatten().split(NORM_ELEMENTS)
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=wide) for part in slices])
    norm: torch.Tensor = torch.linalg.vector_norm(norms)
    return norm


def _modules_of(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a Trainer holds, the model first; also those in its lists and dicts, and in objects of a
    user's, as averages of weights are.
    """
    yield "model", trainer.model
    for name, value in vars(trainer).items():
        inner: Iterable[Any] = (value,)
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, (list, tuple)):
            inner = value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            inner = () if is_listed_module(type(value).__module__) else vars(value).values()
        yield from ((f"trainer.{name}", module) for module in inner if isinstance(module, nn.Module))
