"""Accept the names of ``TrainingArguments`` for the settings of a step, and explain names that are no setting.

``bf16=True`` is ``precision="bf16"``, ``gradient_checkpointing=True`` is ``checkpointing=True``; the others that
``SPELLINGS`` lists differ in their name alone. The module imports transformers only to explain an unknown name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import packaged_rows

SPELLINGS = {
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "batch_size",
}
PRECISIONS = ("bf16", "fp16", "tf32")
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # the old name, and 5.23.0's
OPTIONS = tuple(f"{name}_kwargs" for name in CHECKPOINTING)

_OTHERS = packaged_rows("hf_memopt.prediction.memory.settings", "other_names.csv")
REFUSED = {row["name"]: row["refused"] for row in _OTHERS if row["refused"]}
"""Arguments of ``TrainingArguments`` that ask for something that is not simulated, with the reason."""
_INSTEAD = {row["name"]: row["instead"] for row in _OTHERS if row["instead"]}
"""Names from elsewhere that people know, with what to pass instead."""
_OF_SEVERAL_GPUS = ("world_size", "strategy", "offload_params", "fsdp", "fsdp_config", "deepspeed")


def in_own_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with the names and values of ``StepSettings`` in place of those of ``TrainingArguments``.

    Examples:
        >>> in_own_names({"bf16": True, "gradient_checkpointing": True, "optim": "sgd"})
        {'optim': 'sgd', 'precision': 'bf16', 'checkpointing': True}
    """
    translated = (*SPELLINGS, *PRECISIONS, *CHECKPOINTING, *OPTIONS)
    own = {name: value for name, value in given.items() if name not in translated}
    asked = {name: given[name] for name in PRECISIONS if given.get(name) is not None}
    found = {SPELLINGS[name]: (f"{name}={given[name]!r}", given[name]) for name in SPELLINGS if name in given}
    if asked:
        chosen = [name for name in PRECISIONS if asked.get(name)]
        if "tf32" in chosen[1:]:
            chosen.remove("tf32")  # of what autocast leaves in float32; it needs no memory
        if len(chosen) > 1:
            raise ValueError(
                "bf16=True, fp16=True are incompatible: autocast computes in one of them; expected only one. "
                "Pass precision='bf16'"
            )
        spelled = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        found["precision"] = (spelled, chosen[0] if chosen else "fp32")
    for name, options in zip(CHECKPOINTING, OPTIONS, strict=True):
        if given.get(options) and not given.get(name):
            raise ValueError(
                f"{options}={given[options]!r} has no effect without {name}=True; expected both. Pass {name}=True"
            )
        if given.get(name) is not None or given.get(options) is not None:
            wanted = given.get(name)
            found["checkpointing"] = f"{name}={wanted!r}", bool(wanted) and (given.get(options) or True)
    for name, (spelled, value) in found.items():
        if own.get(name, value) != value:
            raise ValueError(
                f"{spelled}, {name}={own[name]!r} are the same setting with two values; expected one of them. "
                f"Pass {name}={own[name]!r} alone"
            )
        own[name] = value
    return own


def unknown_setting(name: str, value: Any, known: Iterable[str]) -> TypeError:
    """Return the error for a name that is not a setting of a step."""
    known = list(known)
    text = repr(value) if len(repr(value)) <= 80 else f"<{type(value).__name__}>"
    what = f"{name}={text} is not a setting of a step"
    if name in _OF_SEVERAL_GPUS:
        action = "Remove deepspeed" if name == "deepspeed" else "Call: hf-memopt rehearse --gpus 2 --gpu T4 train.py"
        return TypeError(f"{what}; expected one of a step on one GPU, without sharding. {action}")
    if name in _INSTEAD:
        return TypeError(f"{what}; expected another name for it. {_INSTEAD[name]}")
    if name in REFUSED:
        return TypeError(f"{what}: {REFUSED[name]}; expected a set-up without it. Remove {name}")
    from hf_memopt.training.binding import versions as compat  # imports transformers

    if name in compat.training_argument_names():
        return TypeError(
            f"{what}: this argument of TrainingArguments does not change the memory of a step; expected only those "
            f"that do. Remove {name}"
        )
    return TypeError(
        f"{what}; expected one of {', '.join(known)}.{did_you_mean(name, known)} See help(hf_memopt.types.StepSettings)"
    )
