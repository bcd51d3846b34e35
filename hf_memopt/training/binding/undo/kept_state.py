"""What objects hold now (``KeptState``), and the generators of random numbers (``RandomState``), to put it back later.

Limitations: objects with ``__slots__`` and of C extensions, but for generators of random numbers; what files hold.
"""

from __future__ import annotations

import operator
import random
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from io import IOBase
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

LARGEST_COPY_BYTES = 2**20
DEEPEST = 5  # trainer -> metrics -> "train" -> name of a metric -> its list
MOST_VISITED = 1000  # entries of one container; of a longer one (a dataset as a list) only the container is kept
FOREIGN = (
    *("accelerate", "bitsandbytes", "datasets", "deepspeed", "hf_memopt"),
    *("logging", "numpy", "peft", "torch", "transformers"),
)
"""Packages whose objects keep no readings of a loss, or are looked at in another way."""
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
_NO_READINGS = (type, ModuleType, *_FUNCTIONS, torch.optim.Optimizer, Dataset, nn.Parameter)
CONTAINERS = (dict, list, set, deque)

_LEFT_ALONE = {name for name in vars(nn.Module()) if name != "_buffers" and "hook" not in name}
"""Attributes of every module. Hooks are put back with the rest: transformers registers some in the first forward pass
that asks for hidden states or router logits and notes so in another attribute, and one without the other would record
everything twice.
"""


class KeptState:
    """Attributes, containers and tensors as they are now."""

    def __init__(
        self,
        foreign: Collection[str] = FOREIGN,  # packages whose objects are not looked at unless look_at gets them
        largest_copy_bytes: int = LARGEST_COPY_BYTES,  # of a larger tensor a change is only noticed, with a warning
        what: str = "a probe of the loss",  # runs in between, for that warning
        others: Iterable[torch.Tensor] = (),  # that somebody else puts back
    ) -> None:
        self._foreign = foreign
        self._what = what
        self._largest_copy_bytes = largest_copy_bytes
        self._mappings: list[tuple[dict[Any, Any], dict[Any, Any], set[str]]] = []  # now, before, names to leave alone
        self._sequences: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._tensors: list[tuple[str, torch.Tensor, int, torch.Tensor | None]] = []
        self._generators: list[tuple[Callable[[Any], object], Any]] = []  # what sets its state, and the state
        self._cells: list[tuple[CellType, Any]] = []
        self._seen = set(map(id, others))
        self.unseen = ""  # the first value whose change cannot be seen: an iterator, a file, a large array
        self.iterator = ""  # the first iterator that is no file

    def look_at(self, owner: Any, depth: int = 0, leave: Collection[str] = ()) -> None:
        """Remember the attributes of an object and what their containers hold, but for those to ``leave``; of a module
        its buffers and hooks too, while weights and submodules are left alone.
        """
        left = {*leave, *(_LEFT_ALONE if isinstance(owner, nn.Module) else ())}
        own = {name: value for name, value in vars(owner).items() if name not in left}
        self._mappings.append((vars(owner), own, left))
        for name, value in own.items():
            self.keep(value, f"{type(owner).__name__}.{name}", depth + 1)

    def look_into(self, function: Any, package: str = "") -> None:
        """Remember what a function can change: its closure, defaults, attributes, the globals that it names, and what
        it is bound to. Of the functions among them those of the same package are followed.
        """
        if isinstance(function, MethodType):
            self._look_into_each([function.__func__], package)
            self.look_into(function.__self__, package)
        elif isinstance(function, partial):
            self._look_into_each([function.func, *function.args, *function.keywords.values()], package)
        elif isinstance(function, FunctionType):
            of, globals_ = str(function.__module__).partition(".")[0], function.__globals__
            if id(function) in self._seen or package not in ("", of):
                return
            self._seen.add(id(function))
            cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if cell != CellType()]
            named = {name: globals_[name] for name in _names(function.__code__) if name in globals_}
            self._cells += cells
            self._mappings += [(globals_, named, set(globals_)), (vars(function), vars(function).copy(), set())]
            defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
            held = *(value for _, value in cells), *named.values(), *vars(function).values(), *defaults
            self._look_into_each(held, of)
        else:
            kind = type(function)
            self.keep(function, kind.__name__)
            of_class = (item for one in kind.__mro__ for item in vars(one).items())
            used = [value for name, value in of_class if name == "__call__" or isinstance(value, CONTAINERS)]
            self._look_into_each(used, kind.__module__.partition(".")[0])

    def _look_into_each(self, values: Iterable[Any], package: str) -> None:
        for value in values:
            if isinstance(value, (FunctionType, MethodType, partial)):
                self.look_into(value, package)
            else:
                self.keep(value, type(value).__name__)

    def keep(self, value: Any, name: str, depth: int = 0) -> None:
        """Remember what a value holds: a tensor, an array, a container, a generator, an object."""
        if id(value) in self._seen or depth > DEEPEST or isinstance(value, _NO_READINGS):
            return
        self._seen.add(id(value))
        if isinstance(value, (Iterator, IOBase)):
            self.unseen = self.unseen or name
            self.iterator = self.iterator or ("" if isinstance(value, IOBase) else name)
        if isinstance(value, torch.Tensor):
            copy = None
            if value.nbytes <= self._largest_copy_bytes:  # small ones on their device, so that nothing is waited for
                is_small = value.nbytes <= LARGEST_COPY_BYTES
                copy = value.detach().clone() if is_small else value.detach().to("cpu", copy=True)
            self._tensors.append((name, value, value._version, copy))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= self._largest_copy_bytes:
                self._arrays.append((value, value.copy()))
            else:
                self.unseen = self.unseen or name
        elif isinstance(value, CONTAINERS):
            is_foreign = type(value).__module__.partition(".")[0] in self._foreign  # may make its items when asked
            if isinstance(value, dict):
                self._mappings.append((value, dict.copy(value), set()))
            else:
                self._sequences.append((value, value.copy()))
            if len(value) <= MOST_VISITED and not is_foreign:
                for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                    self.keep(each, f"{name}[{key!r}]", depth + 1)
        elif isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._generators.append((partial(setattr, bits, "state"), bits.state))
        elif isinstance(value, np.random.RandomState):
            self._generators.append((value.set_state, value.get_state(legacy=False)))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in self._foreign:
            self.look_at(value, depth)

    def has_changed(self) -> bool:
        """Return whether anything but random numbers has to be put back."""
        return (
            any(cell.cell_contents is not value for cell, value in self._cells)
            or any(
                not now.keys() <= before.keys() | left
                or any(now.get(name, self) is not before[name] for name in before)
                for now, before, left in self._mappings
            )
            or any(
                now != old if isinstance(now, set) else len(now) != len(old) or any(map(operator.is_not, now, old))
                for now, old in self._sequences
            )
            or any(array.tobytes() != copied.tobytes() for array, copied in self._arrays)
            or any(
                tensor._version != version if copy is None else not torch.equal(tensor.detach().to(copy.device), copy)
                for _, tensor, version, copy in self._tensors
            )
        )

    def lost(self) -> list[str]:
        """Return the names of changed tensors that are too large to be put back."""
        return [name for name, tensor, version, copy in self._tensors if copy is None and tensor._version != version]

    def restore(self) -> None:
        """Put back what has changed, and warn of what cannot be."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for set_state, state in self._generators:
            set_state(state)
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
            if copy is not None:  # compared: a batch norm changes its statistics without a new version
                if not torch.equal(tensor.detach().to(copy.device), copy):
                    with torch.no_grad():
                        tensor.copy_(copy)
                continue
            if tensor._version == version:
                continue
            warnings.warn(
                f"{name}, {tensor.nbytes / 2**20:.0f} MiB, was changed by {self._what} and is too large to be put "
                f"back; expected at most {self._largest_copy_bytes // 2**20} MiB, or no change outside of training. "
                "Change it in training mode alone: if model.training: ...",
                stacklevel=2,
            )


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in that of the functions inside it."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


# ---- Random numbers


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the random number generators that a training step can draw from.

    These are torch's for the host and for one device (dropout), numpy's (the masks of Wav2Vec2, BigBird's attention)
    and Python's (a user's own loss). Other devices are not read, since that would initialise CUDA on them.
    """

    device: torch.device
    host: torch.Tensor
    accelerator: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Read the generators of the host and of ``device``."""
        accelerator = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            accelerator = module.get_rng_state(*_arguments(device))
        return cls(device, torch.get_rng_state(), accelerator, np.random.get_state(legacy=False), random.getstate())

    def is_same(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between two readings."""
        pairs = ((self.host, other.host), (self.accelerator, other.accelerator))
        return (
            all(one is other or torch.equal(one, other) for one, other in pairs)  # type: ignore[arg-type]
            and self.python == other.python
            and repr(self.numpy) == repr(other.numpy)
        )

    def restore(self) -> None:
        """Set the generators to the saved state, as often as needed."""
        torch.set_rng_state(self.host)
        if self.accelerator is not None:
            module = torch.get_device_module(self.device)
            module.set_rng_state(self.accelerator, *_arguments(self.device))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def _arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has one device and takes no argument
