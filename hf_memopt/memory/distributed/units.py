"""Which modules FSDP2 gathers together, as accelerate wraps a model, and how much of a parameter one process holds.

Seen in accelerate 1.15 (``fsdp2_prepare_model``): a unit for each layer, one for the input embeddings, one for the last
norm with the head, and the rest of the model. Tied embeddings belong to the head's unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_memopt.memory.settings import NotEstimableError

__all__ = ["Unit", "layer_classes", "shard_shape", "swap_parameters", "units_of"]


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules whose parameters are gathered together.

    Attributes:
        modules: that run with them.
        parameters: each once, without those of units inside.
        reshards: whether they are freed after the forward pass and gathered again for the backward pass.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    reshards: bool


def shard_shape(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    """Return the shape of the first process's shard: FSDP2 cuts the first dimension, and no process has more.

    Examples:
        >>> shard_shape((5, 3), 2)
        (3, 3)
    """
    return (-(-shape[0] // world_size), *shape[1:]) if shape else shape


def units_of(model: Any) -> list[Unit]:
    """Return the units of a transformers model, PEFT's included: the root first, then as ``named_modules`` finds them.

    Args:
        model: of transformers, or wrapped by PEFT.

    Raises:
        NotEstimableError: two units share a parameter, which FSDP2 refuses.
    """
    groups: list[tuple[tuple[nn.Module, ...], bool]] = []
    wrapped: set[nn.Module] = set()

    def wrap(modules: tuple[nn.Module | None, ...], *, reshards: bool) -> None:
        new = tuple(dict.fromkeys(module for module in modules if module is not None and module not in wrapped))
        if new:
            wrapped.update(new)
            groups.append((new, reshards))

    names = layer_classes(model)[0]
    for module in _bottom_up(model):
        if module is not model and type(module).__name__ in names:
            wrap((module,), reshards=True)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and getattr(head, "weight", None) is getattr(embeddings, "weight", None)
    if not is_tied:
        wrap((embeddings,), reshards=True)
    wrap((_last_norm(model), *((embeddings,) if is_tied else ()), head), reshards=False)
    wrap((model,), reshards=False)
    order = {module: index for index, module in enumerate(model.modules())}
    taken: set[nn.Parameter] = set()
    units = []
    for modules, reshards in groups:
        own = dict.fromkeys(parameter for module in modules for parameter in _parameters(module, wrapped))
        _refuse_shared(model, taken.intersection(own))
        taken.update(own)
        units.append(Unit(modules, tuple(own), reshards))
    return sorted(units, key=lambda unit: min(order[module] for module in unit.modules))


def _refuse_shared(model: nn.Module, shared: set[nn.Parameter]) -> None:
    for name, parameter in model.named_parameters():
        if parameter in shared:
            raise NotEstimableError(
                f"not estimable: strategy='fsdp2' with {name}, which is tied to a parameter of another unit; expected "
                "tied embeddings at most, since FSDP2 stops at the first step with it. Pass strategy='ddp'"
            )


def layer_classes(model: Any) -> tuple[list[str], list[str]]:
    """Return the classes that a model names as layers, and those among them that cannot be a unit of their own.

    accelerate makes a unit of the input embeddings, which fails where they are inside a unit already (1.15, with BERT:
    "value was None when it should not be"). Without ``transformer_layer_cls_to_wrap`` such a run stops at its start.
    """
    embeddings = model.get_input_embeddings()
    around = {type(module).__name__ for module in model.modules() if embeddings in module.children()}
    names = sorted(getattr(model, "_no_split_modules", None) or ())
    return [name for name in names if name not in around], [name for name in names if name in around]


def _bottom_up(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _bottom_up(child)
    yield module


def _parameters(module: nn.Module, wrapped: set[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module, without those of wrapped modules inside."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in wrapped:
            yield from _parameters(child, wrapped)


def _last_norm(model: Any) -> nn.Module | None:
    """Return the last norm among the children of the model's body, as accelerate looks for it."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None) if model.base_model_prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    return next((child for child in reversed(list(children)) if "Norm" in type(child).__name__), None)


def swap_parameters(model: nn.Module, swapped: Mapping[nn.Parameter, nn.Parameter], around: ExitStack) -> None:
    """Replace parameters wherever modules hold them, tied ones too; ``around`` puts them back when it closes."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in swapped:
                around.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = swapped[parameter]
