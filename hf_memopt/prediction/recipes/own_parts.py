"""What a Recipe gives to a Trainer beside its arguments: callbacks, and the class of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_memopt.prediction.memory.run import MemoryReportCallback
from hf_memopt.technique_list import asked_by, load
from hf_memopt.training.binding.compatibility import is_of_bitsandbytes, names_of, refusal_of
from hf_memopt.training.devices import choose_precision
from hf_memopt.training.techniques import PrecisionCallback
from hf_memopt.training.techniques.freezing import FreezeCallback
from hf_memopt.training.techniques.microbatching import MicrobatchCallback
from hf_memopt.training.techniques.nonfinite import OverflowCallback
from hf_memopt.training.techniques.optimizers import EmbeddingBitsCallback

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments

    from hf_memopt.prediction.recipes.recipe_class import Recipe


def callbacks_of(recipe: Recipe) -> list[TrainerCallback]:
    """Return new callbacks; see ``Recipe.callbacks``."""
    wanted: list[TrainerCallback] = []
    if recipe.freeze:
        wanted.append(FreezeCallback(recipe.freeze))
    wanted.append(PrecisionCallback(autocast_cache=recipe.autocast_cache, master_weights=not recipe.trains_16_bits))
    if is_of_bitsandbytes(recipe.optim) and recipe.optim.endswith("8bit") and not recipe.optim.startswith("galore"):
        wanted.append(EmbeddingBitsCallback())
    precision = recipe.step_settings().precision
    if recipe.accumulates and (precision == "fp16" or (precision == "auto" and choose_precision().fp16)):
        wanted.append(OverflowCallback())
    asked = asked_by(recipe)
    own = [one for one in asked.values() if one.callback]
    wanted += [load(one.callback)(**{name: getattr(recipe, name) for name in one.arguments}) for one in own]
    wanted += [MemoryReportCallback()] if recipe.memory_report else []
    return [one for one in wanted if not (isinstance(one, LEFT_OUT) and _is_refused(one, asked))]


LEFT_OUT = (PrecisionCallback, EmbeddingBitsCallback, OverflowCallback, MicrobatchCallback)
"""What nobody asked for by name, and so is left out beside what it does not work with; ``attach`` refuses the rest."""


def _is_refused(callback: TrainerCallback, asked: Iterable[str]) -> bool:
    return any(refusal_of(name, own) is not None for name in asked for own in names_of(callback))


def optimizer_of(recipe: Recipe, args: TrainingArguments, model: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the class and the arguments of the optimizer; see ``Recipe.optimizer``."""
    technique = next((one for one in asked_by(recipe).values() if one.optimizer), None)
    made: tuple[Any, dict[str, Any]] | None = None
    if technique is not None:
        made = load(technique.optimizer)(args, model, release=recipe.gradient_release, rounding=recipe.rounding)
    return made
