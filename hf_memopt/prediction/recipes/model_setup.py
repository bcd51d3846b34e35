"""How a Recipe's model is loaded, and what is done to it before a Trainer is built: adapters, quantised weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import Change
from hf_memopt.prediction.recipes.resolved_arguments import process_count, sixteen_bits_here, weights_dtype_here

if TYPE_CHECKING:
    from torch import nn

    from hf_memopt.prediction.recipes.recipe_class import Recipe


def model_keywords(recipe: Recipe, task: str | None) -> dict[str, Any]:
    """Return keywords for ``from_pretrained``; see ``Recipe.model_kwargs``."""
    import torch

    from hf_memopt.prediction.memory.models import checked_task
    from hf_memopt.training.devices import accelerator_type

    task = checked_task(task)
    found = {"dtype": getattr(torch, weights_dtype_here(recipe))}
    if recipe.attn_implementation != "sdpa":  # stock's own choice, in whose place it takes eager where a model lacks it
        found["attn_implementation"] = recipe.attn_implementation
    if recipe.load_in is not None:
        from transformers import BitsAndBytesConfig

        from hf_memopt.training.binding.model_changes import quantization_options

        is_sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # as accelerate launch sets it
        options = quantization_options(recipe.load_in, sixteen_bits_here(recipe), task, is_sharded=is_sharded)
        if recipe.quantize_experts:
            from hf_memopt.training.techniques.experts.loading import ExpertsConfig

            found["quantization_config"] = ExpertsConfig(**options)
        else:
            found["quantization_config"] = BitsAndBytesConfig(**options)  # type: ignore[no-untyped-call]
        if recipe.streamed:
            found["device_map"] = {"": "cpu"}  # else it would be quantised on the GPU
        elif process_count() > 1 and accelerator_type() != "cpu":
            found["device_map"] = {"": int(os.environ.get("LOCAL_RANK", 0))}  # else on the first GPU by each
    return found


def prepared_model(recipe: Recipe, model: nn.Module) -> tuple[nn.Module, tuple[Change, ...]]:
    """Return the model with the recipe's adapters and streamed layers, and what was done to it."""
    model, changes = _adapted(recipe, model)
    if recipe.streamed:  # before a Trainer moves the model to the GPU
        from hf_memopt.training.techniques.streaming import stream_layers

        stream_layers(model, embeddings_on_host=recipe.embeddings_on_host, resident=recipe.resident)
    return model, changes


def _adapted(recipe: Recipe, model: nn.Module) -> tuple[nn.Module, tuple[Change, ...]]:
    """Return the model with the recipe's adapters, and what was done to it; see ``Recipe.prepare_model``.

    Adapters come first: then ``prepare_quantized`` finds the copies of a head that PEFT trains whole, and makes them
    float32. Checkpointing comes last, by the Trainer: it must find the wrapped model, whose embeddings' output then
    requires a gradient.
    """
    from hf_memopt.prediction.memory import own_dtype
    from hf_memopt.training.binding.model import check_model
    from hf_memopt.training.binding.model_changes import add_adapters, is_quantized, prepare_quantized

    check_model(model)
    if hasattr(model, "peft_config"):
        own = Change("lora", recipe.lora, "the model's own", f"{type(model).__name__} has adapters already")
        return model, () if recipe.lora is None else (own,)
    _check_quantisation(recipe, model)
    if recipe.trains_16_bits and (dtype := own_dtype(model, None)) != recipe.weights_dtype:
        raise ValueError(
            f"model=<{type(model).__name__}> has {dtype} weights, and weights_dtype={recipe.weights_dtype!r}; expected "
            f"weights of that dtype. Load with **recipe.model_kwargs(), or call: model.to(torch.{recipe.weights_dtype})"
        )
    if recipe.lora is None:
        return model, ()
    name = type(model).__name__
    adapted = add_adapters(model, recipe.lora, lora_alpha=recipe.lora_alpha, lora_targets=recipe.lora_targets)
    if is_quantized(adapted):
        prepare_quantized(adapted)
    parameters = [(parameter.numel(), parameter.requires_grad) for parameter in adapted.parameters()]
    trained = sum(size for size, is_trained in parameters if is_trained)
    layers = sum(name.endswith(".lora_A") for name, _ in adapted.named_modules())
    reason = f"adapters on {layers} layers of {name}; {trained:,} parameters are trained, all in float32"
    return adapted, (Change("lora", None, recipe.lora, reason),)


def _check_quantisation(recipe: Recipe, model: nn.Module) -> None:
    from hf_memopt.training.binding.model import head_for, task_of
    from hf_memopt.training.binding.model_changes import is_quantized

    name, quantized = type(model).__name__, is_quantized(model)
    if recipe.load_in is not None and not quantized:
        raise ValueError(
            f"model=<{name}> has no quantised weights, and load_in={recipe.load_in!r}; expected a model loaded so. "
            "Load it with from_pretrained(name, **recipe.model_kwargs()), or pass recipe.replace(load_in=None)"
        )
    if recipe.quantize_experts and not any(type(one).__name__ == "ExpertStack" for one in model.modules()):
        raise ValueError(
            f"model=<{name}> has its experts in 16 bits, and quantize_experts=True; expected them in 4 bits. Load it "
            "with from_pretrained(name, **recipe.model_kwargs()), or call: quantize_experts(model)"
        )
    if quantized and recipe.lora is None:
        raise ValueError(
            f"model=<{name}> has quantised weights, which have no gradient, and lora=None; expected adapters. "
            "Call: recipe.replace(lora=16).prepare_model(model)"
        )
    task = task_of(model) if quantized else None
    new = head_for(task).new
    for head, part in model.named_modules() if new else ():
        # what a checkpoint lacks is a plain weight in a layer of bitsandbytes (transformers 5.8.1 to 5.23.0)
        is_lacking = type(part).__name__ in ("Linear4bit", "Linear8bitLt") and not is_quantized(part)
        if is_lacking and head.startswith(f"{getattr(model, 'base_model_prefix', '')}.") and "pooler" not in head:
            raise ValueError(
                f"model=<{name}> has a quantised layer of its base model ({head}) that its checkpoint lacks, so that "
                f"it is random; expected a checkpoint of all layers. Load one that a {name} has saved"
            )
        if is_lacking or (head in new and is_quantized(part)):
            raise ValueError(
                f"model=<{name}> has a quantised head ({head}), which cannot be trained; expected it in 16 bits. "
                f"Load the model with **recipe.model_kwargs(task={task!r})"
            )
