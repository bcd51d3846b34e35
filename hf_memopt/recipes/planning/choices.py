"""Price the choices of a set-up: what it would need and take with another value for one of them, each simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hf_memopt.errors import MissingExtraError
from hf_memopt.recipes.planning.candidates import Verdict, verdict_of

if TYPE_CHECKING:
    from hf_memopt.memory.step_time.prices import StepTime
    from hf_memopt.recipes.planning.candidates import Candidate
    from hf_memopt.recipes.planning.simulation import Simulation
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["Alternative", "Choice", "priced_choices"]

NOT_SHOWN = ("name", "purpose", "reasons")
WITHOUT: dict[str, dict[str, Any]] = {
    "precision": {"precision": "fp32"},
    "optim": {"optim": "adamw_torch_fused"},
    "checkpointing": {"checkpointing": False, "offload": False, "autocast_cache": True},
    "offload": {"offload": False},
    "freeze": {"freeze": ()},
    "lora": {"lora": None, "load_in": None, "weights_dtype": "float32"},
    "load_in": {"load_in": None, "weights_dtype": "bfloat16"},
    "weights_dtype": {"weights_dtype": "float32", "rounding": "nearest"},
    "fused_cross_entropy": {"fused_cross_entropy": False},
    "sparse_tied_embedding": {"sparse_tied_embedding": False},
    "gradient_release": {"gradient_release": False},
}
"""By the field of a technique, what a Recipe has without it."""


@dataclass(frozen=True)
class Alternative:
    """Another value for a choice, and what it would cost.

    Attributes:
        value: as text.
        total_bytes: reserved bytes and context; None where it could not be simulated.
        verdict: whether that fits; "" where it could not be simulated.
        time_ratio: seconds of a step beside those of the set-up; None where they are not predicted.
        refused: why it could not be simulated; "" where it was.
    """

    value: str
    total_bytes: int | None = None
    verdict: Verdict | str = ""
    time_ratio: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Choice:
    """A field of the recipe, why it has its value, and what others would cost."""

    name: str
    value: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


def priced_choices(one: Candidate, simulation: Simulation, time: StepTime | None) -> list[Choice]:
    """Return every field of the set-up's recipe, those with alternatives or a reason of their own first.

    Args:
        one: the set-up.
        simulation: of the model on the GPU.
        time: of a step of the set-up with rows of the planned length, which the alternatives have too.
    """
    recipe, seconds = one.recipe, None if time is None else time.seconds
    priced: dict[str, list[Alternative]] = {}
    for name, changed in _changes(recipe, simulation.world_size):
        simulation.announce(f"what {name} costs: {_text(changed[name])} instead")
        priced.setdefault(name, []).append(_priced(one, changed, name, simulation, seconds))
    names = [item.name for item in fields(recipe) if item.name not in NOT_SHOWN]
    names.sort(key=lambda name: (name not in priced, name not in recipe.reasons))
    return [
        Choice(name, _text(getattr(recipe, name)), recipe.reason_of(name), tuple(priced.get(name, ())))
        for name in names
    ]


def _changes(recipe: Recipe, world_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the field and the changed fields of each alternative."""
    rows, share = recipe.per_device_train_batch_size, recipe.effective_batch_size // world_size
    counts = [count for count in range(1, share + 1) if share % count == 0]
    if not recipe.gradient_release:
        for near in ([count for count in counts if count > rows][:1], [count for count in counts if count < rows][-1:]):
            yield from (("per_device_train_batch_size", {"per_device_train_batch_size": count}) for count in near)
    if not recipe.checkpointing:
        yield "checkpointing", {"checkpointing": True, "autocast_cache": False}
    for name, without in WITHOUT.items():
        if getattr(recipe, name) != without[name] and not (name == "weights_dtype" and recipe.lora is not None):
            yield name, without


def _priced(
    one: Candidate, changed: dict[str, Any], name: str, simulation: Simulation, seconds: float | None
) -> Alternative:
    value = _text(changed[name])
    try:
        found = simulation.estimate(one.recipe.replace(**changed), one.seq_len)
    except (ValueError, MissingExtraError) as error:
        return Alternative(value, refused=str(error))
    time = simulation.step_time(found)
    verdict = verdict_of(one.usable_bytes - found.total_bytes, one.margin_bytes)
    ratio = None if time is None or seconds is None else time.seconds / seconds
    return Alternative(value, found.total_bytes, verdict, ratio)


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple) else str(value)
