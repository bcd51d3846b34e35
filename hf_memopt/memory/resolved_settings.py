"""What an estimate's settings become once recipe, GPU and model are known: precision and dtype of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.devices import Gpu
from hf_memopt.memory.settings import StepSettings
from hf_memopt.plain_data import shown

if TYPE_CHECKING:
    from torch import nn

__all__ = ["own_dtype", "settings_of_recipe", "sixteen_bits", "with_16_bits", "with_precision"]


def settings_of_recipe(recipe: Any, overrides: Mapping[str, Any]) -> StepSettings:
    """Return the settings of a recipe with the overrides; several processes share its accumulation steps."""
    if recipe is None:
        settings = StepSettings()
    elif hasattr(recipe, "step_settings"):
        settings = recipe.step_settings()
    else:
        raise TypeError(
            f"recipe={shown(recipe)} is not a recipe; expected an object with step_settings(). "
            "Pass recipe=hf_memopt.recipe('4gb-gpu')"
        )
    changed = settings.replace(**overrides)
    if recipe is None or changed.world_size == 1 or "gradient_accumulation_steps" in overrides:
        return changed
    return changed.replace(gradient_accumulation_steps=-(-settings.gradient_accumulation_steps // changed.world_size))


def with_precision(settings: StepSettings, gpu: Gpu | None) -> StepSettings:
    if settings.precision != "auto":
        return settings
    scaled = "fp16" if settings.takes_gradient_scaler else "fp32"
    native = "fp32" if gpu is None else "bf16" if gpu.bf16 else scaled
    return settings.replace(precision=native)


def sixteen_bits(gpu: Gpu | None) -> str:
    return "bfloat16" if gpu is None or gpu.bf16 else "float16"


def with_16_bits(settings: StepSettings, gpu: Gpu | None, asked: str | None) -> tuple[StepSettings, tuple[str, ...]]:
    """Return the settings with 16-bit weights beside quantised ones, unless the caller asked for a dtype; and notes."""
    if settings.load_in is None:
        return settings, ()
    notes = []
    if asked is None and settings.weights_dtype == "float32":
        settings = settings.replace(weights_dtype=sixteen_bits(gpu))
        notes.append(f"weights that are not quantised are {settings.weights_dtype}: give weights_dtype for another")
    if not settings.prepare and settings.weights_dtype != "float32":
        notes.append(
            "embeddings, norms and head as loaded: call hf_memopt.prepare_quantized, not peft's "
            "prepare_model_for_kbit_training, which makes them float32"
        )
    return settings, tuple(notes)


def own_dtype(model: nn.Module, asked: str | None) -> str:
    """Return the dtype of a module's weights, of mixed ones the dtype that most bytes have.

    Raises:
        ValueError: the caller asked for another one.
    """
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name = str(parameter.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + parameter.nbytes
    own = max(sizes, key=lambda name: sizes[name], default="float32")
    if asked is not None and asked != own:
        raise ValueError(
            f"weights_dtype={asked!r} is not that of the given module, whose weights are {own}; expected {own!r}. "
            f"Call: model.to(torch.{asked})"
        )
    return own
