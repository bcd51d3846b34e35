"""Read of a model what the choice of set-ups depends on."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers.utils.import_utils import is_flash_attn_2_available

from hf_memopt.binding import can_offload_checkpoints
from hf_memopt.binding.model import task_of
from hf_memopt.binding.model_changes import is_quantized, tied_embeddings
from hf_memopt.binding.parameters import layer_stacks
from hf_memopt.memory.models import default_length, most_tokens, name_on_hub
from hf_memopt.memory.recording import session
from hf_memopt.recipes.planning.set_ups import ModelFacts
from hf_memopt.techniques import platform_problem

__all__ = ["facts_of", "name_to_load"]


def facts_of(model: Any, task: str | None) -> tuple[Any, str | None, ModelFacts, int | None, int | None]:
    """Return what to estimate, its task and facts, the most tokens of a row, and the length where none is given.

    Of a plain module of transformers its configuration is estimated, which can be loaded in other ways.
    """
    source, own_task = model, task
    is_module = isinstance(model, nn.Module)
    if is_module and not hasattr(model, "peft_config") and not is_quantized(model) and task_of(model) is not None:
        source, own_task = model.config, task_of(model)
    built = session().load(source, task=own_task).model
    found = task_of(built)
    stacks = [len(stack) for stack in layer_stacks(built).values()]
    facts = ModelFacts(
        task=found,
        is_tied=bool(tied_embeddings(built)),
        layers=min(stacks, default=0),
        has_adapters=hasattr(built, "peft_config"),
        is_quantized=is_quantized(built),
        can_adapt=found is not None,
        can_reload=not isinstance(source, nn.Module),
        supports_flash=getattr(built, "_supports_flash_attn", False),  # seen in transformers 5.8.1, 5.17.0 and 5.23.0
        has_flash=is_flash_attn_2_available(),
        has_offload=can_offload_checkpoints(),
        has_segments=not platform_problem(),
    )
    return source, own_task, facts, most_tokens(built) if found is not None else None, default_length(built)


def name_to_load(model: Any) -> str | None:
    """Return what ``from_pretrained`` takes for a model; None for one that was not loaded from anywhere."""
    if isinstance(model, str | os.PathLike):
        return name_on_hub(os.fspath(model))
    return getattr(getattr(model, "config", model), "name_or_path", None) or None
