"""Save a checkpoint under the names that the model trains under, and resume from such names only.

transformers loads the hub's names of some models under others (BERT's ``LayerNorm.gamma``, ViT, experts) and writes the
hub's again. The Trainer reads a checkpoint by the names of the model, and leaves what it does not find as it is, with a
warning: the best model is one of two epochs, and a resumed one has pretrained layers
(https://github.com/huggingface/transformers/issues/43701 and 48805; seen in 5.23.0). ``from_pretrained`` reads both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.trainer_utils import HubStrategy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_memopt.binding import versions
from hf_memopt.binding.undo import UndoHandle, nothing_to_undo, override_method
from hf_memopt.notices import notify
from hf_memopt.plain_data import parse_object

logger = logging.getLogger(__name__)


def _plain_model(trainer: Any) -> PreTrainedModel | None:
    """Return the model whose own weights a checkpoint has; None for adapters and for a module of the user's."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return model if isinstance(model, PreTrainedModel) and not getattr(model, "peft_config", None) else None


def under_own_names(trainer: Any) -> UndoHandle:
    """Let the model be saved under the names that it trains under, until the handle is removed."""
    if (model := _plain_model(trainer)) is None:
        return nothing_to_undo()
    if not versions.takes(model.save_pretrained, "save_original_format"):
        return nothing_to_undo()  # of a user's class, which saves in its own way

    def save_pretrained(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return before(*args, **{"save_original_format": False, **kwargs})

    return override_method(model, "save_pretrained", save_pretrained)


def tell_pushed_names(trainer: Any) -> None:
    """Say where the Trainer uploads weights in mid-run that other tools than transformers 5 know by other names."""
    args, model = trainer.args, _plain_model(trainer)
    if args.push_to_hub and args.hub_strategy != HubStrategy.END and getattr(model, "_weight_conversions", None):
        notify(
            logger,
            f"hub_strategy={args.hub_strategy.value!r} uploads checkpoints, and those of an attached Trainer have the "
            f"names that {type(model).__name__} trains under, not the hub's: transformers 5 reads both, other tools "
            "may not. Call trainer.push_to_hub() at the end, which writes the hub's",
        )


def check_names(trainer: Any, folder: Path) -> None:
    """Refuse a checkpoint whose weights have other names than the model's: stock would leave those as they are.

    One that has fewer, and all under names of the model's, as of the trained weights alone, is resumed as in stock.
    """
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    model = _plain_model(trainer)
    if model is None or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    if single.is_file():
        with safe_open(single, "pt") as file:
            names = {*file.keys()}
    else:
        names = {*parse_object(index.read_bytes())["weight_map"]} if index.is_file() else {*model.state_dict()}
    state = {name: one for name, one in model.state_dict().items() if torch.is_tensor(one)}
    ignored = model._keys_to_ignore_on_save or ()
    held = {state[name].data_ptr() for name in names & state.keys()}  # tied weights are saved once
    lost = [name for name, one in state.items() if name not in ignored and one.data_ptr() not in held]
    if lost and names - state.keys():
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} has {len(lost)} weights under other names, {lost[0]} for one, as "
            "stock saves them and does not load them; expected the names that the model trains under. Write it anew: "
            f"{type(model).__name__}.from_pretrained(folder).save_pretrained(folder, save_original_format=False), and "
            "delete its memopt_manifest.json"
        )
