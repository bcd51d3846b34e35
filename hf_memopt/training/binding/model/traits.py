"""Questions that several rooms ask about a model: its task, what its loss compares, the model inside its wrappers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_memopt.plain_data import shown
from hf_memopt.training.binding.model.heads import HEADS

IGNORED_LABEL = -100
"""The label that losses of transformers do not count, and what the ``Trainer`` pads outputs and labels with."""


def check_model(model: Any) -> None:
    """Raise TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={shown(model)} is not a torch.nn.Module; expected the model to train. Pass the model that "
            "from_pretrained returns"
        )


def unwrap_model(model: Any) -> Any:
    """Return the transformers model inside DistributedDataParallel and PEFT, whose own forwards hide what it takes."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unwrap_parallel(model: Any) -> Any:
    """Return a model out of ``DistributedDataParallel`` and ``torch.compile``, with its adapters."""
    while (inner := getattr(model, "_orig_mod", None)) is not None or isinstance(model, DistributedDataParallel):
        model = model.module if inner is None else inner
    return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside accelerate's ``AcceleratedOptimizer``."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether the loss of ``model`` compares each token with the prediction made before it, by its class name.

    So is a class ...ForConditionalGeneration that is no encoder-decoder: it reads images beside text. A class of the
    user's that inherits from one of them is one too, unless its own forward pass computes the loss from labels that it
    does not hand on.

    Nothing in a model says so. Some of these classes do not shift their labels (``BartForCausalLM``, XLNet): they lose
    one label of each row that is padded on the left.
    """
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    inner = unwrap_model(model)
    for one in type(inner).__mro__:
        if one.__name__ in causal:
            return True
        if one.__module__.startswith("transformers.") and one.__name__.endswith("ForConditionalGeneration"):
            return not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        if "forward" in vars(one) and not _hands_labels_on(inspect.unwrap(vars(one)["forward"])):
            return False
    return False


def _hands_labels_on(forward: Any) -> bool:
    """Return whether a forward pass gives its labels to another one or to the model's own loss."""
    code = getattr(forward, "__code__", None)
    if code is None or "forward" not in code.co_names:
        return code is not None and "loss_function" in code.co_names
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    by_name = any(isinstance(one, tuple) and "labels" in one for one in code.co_consts)  # keywords of a call
    return by_name or not ("labels" in named or "labels" in code.co_consts or "labels" in code.co_names)


def used_columns(trainer: Any) -> set[str] | None:
    """Return the columns that stock leaves to the collator, None for all: what the model takes and the labels, and
    what a subclass adds to them.

    Asking fills stock's cache, which is put back, since the model may be another one when training begins.
    """
    if not trainer.args.remove_unused_columns:
        return None
    # `_set_signature_columns_if_needed` fills `_signature_columns`, and subclasses override it (5.8.1 to 5.23.0; pinned
    # by a test).
    cached = trainer._signature_columns
    trainer._signature_columns = copy.copy(cached)  # a subclass may append to it
    try:
        trainer._set_signature_columns_if_needed()
        return set(trainer._signature_columns)
    finally:
        trainer._signature_columns = cached


def task_of(model: nn.Module) -> str | None:
    """Return the task of a model's head, or None if its class is not one of the known heads of transformers."""
    tasks = task_of_class()
    return next((tasks[kind.__name__] for kind in type(unwrap_model(model)).__mro__ if kind.__name__ in tasks), None)


@cache
def task_of_class() -> dict[str, str]:
    """Return the task of each class of the known heads, by the name of the class."""
    tasks: dict[str, str] = {}
    for task, head in HEADS.items():
        for names in head.types.values():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault(name, task)
    return tasks


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested mappings (a ``ModelOutput`` too), lists and tuples, in their order."""
    if torch.is_tensor(value):
        return [value]
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for entry in entries for tensor in tensors_in(entry)]
