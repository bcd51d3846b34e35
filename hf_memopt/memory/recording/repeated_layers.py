"""Record a step with five of many identical layers; ``longer_trace`` repeats the middle one in the recorded events.

Recording costs as much as the model has layers, and most of them do the same. So most are taken out of their
``nn.ModuleList`` while the step is recorded, and where the events of each remaining layer begin is noted.

Limitations: the model may look at its number of layers, or at more than the lists of layers; where that is seen, or
the events of neighbours differ, ``NotRepeatableError`` says that the whole model has to be recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_memopt.memory.recording.identical_layers import KEPT_UNITS, LayerRun, configs_of, find_runs
from hf_memopt.memory.storage_tracker import StorageTracker

__all__ = ["LayerNames", "NotRepeatableError", "RepeatedLayers", "UnitStart", "runs_to_cut", "state_kept"]


class NotRepeatableError(Exception):
    """The events of identical layers differ, or do not follow each other in order."""


@dataclass(frozen=True, slots=True)
class UnitStart:
    """Where a kept unit of a run begins in a forward pass: event, and floating-point operations before it.

    ``place`` is the number of the unit among those kept, 0 to 4, and 5 for the end of the last one.
    """

    run: int
    place: int
    event: int
    flops: int


class LayerNames:
    """Which unit of which run a name of a module or parameter belongs to, in a model with all its layers.

    Answers are kept: every event asks for the module that it belongs to.
    """

    def __init__(self, runs: Sequence[LayerRun]) -> None:
        self._runs = runs
        self._units: dict[str, tuple[int, int] | None] = {}
        self._moved: dict[tuple[str, int], str] = {}

    def unit_of(self, name: str) -> tuple[int, int] | None:
        """Return (run, unit), or None outside the runs."""
        if name not in self._units:
            self._units[name] = self._find_unit(name)
        return self._units[name]

    def _find_unit(self, name: str) -> tuple[int, int] | None:
        for number, run in enumerate(self._runs):
            if name.startswith(f"{run.name}."):
                layer = int(name[len(run.name) + 1 :].partition(".")[0]) - run.first
                if 0 <= layer < run.units * run.period:
                    return number, layer // run.period
        return None

    def moved(self, name: str, units: int) -> str:
        """Return the name's counterpart so many units later."""
        key = name, units
        if key not in self._moved:
            self._moved[key] = self._move(name, units)
        return self._moved[key]

    def _move(self, name: str, units: int) -> str:
        found = self.unit_of(name)
        if found is None:
            return name
        run = self._runs[found[0]]
        layer, dot, rest = name[len(run.name) + 1 :].partition(".")
        return f"{run.name}.{int(layer) + units * run.period}{dot}{rest}"


class RepeatedLayers:
    """The runs of identical layers of a model that is to be recorded without most of them.

    Attributes:
        runs: as ``find_runs`` returns them.
        names: of their units.
        parameters: the names of the trainable parameters of the whole model, in order.
        starts: of the units in the forward passes so far.
    """

    def __init__(self, model: nn.Module, runs: Sequence[LayerRun]) -> None:
        self.runs = runs
        self.names = LayerNames(runs)
        self.parameters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.starts: list[UnitStart] = []
        self._looked_at = False

    def left_out(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers that do not run inside ``cut``."""
        return [model.get_submodule(f"{run.name}.{layer}") for run in self.runs for layer in run.dropped]

    @contextmanager
    def cut(self, model: nn.Module, tracker: StorageTracker) -> Iterator[None]:
        """Leave the layers out inside, and note when the others begin.

        Raises:
            NotRepeatableError: the model's code compared its number of layers with something, at the end.
        """
        lists = {name: model.get_submodule(name) for name in dict.fromkeys(run.name for run in self.runs)}
        with ExitStack() as undo:
            for number, run in enumerate(self.runs):
                layers = lists[run.name]
                for place in range(KEPT_UNITS):
                    first = layers[run.layers(run.kept_unit(place)).start]  # type: ignore[index]
                    hook = self._note(number, place, tracker)
                    undo.callback(first.register_forward_pre_hook(hook).remove)
                last = layers[run.layers(run.units - 1)[-1]]  # type: ignore[index]
                undo.callback(last.register_forward_hook(self._note(number, KEPT_UNITS, tracker)).remove)
            for name, layers in lists.items():
                undo.enter_context(self._counting(model, len(layers._modules)))
                every = dict(layers._modules)
                dropped = {str(layer) for run in self.runs if run.name == name for layer in run.dropped}
                kept = [layer for key, layer in every.items() if key not in dropped]
                undo.callback(_put, layers, every)
                _put(layers, {str(place): layer for place, layer in enumerate(kept)})
            yield
        if self._looked_at:
            raise NotRepeatableError("the model's code uses its number of layers")

    def _note(self, run: int, place: int, tracker: StorageTracker) -> Callable[..., None]:
        def note(*_: Any) -> None:
            if not tracker.in_backward:
                self.starts.append(UnitStart(run, place, len(tracker.events), tracker.flops))

        return note

    @contextmanager
    def _counting(self, model: nn.Module, layers: int) -> Iterator[None]:
        """Notice when the model's code compares or calculates with the number of layers in its configuration."""
        found = [
            (vars(config), name, value)
            for config in configs_of(model.modules())
            if hasattr(config, "__dict__")
            for name, value in vars(config).items()
            if type(value) is int and value == layers and ("layer" in name or name == "depth")
        ]
        try:
            for values, name, value in found:
                values[name] = _watched(value, self._look)
            yield
        finally:
            for values, name, value in found:
                values[name] = value

    def _look(self) -> None:
        self._looked_at = True


def runs_to_cut(model: nn.Module) -> list[LayerRun]:
    """Return the runs from which layers can be left out; none where they share weights with something else."""
    runs = find_runs(model)
    return [] if runs and _shares_weights(model, runs) else runs


def _put(layers: nn.Module, modules: dict[str, Any]) -> None:
    layers._modules.clear()
    layers._modules.update(modules)


def _shares_weights(model: nn.Module, runs: Sequence[LayerRun]) -> bool:
    """Return whether a parameter of the runs has a second place in the model."""
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = [model.get_submodule(run.name) for run in runs]
    return any(owners[id(parameter)] > 1 for module in layers for parameter in module.parameters())


def _watched(value: int, look: Callable[[], None]) -> int:
    """Return the number as an int that calls ``look`` when code compares it or calculates with it.

    To cut a list of layers with it, ``layers[:number]``, asks for its index only.
    """

    def method(name: str) -> Callable[..., Any]:
        original = getattr(int, name)

        def watched(self: int, *args: Any) -> Any:
            look()
            return original(self, *args)

        return watched

    asked = ("eq", "ne", "lt", "le", "gt", "ge", "sub", "rsub", "add", "radd", "mod", "rmod", "floordiv", "rfloordiv")
    kind = type(
        "_Watched", (int,), {"__hash__": int.__hash__} | {f"__{name}__": method(f"__{name}__") for name in asked}
    )
    return int.__new__(kind, value)


@contextmanager
def state_kept(model: nn.Module, idle: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Restore what the modules of a model refer to, such as a cache that a forward pass fills, at the end.

    A weight on the meta device whose dtype changed inside, as bitsandbytes casts biases, gets its own again. Those
    modules that are ``idle`` do not run inside.
    """
    left_out = {id(module) for outer in idle for module in outer.modules()}
    kept = [(vars(module), dict(vars(module))) for module in model.modules() if id(module) not in left_out]
    inside = [(held, dict(held)) for _, values in kept for held in values.values() if isinstance(held, dict)]
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    try:
        yield
    finally:
        for values, copied in [*kept, *inside]:
            values.clear()
            values.update(copied)
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype and parameter.is_meta:
                parameter.data = torch.empty_like(parameter.data, dtype=dtype)
