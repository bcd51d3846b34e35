"""Questions about a model that several techniques ask: positions, labels, decoder, the model inside its wrappers."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_memopt.plain_data import shown

__all__ = [
    "IGNORED_LABEL",
    "check_model",
    "has_decoder",
    "is_causal_lm",
    "label_shifter",
    "local_part",
    "needs_position_ids",
    "unwrap_model",
    "unwrap_optimizer",
    "unwrap_parallel",
    "used_columns",
]


IGNORED_LABEL = -100
"""The label that losses of transformers do not count, and what the ``Trainer`` pads outputs and labels with."""


def check_model(model: Any) -> None:
    """Raise TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model={shown(model)} is not a torch.nn.Module; expected the model to train. Pass the model that "
            "from_pretrained returns"
        )


def needs_position_ids(model: nn.Module) -> bool:
    """Return whether left padding shifts the positions of ``model`` and ``position_ids`` repair that.

    True for a forward that takes ``position_ids`` and would number the padded columns (GPT-2, BERT). False for rotary
    positions, which are relative, and for models that number the real tokens themselves: RoBERTa and its descendants
    from ``input_ids``, starting above 0, OPT from ``attention_mask``.
    """
    inside = unwrap_model(model)
    if "position_ids" not in inspect.signature(inside.forward).parameters:
        return False
    return not any(_is_free_of_columns(type(module)) for module in inside.modules())


def _is_free_of_columns(kind: type[nn.Module]) -> bool:
    """Return whether a module class has positions that are relative, or counted from the tokens themselves."""
    if "Rotary" in kind.__name__ or kind.__name__ == "OPTLearnedPositionalEmbedding":
        return True
    name = "create_position_ids_from_input_ids"  # a method or a function of the module file, seen in 5.8.1 to 5.23.0
    return hasattr(kind, name) or hasattr(sys.modules[kind.__module__], name)


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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a sharded tensor (``DTensor``), and any other tensor as it is."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether the loss of ``model`` compares each token with the prediction made before it, by its class name.

    Nothing in a model says so. Some of these classes do not shift their labels (``BartForCausalLM``, XLNet): they lose
    one label of each row that is padded on the left.
    """
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    return type(unwrap_model(model)).__name__ in causal


def has_decoder(model: nn.Module) -> bool | None:
    """Return whether the labels of ``model`` go to a decoder of its own; None if it has no config."""
    inside = unwrap_model(model)
    if not hasattr(inside, "config"):
        return None
    takes_decoder_ids = "decoder_input_ids" in inspect.signature(inside.forward).parameters
    return takes_decoder_ids and bool(getattr(inside.config, "is_encoder_decoder", False))


def label_shifter(model: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return the model's ``prepare_decoder_input_ids_from_labels``, bound to a copy that has the config but no weights.

    Spawned workers would get the weights otherwise; all of transformers 5.8.1, 5.17.0 and 5.23.0 read the config only.
    """
    inside = unwrap_model(model)
    if not hasattr(inside, "prepare_decoder_input_ids_from_labels"):
        return None
    shell = object.__new__(type(inside))
    nn.Module.__init__(shell)
    shell.config = inside.config
    shift_labels: Callable[..., torch.Tensor] = shell.prepare_decoder_input_ids_from_labels
    return shift_labels


def used_columns(trainer: Any) -> set[str] | None:
    """Return the columns that stock leaves to the collator, None for all: what the model takes and the labels, and
    what a subclass adds to them.

    Asking fills stock's cache, which is put back, since the model may be another one when training begins.
    """
    if not trainer.args.remove_unused_columns:
        return None
    # `_set_signature_columns_if_needed` fills `_signature_columns`, and subclasses override it (5.8.1 to 5.23.0; pinned
    # by a test).
    fill = getattr(trainer, "_set_signature_columns_if_needed", None)
    if fill is None:
        return {
            *inspect.signature(unwrap_model(trainer.model).forward).parameters,
            *trainer.label_names,
            "label",
            "label_ids",
        }
    cached = trainer._signature_columns
    trainer._signature_columns = copy.copy(cached)  # a subclass may append to it
    try:
        fill()
        return set(trainer._signature_columns)
    finally:
        trainer._signature_columns = cached
