"""``undisturbed``: call ``compute_loss`` on a few rows without any lasting effect on trainer and model.

Subclasses of ``Trainer`` count and log in ``compute_loss`` (TRL keeps a list of readings for each metric), and models
keep statistics in buffers. A probe is not a step, so all of it is as before once the probe is over.

Limitations: objects of C extensions, closures and files are not seen; a buffer above ``LARGEST_COPY_BYTES`` is watched
but not copied, and a warning names it if it has changed.
"""

from __future__ import annotations

import operator
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hf_memopt.binding.handles import override_method

__all__ = ["undisturbed"]

LARGEST_COPY_BYTES = 2**20
DEEPEST = 5  # trainer -> metrics -> "train" -> name of a metric -> its list
MOST_VISITED = 1000  # entries of one container; of a longer one (a dataset as a list) only the container is kept
FOREIGN = ("accelerate", "bitsandbytes", "datasets", "hf_memopt", "logging", "numpy", "peft", "torch", "transformers")
"""Packages whose objects keep no readings of a loss, or are looked at in another way."""
_NO_READINGS = (type, FunctionType, MethodType, BuiltinFunctionType, torch.optim.Optimizer, Dataset, nn.Parameter)


@contextmanager
def undisturbed(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, in this process alone; leave modes, random numbers and what was kept as they were."""
    modes = {module: module.training for module in model.modules()}
    kept = _Kept()
    kept.look_at(trainer)
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):  # they move weights in and out of attributes
        for module in modes:
            kept.look_at(module)
    device = trainer.args.device
    states = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.callback(kept.restore)
        # This process's own GPU: forking the generators of all visible ones would start CUDA on each.
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(override_method(trainer, "log", _silent))
        if trainer.args.world_size > 1:  # another process may not be probing now, and would be waited for
            for name in ("gather", "gather_for_metrics", "reduce"):
                stack.enter_context(override_method(trainer.accelerator, name, _alone))
        for module in modes:
            module.training = False  # not eval(), which a user's module may use to rewrite its weights
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(states[0])
            np.random.set_state(states[1])


def _silent(log: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _alone(collect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: value


class _Kept:
    """Attributes, containers and small tensors as they are now."""

    def __init__(self) -> None:
        self._mappings: list[tuple[dict[Any, Any], dict[Any, Any], set[str]]] = []  # now, before, names to leave alone
        self._sequences: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._tensors: list[tuple[str, torch.Tensor, int, torch.Tensor | None]] = []
        self._seen: set[int] = set()

    def look_at(self, owner: Any, depth: int = 0) -> None:
        """Remember the attributes of an object and what their containers hold; of a module its buffers too, while
        weights, submodules and hooks are left alone.
        """
        of_torch = set(vars(nn.Module())) - {"_buffers"} if isinstance(owner, nn.Module) else set()
        own = {name: value for name, value in vars(owner).items() if name not in of_torch}
        self._mappings.append((vars(owner), own, of_torch))
        for name, value in own.items():
            self._keep(value, f"{type(owner).__name__}.{name}", depth + 1)

    def _keep(self, value: Any, name: str, depth: int) -> None:
        if id(value) in self._seen or depth > DEEPEST or isinstance(value, _NO_READINGS):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone() if value.nbytes <= LARGEST_COPY_BYTES else None
            self._tensors.append((name, value, value._version, copy))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= LARGEST_COPY_BYTES:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, (dict, list, set, deque)):
            if isinstance(value, dict):
                self._mappings.append((value, value.copy(), set()))
            else:
                self._sequences.append((value, value.copy()))
            if len(value) <= MOST_VISITED:
                for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                    self._keep(each, f"{name}[{key!r}]", depth + 1)
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in FOREIGN:
            self.look_at(value, depth)

    def restore(self) -> None:
        """Put back what has changed, and warn of what cannot be."""
        for mapping, before, left_alone in self._mappings:
            for name in [name for name in mapping if name not in before and name not in left_alone]:
                del mapping[name]
            for name, value in before.items():
                if name not in mapping or mapping[name] is not value:
                    mapping[name] = value
        for sequence, before in self._sequences:
            if len(sequence) != len(before) or any(map(operator.is_not, sequence, before)):
                sequence.clear()
                sequence.update(before) if isinstance(sequence, set) else sequence.extend(before)
        for array, copied in self._arrays:
            array[...] = copied
        for name, tensor, version, copy in self._tensors:
            if tensor._version == version:
                continue
            if copy is not None:
                with torch.no_grad():
                    tensor.copy_(copy)
                continue
            warnings.warn(
                f"{name}, {tensor.nbytes / 2**20:.0f} MiB, was changed by a probe of the loss and is too large to be "
                f"put back; expected at most {LARGEST_COPY_BYTES // 2**20} MiB, or no change outside of training. "
                "Change it in training mode alone: if model.training: ...",
                stacklevel=2,
            )
