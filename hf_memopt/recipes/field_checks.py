"""Refuse fields of a Recipe that contradict each other, when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memopt.binding.refusals import refused_fields

if TYPE_CHECKING:
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["check_together"]


def check_together(recipe: Recipe) -> None:
    """Raise ValueError for fields of which each is valid by itself; the message begins with the one to change."""
    _check_adapters(recipe)
    if recipe.weights_dtype == "float16" and recipe.lora is None:
        raise ValueError(
            "weights_dtype='float16', lora=None train float16 weights, whose gradients torch's scaler refuses; "
            "expected bfloat16 or float32 for weights that are trained. Pass weights_dtype='float32', or lora=16"
        )
    if recipe.rounding != "nearest" and not recipe.trains_16_bits:
        trained = "adapters, which are float32" if recipe.lora is not None else "float32 weights"
        raise ValueError(
            f"rounding={recipe.rounding!r} is for 16-bit weights, and this recipe trains {trained}; expected "
            f"'nearest'. Pass rounding='nearest', or weights_dtype='bfloat16', lora=None"
        )
    if recipe.offload and not recipe.checkpointing:
        raise ValueError(
            "offload=True, checkpointing=False offload nothing: what goes to the host are the inputs of checkpointed "
            "layers; expected checkpointing. Pass checkpointing=True"
        )
    if recipe.every_n_layers > 1 and not recipe.checkpointing:
        raise ValueError(
            f"every_n_layers={recipe.every_n_layers}, checkpointing=False recompute nothing; expected checkpointing. "
            "Pass checkpointing=True"
        )
    for field, (_, refusal) in refused_fields(recipe, recipe.precision).items():
        raise ValueError(
            f"{field}={getattr(recipe, field)!r}, precision={recipe.precision!r} are incompatible: {refusal.reason}; "
            "expected another precision. Pass precision='auto'"
        )


def _check_adapters(recipe: Recipe) -> None:
    if recipe.lora is None:
        for name, default in (("lora_alpha", None), ("lora_targets", "auto")):
            if getattr(recipe, name) != default:
                raise ValueError(
                    f"{name}={getattr(recipe, name)!r}, lora=None add no adapters; expected their rank. Pass lora=16"
                )
        if recipe.load_in is not None:
            raise ValueError(
                f"load_in={recipe.load_in!r}, lora=None leave nothing to train: quantised weights have no gradient, "
                "and the Trainer refuses such a model; expected adapters. Pass lora=16"
            )
    if recipe.lora_targets == ():
        raise ValueError(
            "lora_targets=() names no layer; expected 'auto', or names of layers. Pass lora_targets='auto'"
        )
