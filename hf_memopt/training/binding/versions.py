"""Version differences between transformers 5.8 and 5.24, and the names that changed since 4.x.

All version checks of the package are here. Seen in 5.8.1, 5.17.0, 5.23.0 and 5.24.0; ``tests/binding/test_versions.py``
pins each difference.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hf_memopt.plain_data import packaged_rows

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from hf_memopt.training.binding.undo import UndoHandle

_ROWS = packaged_rows("hf_memopt.training.binding", "renamed_arguments.csv")
RENAMED_ARGUMENTS = {row["name"]: row["instead"] for row in _ROWS if row["of"] == "transformers 4"}
"""Arguments of transformers 4.x that 5.x no longer has, and what to write instead."""
SHORT_NAMES = {row["name"]: row["instead"] for row in _ROWS if row["of"] == "other libraries"}
"""What other libraries call fields of ``TrainingArguments``."""

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Arguments by which models and layers take a cache: the first since transformers 5.24, the second before."""
OLDER_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch 2.11 and later read, in this order, where ``PYTORCH_ALLOC_CONF`` is not set."""


def takes(function: Any, name: str) -> bool:
    """Return whether a function of the installed version, or of a user's class, takes a keyword."""
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def allocator_variable() -> str:
    """Return the environment variable that sets torch's caching allocator for CUDA in the installed torch.

    torch 2.9 and 2.10 ignore the newer name (https://github.com/pytorch/pytorch/issues/183387), older ones lack it.
    """
    major, minor = (int(part) for part in version("torch").split(".")[:2])
    return "PYTORCH_ALLOC_CONF" if (major, minor) >= (2, 11) else "PYTORCH_CUDA_ALLOC_CONF"


def allocator_settings() -> str:
    """Return what torch reads of the environment: of that variable, or of an older one where it is not set."""
    names = (variable := allocator_variable(), *(name for name in OLDER_VARIABLES if name != variable))
    return next((os.environ[name] for name in names if name in os.environ), "").strip().strip(",")


def mixed_precision(args: TrainingArguments) -> str:
    """Return what autocast computes in, "fp16", "bf16" or "no", by the arguments or else ``accelerate launch``."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else str(getattr(args, "mixed_precision", "no"))


def is_compiled(args: TrainingArguments) -> bool:
    """Return whether the model will be compiled, by the arguments or else ``accelerate launch``."""
    return args.torch_compile or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


@cache
def training_argument_names() -> frozenset[str]:
    """Return the names that ``transformers.TrainingArguments`` accepts in the installed version."""
    from transformers import TrainingArguments

    return frozenset(field.name for field in fields(TrainingArguments) if field.init)


def checkpointing_arguments(**checkpointing: Any) -> dict[str, Any]:
    """Return the ``TrainingArguments`` that switch checkpointing of activations on, by the installed version's names.

    ``gradient_checkpointing`` (5.8, 5.17) became ``activation_checkpointing`` (5.23). ``checkpointing`` are the options
    of ``torch.utils.checkpoint``; ``use_reentrant=False`` unless given.
    """
    prefix = "activation" if "activation_checkpointing" in training_argument_names() else "gradient"
    options = {"use_reentrant": False, **checkpointing}
    return {f"{prefix}_checkpointing": True, f"{prefix}_checkpointing_kwargs": options}


def checkpointing_of(args: TrainingArguments) -> tuple[bool, dict[str, Any]]:
    """Return whether ``TrainingArguments`` switch checkpointing on, and its options, under either name."""
    prefix = "activation" if "activation_checkpointing" in training_argument_names() else "gradient"
    options = getattr(args, f"{prefix}_checkpointing_kwargs")
    return bool(getattr(args, f"{prefix}_checkpointing")), dict(options or {})


def can_offload_checkpoints() -> bool:
    """Return whether transformers can keep the inputs of checkpointed layers in host memory: from 5.17 on."""
    from transformers import PreTrainedModel

    renamed = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
    return "offload" in inspect.signature(renamed or PreTrainedModel.gradient_checkpointing_enable).parameters


def enable_checkpointing(model: Any, options: Mapping[str, Any]) -> None:
    """Switch checkpointing on in a transformers model, as the ``Trainer`` of the installed version does.

    ``options`` are those of ``checkpointing_arguments``. 5.8 has neither ``every_n_layers`` nor ``offload`` and ignores
    them, so it does here.
    """
    rest = dict(options)
    of_model = {name: rest.pop(name) for name in ("every_n_layers", "offload") if name in rest}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=rest or None, **of_model)
        return
    known = inspect.signature(model.gradient_checkpointing_enable).parameters  # PEFT hands it on
    of_model = {name: value for name, value in of_model.items() if name in known}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=rest or None, **of_model)


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether checkpointing of activations is switched on in a transformers model."""
    if hasattr(type(model), "is_activation_checkpointing"):
        return bool(model.is_activation_checkpointing)
    return bool(getattr(model, "is_gradient_checkpointing", False))


def without_reentrant(model: nn.Module) -> UndoHandle:
    """Make the checkpointing that is on in a model non-reentrant; return what undoes it."""
    from hf_memopt.training.binding.undo import set_attribute, undo_all

    name, handles = "_gradient_checkpointing_func", []  # transformers 5.8.1, 5.17.0 and 5.23.0
    for module in model.modules():
        function = vars(module).get(name)
        if isinstance(function, partial) and function.keywords.get("use_reentrant") is not False:
            handles.append(set_attribute(module, name, partial(function, use_reentrant=False)))
    return undo_all(*handles)
