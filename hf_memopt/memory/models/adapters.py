"""Add LoRA adapters to a model on the meta device: ``peft.get_peft_model`` does it, as in the real run.

A rank alone means adapters on all linear layers but the head, which QLoRA found to matter more than the rank (Dettmers
et al. 2023, section 4) and PEFT's guide to quantisation recommends. A new head of a classifier is trained as well.
``lora_alpha`` and the initialisation change no memory, and ``lora_dropout`` is PEFT's default, 0.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_memopt.errors import MissingExtraError
from hf_memopt.memory.models.loading import NEW_HEADS, task_of
from hf_memopt.memory.models.meta_copy import rest_to_meta

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["add_adapters"]

_TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}
"""PEFT's names of tasks."""


def add_adapters(model: nn.Module, lora: int | LoraConfig) -> nn.Module:
    """Return the model with adapters, all else frozen; the given model is changed, a ``LoraConfig`` is not.

    Args:
        model: on the meta device.
        lora: the rank, or the configuration.

    Raises:
        ValueError: the model has adapters already; no layer matches ``target_modules``, or one that PEFT cannot adapt.
        MissingExtraError: peft is not installed.
    """
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise MissingExtraError("peft", extra="peft", purpose=f"lora={lora!r}") from error
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"lora={_shown(lora)} is given for a {type(model).__name__}, which has adapters already; expected a model "
            "without them. Remove lora, or pass model=model.unload()"
        )
    config: Any = _usual_config(model, lora) if isinstance(lora, int) else copy.deepcopy(lora)
    with torch.device("meta"), warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 under the names of 5.17, and corrects fan_in_fan_out for GPT-2 by itself
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
        warnings.filterwarnings("ignore", ".*fan_in_fan_out.*", UserWarning)
        try:
            adapted = get_peft_model(model, config)
        except (ValueError, TypeError) as error:
            cause = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"lora={_shown(lora)} cannot be added to {type(model).__name__} ({cause}); expected target_modules "
                "that name linear layers of the model. Pass lora=16, which takes all of them but the head"
            ) from error
    return rest_to_meta(adapted)


def _usual_config(model: nn.Module, rank: int) -> LoraConfig:
    from peft import LoraConfig

    task = task_of(model)
    heads = NEW_HEADS.get(task or "")  # trained whole: PEFT 0.21 would put adapters on some first, and then refuse
    return LoraConfig(
        r=rank,
        target_modules="all-linear",
        task_type=_TASK_TYPES.get(task or ""),
        modules_to_save=None if heads is None else list(heads),
    )


def _shown(lora: int | LoraConfig) -> str:
    return repr(lora) if isinstance(lora, int) else f"LoraConfig(target_modules={lora.target_modules!r})"
