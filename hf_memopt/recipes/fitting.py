"""Return a recipe that holds a model: a preset where an estimate says that it fits, else what ``plan`` chooses.

A preset is sized for BERT-large on short texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["fitting_recipe"]


def fitting_recipe(preset: Recipe, model: Any, *, seq_len: int | None, gpu: Gpu) -> Recipe:
    """Return the preset if a training step of the model fits the GPU, else the recipe of ``plan``, with its reasons.

    Args:
        preset: its examples of an optimizer step stay.
        model: as for ``estimate``.
        seq_len: tokens of the longest row; None for 512, or what the model takes.
        gpu: that must hold it.

    Raises:
        ValueError: nothing fits; as ``estimate`` and ``plan`` do.
    """
    from hf_memopt.memory.estimation import estimate
    from hf_memopt.memory.recording.kept_models import keeping_models
    from hf_memopt.recipes.planning.candidates import MARGIN_SHARE
    from hf_memopt.recipes.planning.model_facts import facts_of
    from hf_memopt.recipes.planning.plan import plan

    rows = preset.per_device_train_batch_size
    with keeping_models():
        source, task, facts, _, _ = facts_of(model, None)
        as_it_is = None
        if not facts.is_quantized or facts.has_adapters:
            as_it_is = estimate(source, batch_size=rows, seq_len=seq_len, recipe=preset, gpu=gpu, task=task)
        if as_it_is is not None and as_it_is.total_bytes + gpu.usable_bytes // MARGIN_SHARE <= gpu.usable_bytes:
            length = "" if as_it_is.seq_len is None else f" at {as_it_is.seq_len} tokens"
            needs = f"{format_bytes(as_it_is.total_bytes)} of {format_bytes(gpu.usable_bytes)}"
            purpose = f"as it is, with {as_it_is.model}{length} on {gpu.name}: {needs}, computed and not measured"
            return preset.replace(purpose=purpose, reasons=preset.reasons)
        found = plan(model, gpu=gpu, seq_len=seq_len, effective_batch_size=preset.effective_batch_size)
    if found.shortfall is not None:
        short = found.shortfall
        raise ValueError(
            f"model=<{found.model}> does not fit {gpu.name} at seq_len={found.texts.seq_len}: {short.nearest.name} "
            f"needs {format_bytes(short.nearest.total_bytes)} of {format_bytes(gpu.usable_bytes)}; expected a smaller "
            "model, shorter texts or a larger GPU. See what would fit: print(hf_memopt.plan(model, gpu=...))"
        )
    return found.recipe.replace(name=preset.name, reasons=found.recipe.reasons)
