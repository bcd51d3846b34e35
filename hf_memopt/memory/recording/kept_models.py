"""Keep the models of one comparison, so that its set-ups share what is built and prepared.

Building a model and adding adapters may cost as much as a recording. Within ``keeping_models`` a model
that was prepared for one set-up serves all that prepare it in the same way: with another batch, precision or optimizer.

Only within such a block: between two calls of ``estimate`` the classes of transformers may be replaced (Liger's kernels
are put in like that), which only building the model again would show. Modules are copied each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import nn

from hf_memopt.memory.models.loading import LoadedModel, load_model
from hf_memopt.memory.optimizers.optimizer_memory import ParameterFacts, parameter_facts

__all__ = ["PreparedModel", "keeping_models", "load_or_reuse", "prepare_or_reuse"]

_NOTES = {
    "Linear8bitStandIn": "8-bit linears: without outlier columns (2 bytes a row each), which depend on the data",
    "Linear4bitStandIn": "4-bit linears: a dequantised copy of each weight in forward, which some GPUs do without",
    "Conv1d": "convolutions: without the workspace that cuDNN chooses on the GPU",
    "Conv2d": "convolutions: without the workspace that cuDNN chooses on the GPU",
}


class PreparedModel:
    """A model as it is before its first step, and what estimates ask of it; nothing changes it afterwards.

    Attributes:
        base: as it was loaded; inside ``model`` where adapters wrap it.
        model: prepared, but for what is switched on around a recording.
    """

    def __init__(self, base: nn.Module, model: nn.Module) -> None:
        self.base, self.model = base, model

    @cached_property
    def trainable(self) -> tuple[ParameterFacts, ...]:
        """The facts of the trainable parameters."""
        return tuple(parameter_facts(self.model))

    @cached_property
    def parameters(self) -> int:
        """The number of weights; of a 4-bit weight, whose parameter packs two or more of them, its elements."""
        modules: list[Any] = list(self.model.modules())
        packed: dict[int, int] = {
            id(module.weight): module.in_features * module.out_features
            for module in modules
            if type(module).__name__ == "Linear4bitStandIn"  # by name: bitsandbytes takes a second to import
        }
        return sum(packed.get(id(parameter), parameter.numel()) for parameter in self.model.parameters())

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the simulation assumes about the model's modules."""
        found = {type(module).__name__ for module in self.model.modules()}
        return tuple(dict.fromkeys(text for name, text in _NOTES.items() if name in found))


@dataclass(slots=True)
class _Kept:
    """What one block keeps: loaded models, which stay as they are, and prepared ones; the keys hold what they name."""

    loaded: dict[Hashable, tuple[Any, LoadedModel]] = field(default_factory=dict)
    again: dict[int, Callable[[], LoadedModel]] = field(default_factory=dict)
    prepared: dict[Hashable, PreparedModel] = field(default_factory=dict)


_DEFAULTS = {name: option.default for name, option in signature(load_model).parameters.items()}
_kept: ContextVar[_Kept | None] = ContextVar("_kept", default=None)


@contextmanager
def keeping_models() -> Iterator[None]:
    """Keep the models that are built from a name or a configuration inside; a block inside another one adds nothing."""
    if _kept.get() is not None:
        yield
        return
    token = _kept.set(_Kept())
    try:
        yield
    finally:
        _kept.reset(token)


def load_or_reuse(model: Any, **options: Any) -> LoadedModel:
    """Return what ``load_model`` returns, within ``keeping_models`` the same one again.

    Not in the caller's inference mode, whose weights could not be trained.
    """
    with torch.inference_mode(False):
        return _load_or_reuse(model, options)


def _load_or_reuse(model: Any, options: dict[str, Any]) -> LoadedModel:
    kept = _kept.get()
    if kept is None or isinstance(model, nn.Module):
        return load_model(model, **options)
    given = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
    if "load_in" not in given:
        given.pop("compute_dtype", None)  # of products with quantised weights
    key = id(model), tuple(sorted(given.items()))
    if key not in kept.loaded:
        loaded = load_model(model, **options)
        kept.loaded[key] = model, loaded
        kept.again[id(loaded)] = lambda: load_model(model, **options)
    return kept.loaded[key][1]


def prepare_or_reuse(
    loaded: LoadedModel, prepare: Callable[[nn.Module], nn.Module] | None, key: Hashable | None
) -> PreparedModel:
    """Return a loaded model as ``prepare`` returns it: in place, or of a model that is kept an equal one.

    Equal keys mean that ``prepare`` does the same; None for functions that may not. No ``prepare`` does nothing.
    """
    kept = _kept.get()
    load = None if kept is None else kept.again.get(id(loaded))
    found = None if kept is None or key is None else kept.prepared.get((id(loaded), key))
    if found is None:
        base = loaded.model if load is None or prepare is None else load().model
        found = PreparedModel(base, base if prepare is None else prepare(base))
    if kept is not None and load is not None and key is not None:
        kept.prepared[id(loaded), key] = found
    return found
