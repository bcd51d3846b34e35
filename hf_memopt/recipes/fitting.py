"""Choose a recipe that holds a model, by estimates: full training, else LoRA, else QLoRA, with batch and checkpointing.

A preset is sized for BERT-large on short texts. For another model the same ways of saving memory are tried in a fixed
order, each by ``hf_memopt.estimate``, until one fits the GPU:

1. all weights as the preset trains them, 2. LoRA on 16-bit weights, 3. QLoRA (nf4). Each with the preset's batch, then
smaller ones down to ``LEAST_ROWS`` examples, then with checkpointing down to a single one. The effective batch stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.memory.result import Estimate
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["fitting_recipe"]

LORA_RANK = 16
_OF_ALL = ("sparse_tied_embedding",)  # of no use where adapters leave the embeddings frozen
OF_FIELDS = {
    "optim": "the state of adapters is small",
    "weights_dtype": "16 bits are what the weights were published in, and adapters leave them as they are",
    "autocast_cache": "under checkpointing it would hold a copy of every weight",
    "fused_cross_entropy": "the logits would be the largest activation",
    "sparse_tied_embedding": "two matrices of the vocabulary's size less in the backward pass",
    "per_device_eval_batch_size": "evaluation has logits, of as many examples as in training at most",
}
LEAST_ROWS = 4
"""Examples of a pass below which checkpointing is chosen: more of them at once use a GPU better than it costs."""


def fitting_recipe(preset: Recipe, model: Any, *, seq_len: int | None, gpu: Gpu) -> Recipe:
    """Return the preset, changed until a training step of the model fits the GPU, with a reason for each change.

    Args:
        preset: to begin with.
        model: as for ``estimate``.
        seq_len: tokens of the longest row; None for 512, or what the model takes.
        gpu: that must hold it.

    Raises:
        ValueError: nothing fits; as ``estimate`` does.
    """
    search = _Search(preset, *_source(model), seq_len, gpu)
    as_it_is = search.estimated(preset)
    if search.fits(preset):
        return preset.replace(purpose=_purpose("the preset as it is, with", as_it_is, gpu), reasons=preset.reasons)
    reasons, least = dict(OF_FIELDS), ""
    head = _of_head(search)
    for method, changes in _methods(preset, model, gpu):
        of_method = {name: value for name, value in head.items() if "lora" not in changes or name not in _OF_ALL}
        chosen = preset.replace(**of_method, **changes)
        if least:
            reasons["load_in" if chosen.load_in else "lora"] = f"{least} even with one example at a time"
        smallest = search.estimated(_cut(chosen, 1, checkpointing=True))
        if search.fits(_cut(chosen, 1, checkpointing=True)):
            found, best = search.largest(chosen, reasons)
            kept = {name: why for name, why in preset.reasons.items() if getattr(found, name) == getattr(preset, name)}
            new = {name: why for name, why in reasons.items() if getattr(found, name) != getattr(preset, name)}
            return found.replace(purpose=_purpose(f"{method} of", best, gpu), reasons={**kept, **new})
        least = f"{method} needs {format_bytes(smallest.total_bytes)} of {format_bytes(gpu.usable_bytes)}"
    raise ValueError(
        f"model=<{smallest.model}> does not fit {gpu.name} at seq_len={smallest.seq_len}: {least} even with one "
        "example at a time; expected a smaller model, shorter texts or a larger GPU. "
        f"See what would fit: hf-memopt estimate {smallest.model} --compare"
    )


def _purpose(method: str, best: Estimate, gpu: Gpu) -> str:
    length = "" if best.seq_len is None else f" at {best.seq_len} tokens"
    needs = f"{format_bytes(best.total_bytes)} of {format_bytes(gpu.usable_bytes)}"
    return f"{method} {best.model}{length} on {gpu.name}: {needs}, computed and not measured"


def _of_head(search: _Search) -> dict[str, Any]:
    """Return what a language model is trained with: no logits in training, few in evaluation, rows of a tied weight."""
    from hf_memopt.binding.model_tasks import task_of
    from hf_memopt.binding.tied_embedding import tied_embeddings
    from hf_memopt.memory.models.loading import load_model

    model = load_model(search.source, task=search.task).model
    if task_of(model) not in ("causal-lm", "masked-lm", "seq2seq", "speech-seq2seq"):
        return {}
    tied = {"sparse_tied_embedding": True} if tied_embeddings(model) else {}
    return {"fused_cross_entropy": True, "per_device_eval_batch_size": 1, **tied}


def _source(model: Any) -> tuple[Any, str | None]:
    """Return what to estimate and its task: of a plain module its configuration, which can be loaded in other ways."""
    from torch import nn

    from hf_memopt.binding.model_tasks import task_of
    from hf_memopt.binding.quantized_weights import is_quantized

    if not isinstance(model, nn.Module) or hasattr(model, "peft_config") or is_quantized(model):
        return model, None
    task = task_of(model)
    return (model, None) if task is None else (model.config, task)


def _methods(preset: Recipe, model: Any, gpu: Gpu) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the ways to train a model, in order: a name, and what of the preset it changes."""
    from torch import nn

    from hf_memopt.binding.quantized_weights import is_quantized

    has_adapters = hasattr(model, "peft_config")
    quantised = isinstance(model, nn.Module) and is_quantized(model)
    adapters = {"lora": LORA_RANK, "optim": "adamw_torch_fused", "autocast_cache": True}
    if not quantised or has_adapters:
        yield "full training" if not has_adapters else "training the adapters", {}
    if has_adapters:
        return
    if quantised:
        yield "LoRA", adapters
        return
    if _source(model)[0] is model and isinstance(model, nn.Module):
        return  # not a model of transformers with a known head: PEFT's rules may not fit it
    yield "LoRA", {**adapters, "weights_dtype": "bfloat16" if gpu.bf16 else "float16"}
    yield "QLoRA", {**adapters, "load_in": "nf4"}


def _cut(recipe: Recipe, rows: int, *, checkpointing: bool) -> Recipe:
    """Return a recipe with passes of so many examples, in evaluation too."""
    return recipe.replace(
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=min(rows, recipe.per_device_eval_batch_size),
        checkpointing=checkpointing,
        autocast_cache=recipe.autocast_cache and not checkpointing,
    )


@dataclass
class _Search:
    """Estimates of one model on one GPU, each made once."""

    preset: Recipe
    source: Any
    task: str | None
    seq_len: int | None
    gpu: Gpu
    found: dict[Recipe, Estimate] = field(default_factory=dict)

    def estimated(self, recipe: Recipe) -> Estimate:
        from hf_memopt.memory.estimation import estimate

        if recipe not in self.found:
            rows = recipe.per_device_train_batch_size
            self.found[recipe] = estimate(
                self.source, batch_size=rows, seq_len=self.seq_len, recipe=recipe, gpu=self.gpu, task=self.task
            )
        return self.found[recipe]

    def fits(self, recipe: Recipe) -> bool:
        """Return whether a step fits with the reserve that hints keep, a fiftieth of the GPU."""
        from hf_memopt.memory.hints import TIGHT_SHARE

        usable_bytes = self.gpu.usable_bytes
        return self.estimated(recipe).total_bytes <= usable_bytes - usable_bytes // TIGHT_SHARE

    def largest(self, chosen: Recipe, reasons: dict[str, str]) -> tuple[Recipe, Estimate]:
        """Return the recipe with the largest batch that fits, without checkpointing if ``LEAST_ROWS`` do, and why.

        A single example with checkpointing is known to fit.
        """
        most, effective = self.preset.per_device_train_batch_size, self.preset.effective_batch_size
        every_size = [rows for rows in range(1, most + 1) if effective % rows == 0]
        for checkpointing in (True,) if chosen.checkpointing else (False, True):
            sizes = every_size if checkpointing else [rows for rows in every_size if rows >= min(LEAST_ROWS, most)]
            cuts = [_cut(chosen, rows, checkpointing=checkpointing) for rows in sizes]
            fitting = bisect_left(cuts, True, key=lambda cut: not self.fits(cut))
            if fitting < len(cuts):
                needed = format_bytes(self.estimated(cuts[fitting]).total_bytes)
                why = f"{sizes[fitting]} examples at a time need {needed}"
            if fitting > 0:
                break
            reasons["checkpointing"] = f"without it, {why}"
        if fitting < len(cuts):
            reasons["per_device_train_batch_size"] = why
        return cuts[fitting - 1], self.estimated(cuts[fitting - 1])
