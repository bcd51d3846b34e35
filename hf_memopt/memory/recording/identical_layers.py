"""Find the identical layers of a model: runs of units that differ in nothing but their number.

A unit is one layer, or several where a pattern repeats: sliding and full attention in turn, every second layer
checkpointed. Two layers are identical if everything that can be seen of them is equal: classes, shapes and dtypes,
``requires_grad``, hooks, options, what the configuration says of each layer. Anything that cannot be compared counts as
different.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

__all__ = ["KEPT_UNITS", "LayerRun", "configs_of", "find_runs", "per_layer_lists"]

KEPT_UNITS = 5
"""The first three units of a run and the last two: enough to compare the middle one with both of its neighbours."""

_LONGEST_PERIOD = 8
_CONTAINERS = (dict, OrderedDict, set)
_PLAIN = (bytes, bool, float, complex, type(None), torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True, slots=True)
class LayerRun:
    """``units`` identical units of ``period`` layers each, from layer ``first`` of the list ``name`` on."""

    name: str
    first: int
    period: int
    units: int

    def layers(self, unit: int) -> range:
        """Return the numbers of the layers of a unit."""
        return range(self.first + unit * self.period, self.first + (unit + 1) * self.period)

    @property
    def dropped(self) -> range:
        """The numbers of the layers that need not be recorded."""
        return range(self.layers(3).start, self.layers(self.units - 2).start)

    def kept_unit(self, place: int) -> int:
        """Return the unit that is in this place, 0 to 4, of those kept."""
        return place if place < 3 else self.units - KEPT_UNITS + place


def find_runs(model: nn.Module) -> list[LayerRun]:
    """Return the runs of a model from which layers can be dropped; of nested lists the outer ones."""
    found: list[LayerRun] = []
    outer: list[str] = []
    for name, module in model.named_modules():
        if not name or not isinstance(module, nn.ModuleList) or any(name.startswith(f"{other}.") for other in outer):
            continue
        outer.append(name)
        if len(module) > KEPT_UNITS + 1:
            found += _runs_of_list(name, list(module), per_layer_lists(model, len(module)))
    return found


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations of modules, each once."""
    found = (getattr(module, "config", None) for module in modules)
    return list({id(config): config for config in found if config is not None}.values())


def per_layer_lists(model: nn.Module, layers: int) -> list[list[Any]]:
    """Return the options in the model's configurations that have one value for each of ``layers`` layers."""
    seen: dict[int, Any] = {}
    stack = configs_of(model.modules())
    while stack:
        config = stack.pop()
        if config is None or id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen[id(config)] = config
        stack += [value for name, value in vars(config).items() if name.endswith("config")]
    values = [value for config in seen.values() for value in vars(config).values()]
    return [list(value) for value in values if isinstance(value, list | tuple) and len(value) == layers]


def _runs_of_list(name: str, layers: list[nn.Module], options: list[list[Any]]) -> list[LayerRun]:
    kinds = _kinds(layers, options)
    found = []
    first = 0
    while first < len(layers):
        run = max(_runs_from(name, kinds, first), key=lambda run: len(run.dropped))
        if len(run.dropped):
            found.append(run)
        first += run.units * run.period if len(run.dropped) else 1
    dropped = {number for run in found for number in run.dropped}
    kept = [number for number in range(len(layers)) if number not in dropped]
    # code that counts the layers must find the same options by the places of those kept
    moved = any(values[place] != values[number] for values in options for place, number in enumerate(kept))
    return [] if moved else found


def _runs_from(name: str, kinds: list[int], first: int) -> Iterator[LayerRun]:
    for period in range(1, _LONGEST_PERIOD + 1):
        end = first + period
        while end < len(kinds) and kinds[end] == kinds[end - period]:
            end += 1
        yield LayerRun(name, first, period, (end - first) // period)


def _kinds(layers: list[nn.Module], options: list[list[Any]]) -> list[int]:
    """Return a number for each layer, equal for identical ones."""
    examples: list[int] = []
    kinds = []
    for number, layer in enumerate(layers):
        for kind, example in enumerate(examples):
            same_options = all(values[number] == values[example] for values in options)
            if same_options and _same_layers(layer, layers[example], number - example):
                kinds.append(kind)
                break
        else:
            kinds.append(len(examples))
            examples.append(number)
    return kinds


def _same_layers(one: nn.Module, other: nn.Module, distance: int) -> bool:
    try:
        return _Comparison(distance).same(one, other)
    except RecursionError:  # objects that hold each other in a long chain
        return False


class _Comparison:
    """Compares two layers that are ``distance`` apart, attribute by attribute."""

    def __init__(self, distance: int) -> None:
        self._distance = distance
        self._seen: set[tuple[int, int]] = set()
        self._alive: list[Any] = []  # so that no identity is used twice

    def same(self, one: Any, other: Any) -> bool:
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, str):
            return one == other or self._same_names(one, other)
        if isinstance(one, _PLAIN):
            return bool(one == other)
        if isinstance(one, int):
            return one in (other, other + self._distance)  # equal, or the layer's number
        pair = id(one), id(other)
        if pair in self._seen:
            return True
        self._seen.add(pair)
        self._alive += (one, other)
        kind: Any = type(one)
        return _way_of(kind)(self, one, other)

    def _same_modules(self, one: nn.Module, other: nn.Module) -> bool:
        return self._same_items(vars(one), vars(other))

    def _same_methods(self, one: MethodType, other: MethodType) -> bool:
        return self.same((one.__func__, one.__self__), (other.__func__, other.__self__))

    def _same_partials(self, one: Any, other: Any) -> bool:
        return self.same(one.__reduce__()[2], other.__reduce__()[2])

    def _same_sets(self, one: Any, other: Any) -> bool:
        return bool(one == other)

    def _same_objects(self, one: Any, other: Any) -> bool:
        return hasattr(one, "__dict__") and not hasattr(one, "__slots__") and self.same(vars(one), vars(other))

    def _same_names(self, one: str, other: str) -> bool:
        """Return whether two names of modules, such as PEFT keeps, differ in nothing but the layer's number."""
        parts, other_parts = one.split("."), other.split(".")
        return len(parts) == len(other_parts) and all(
            part == its or (part.isdecimal() and its.isdecimal() and int(part) - int(its) == self._distance)
            for part, its in zip(parts, other_parts, strict=True)
        )

    def _same_items(self, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
        if len(one) != len(other):
            return False
        for (name, value), (other_name, other_value) in zip(one.items(), other.items(), strict=True):
            if name != other_name:
                return False
            if value is other_value or (
                type(value) is type(other_value) in _CONTAINERS and not value and not other_value
            ):
                continue
            if isinstance(name, str) and "hooks" in name and isinstance(value, Mapping):  # by the handles' numbers
                value, other_value = list(value.values()), list(other_value.values())
            if not self.same(value, other_value):
                return False
        return True

    def _same_sequences(self, one: Any, other: Any) -> bool:
        return len(one) == len(other) and all(map(self.same, one, other))

    def _same_functions(self, one: Any, other: Any) -> bool:
        if one.__code__ is not other.__code__:
            return False
        try:
            held = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
        except ValueError:  # a variable without a value
            return False
        return self.same(
            (one.__defaults__, one.__kwdefaults__, held[0]), (other.__defaults__, other.__kwdefaults__, held[1])
        )

    def _same_tensors(self, one: Any, other: Any) -> bool:
        facts = [
            (tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad, tensor.is_leaf)
            for tensor in (one, other)
        ]
        hooks = [
            [list(value.values()) for value in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks) if value]
            for tensor in (one, other)
        ]
        return facts[0] == facts[1] and self.same(*hooks) and self.same(vars(one), vars(other))


_WAYS: tuple[tuple[Any, Callable[[_Comparison, Any, Any], bool]], ...] = (
    (nn.Module, _Comparison._same_modules),
    (torch.Tensor, _Comparison._same_tensors),
    (Mapping, _Comparison._same_items),
    ((list, tuple), _Comparison._same_sequences),
    (FunctionType, _Comparison._same_functions),
    (MethodType, _Comparison._same_methods),
    (partial, _Comparison._same_partials),
    ((set, frozenset), _Comparison._same_sets),
    (object, _Comparison._same_objects),
)


@cache
def _way_of(kind: type) -> Callable[[_Comparison, Any, Any], bool]:
    """Return how two objects of a class are compared; to ask so many abstract classes each time would take longer."""
    return next(way for kinds, way in _WAYS if issubclass(kind, kinds))
