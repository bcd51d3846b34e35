"""What a Recipe's fields become as ``TrainingArguments`` on this machine, with the caller's own values."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Mapping
from functools import reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hf_memopt.changes import Change
from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import Count, check_value, parse_object
from hf_memopt.training.binding import versions
from hf_memopt.training.binding.compatibility import refused_fields

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes.recipe_class import Recipe

BATCH_NAMES = ("per_device_train_batch_size", "gradient_accumulation_steps")


def resolve_arguments(
    recipe: Recipe, effective_batch_size: int | None, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[Change, ...]]:
    from hf_memopt.training.devices import accelerator_type

    _check_names(overrides)
    _check_deepspeed(overrides)
    use_cpu = bool(overrides.get("use_cpu", False))
    on_cpu = use_cpu or accelerator_type() == "cpu"
    arguments = stock_arguments(recipe)
    changes = []
    asked = {name: value for name, value in overrides.items() if "_checkpointing" in name}
    if not all(value for name, value in asked.items() if name.endswith("_checkpointing")):
        arguments = {name: value for name, value in arguments.items() if "_checkpointing" not in name}
    elif recipe.checkpointing:  # under the older names too; the caller's options before those of the recipe
        _check_checkpointing(recipe, on_cpu)
        options = next(name for name in arguments if name.endswith("_checkpointing_kwargs"))
        given = [value or {} for name, value in asked.items() if name.endswith("_kwargs")]
        given = [parse_object(value) if isinstance(value, str) else value for value in given]  # as stock reads them
        arguments[options] = reduce(operator.or_, given, arguments[options])
        overrides = {name: value for name, value in overrides.items() if name not in asked}
    if on_cpu and "dataloader_pin_memory" not in overrides:
        arguments["dataloader_pin_memory"] = False
        changes.append(Change("dataloader_pin_memory", True, False, "there is no accelerator to copy to"))
    precision, why = _precision(recipe, overrides, use_cpu)
    arguments.update(precision)
    if why is not None:
        changes.append(why)
    preferred = recipe.per_device_train_batch_size, recipe.effective_batch_size // recipe.per_device_train_batch_size
    effective = recipe.effective_batch_size if effective_batch_size is None else effective_batch_size
    if not recipe.accumulates:
        preferred = recipe.per_device_train_batch_size, 1
        effective = _released_batch(recipe, effective_batch_size, overrides, changes)
        overrides = {"gradient_accumulation_steps": 1, **overrides}
    batch, why = cut_effective_batch(effective, preferred, overrides)
    arguments.update(batch)
    if why is not None:
        changes.append(why)
    if on_cpu and arguments.get("bf16") and "use_cpu" not in overrides:
        arguments["use_cpu"] = True  # stock asks for it where bf16 runs on a CPU
    arguments = {**arguments, **overrides, **batch}
    if not recipe.accumulates:
        if (arguments["max_grad_norm"] or 0) > 0:
            _refuse(recipe, "norm clipping")
        if arguments["fp16"]:
            _refuse(recipe, "fp16")
    return arguments, tuple(changes)


def _check_names(overrides: Mapping[str, Any]) -> None:
    """Raise TypeError for a name that TrainingArguments does not have; the message says the right one."""
    known = versions.training_argument_names()
    for name in overrides:
        if name in known:
            continue
        if name in versions.RENAMED_ARGUMENTS:
            raise TypeError(
                f"{name}={overrides[name]!r} is a name of transformers 4.x; expected a field of TrainingArguments 5.x. "
                f"Instead: {versions.RENAMED_ARGUMENTS[name]}"
            )
        meant = (
            f" Did you mean {versions.SHORT_NAMES[name]!r}?"
            if name in versions.SHORT_NAMES
            else did_you_mean(name, known)
        )
        raise TypeError(
            f"{name}={overrides[name]!r} is not a field of TrainingArguments; expected one of its fields."
            f"{meant} List them: help(transformers.TrainingArguments)"
        )


def stock_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return the ``TrainingArguments`` of a recipe that are the same on every machine."""
    arguments: dict[str, Any] = {
        "per_device_eval_batch_size": recipe.per_device_eval_batch_size,
        "optim": recipe.optim,
        "eval_accumulation_steps": recipe.eval_accumulation_steps,
        "prediction_loss_only": recipe.prediction_loss_only,
        "dataloader_num_workers": recipe.dataloader_num_workers,
    }
    if not recipe.accumulates:
        arguments["max_grad_norm"] = 0.0
    if recipe.checkpointing:
        arguments |= versions.checkpointing_arguments(**recipe.checkpointing_options())
    return arguments


def _check_deepspeed(overrides: Mapping[str, Any]) -> None:
    """Raise before the processes meet; stock's own error names a distribution of transformers."""
    if overrides.get("deepspeed") is not None and find_spec("deepspeed") is None:
        shown = reprlib.repr(overrides["deepspeed"])
        raise ModuleNotFoundError(
            f"deepspeed={shown} needs the package deepspeed, which is not installed; expected it on every host. "
            "Call: pip install deepspeed, or pass fsdp=True"
        )


def _check_checkpointing(recipe: Recipe, on_cpu: bool) -> None:
    if recipe.every_n_layers > 1 and not versions.can_offload_checkpoints():  # both came with the same version
        raise ValueError(
            f"every_n_layers={recipe.every_n_layers} is not known to this version of transformers; expected 5.17 or "
            "newer. Pass recipe.replace(every_n_layers=1), or call: pip install -U transformers"
        )
    if recipe.offload:
        from hf_memopt.training.techniques.checkpointing import check_offload

        check_offload(on_cpu=on_cpu)


# ---- The effective batch, cut over processes, accumulation steps and devices ----------------------------------------


def cut_effective_batch(
    effective: int, preferred: tuple[int, int], overrides: Mapping[str, Any]
) -> tuple[dict[str, int], Change | None]:
    """Return ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` for an effective batch.

    What ``overrides`` give of the two stays, and the other follows; without either, the largest batch per device that
    divides this process's share and is not above the preferred one.
    """
    processes = process_count()
    per_device, steps = given = tuple(overrides.get(name) for name in BATCH_NAMES)
    check_value("effective_batch_size", effective, Count, 32)
    for name, value in zip(BATCH_NAMES, given, strict=True):
        if value is not None:
            check_value(name, value, Count, 8)
    if per_device is not None and steps is not None:
        if per_device * steps * processes != effective:
            raise ValueError(
                f"per_device_train_batch_size={per_device}, gradient_accumulation_steps={steps} make "
                f"{per_device * steps * processes} examples per step on {_named(processes)}; expected the "
                f"effective batch of {effective}. Give one of the two, or effective_batch_size="
                f"{per_device * steps * processes}"
            )
    elif per_device is not None:
        steps = _share(effective, per_device * processes, "per_device_train_batch_size", per_device, processes)
    elif steps is not None:
        per_device = _share(effective, steps * processes, "gradient_accumulation_steps", steps, processes)
    else:
        share = _share(effective, processes, "WORLD_SIZE", processes, processes)
        per_device = largest_divisor(share, preferred[0])
        steps = share // per_device
    batch = dict(zip(BATCH_NAMES, (per_device, steps), strict=True))
    if (per_device, steps) == preferred:
        return batch, None
    reason = f"keeps {effective} examples per optimizer step on {_named(processes)}"
    return batch, Change(" x ".join(BATCH_NAMES), preferred, (per_device, steps), reason)


def process_count() -> int:
    """Return the number of processes of this run, as torchrun gives it in ``WORLD_SIZE``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is not above ``most``."""
    return max(part for part in range(1, min(number, most) + 1) if number % part == 0)


def _share(effective: int, divisor: int, name: str, value: int, processes: int) -> int:
    if effective % divisor != 0:
        fitting = f"effective_batch_size={divisor * max(1, round(effective / divisor))}"
        raise ValueError(
            f"{name}={value} on {_named(processes)} does not divide the effective batch of {effective}; expected a "
            f"divisor. Pass {fitting}"
        )
    return effective // divisor


def _named(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


# ---- Gradient release -----------------------------------------------------------------------------------------------


def _released_batch(
    recipe: Recipe, effective_batch_size: int | None, overrides: Mapping[str, Any], changes: list[Change]
) -> int:
    """Return the effective batch of one pass, and record what gradient release changes."""
    if overrides.get("gradient_accumulation_steps", 1) != 1:
        _refuse(recipe, "accumulation")
    if "max_grad_norm" not in overrides:
        changes.append(Change("max_grad_norm", 1.0, 0.0, "released gradients have no norm of all of them to clip"))
    if effective_batch_size is not None:
        return effective_batch_size
    per_device = overrides.get("per_device_train_batch_size", recipe.per_device_train_batch_size)
    effective = int(per_device) * process_count() if isinstance(per_device, int) else recipe.effective_batch_size
    if effective != recipe.effective_batch_size:
        reason = "released gradients are not accumulated, so a step has the examples of one pass"
        changes.append(Change("effective_batch_size", recipe.effective_batch_size, effective, reason))
    return effective


def _refuse(recipe: Recipe, setting: str) -> None:
    for _, refusal in refused_fields(recipe, setting).values():
        raise ValueError(str(refusal))


# ---- Precision ------------------------------------------------------------------------------------------------------


def _precision(recipe: Recipe, overrides: Mapping[str, Any], use_cpu: bool) -> tuple[dict[str, bool], Change | None]:
    """Return ``bf16`` and ``fp16``, or ``tf32``, and the ``Change`` where the recipe leaves them to the machine."""
    from transformers.utils.import_utils import is_torch_tf32_available

    from hf_memopt.training.devices import check_precision

    weights = weights_dtype_here(recipe, use_cpu=use_cpu)  # what it refuses is refused before a model is loaded
    why = None
    if "bf16" in overrides or "fp16" in overrides:
        asked = {"bf16": bool(overrides.get("bf16", False)), "fp16": bool(overrides.get("fp16", False))}
    else:
        name = recipe.precision
        if name == "auto":
            why = _chosen_precision(recipe, weights, use_cpu)
            name = why.new
        elif name == "tf32":
            asked = {"bf16": False, "fp16": False}
            if not use_cpu and is_torch_tf32_available():
                return {"tf32": True, **asked}, None
            reason = "this machine has no TF32: compute capability 8.0 and newer have"  # products are exact there
            return asked, Change("precision", "tf32", "fp32", reason)
        asked = {"bf16": name == "bf16", "fp16": name == "fp16"}
    if why is None:
        check_precision(**asked, use_cpu=use_cpu)
    autocast = "bfloat16" if asked["bf16"] else "float16" if asked["fp16"] else weights
    if weights != "float32" and autocast != weights:
        raise ValueError(
            f"weights_dtype={weights!r} and autocast in {autocast} do not mix: torch has no operations with both "
            f"16-bit formats; expected one of them. Call: recipe.replace(weights_dtype={autocast!r}), and load it anew"
        )
    return asked, why


def _chosen_precision(recipe: Recipe, weights: str, use_cpu: bool) -> Change:
    from hf_memopt.training.devices import accelerator_type, choose_precision

    chosen = choose_precision(use_cpu=use_cpu)
    name: str = chosen.name
    reason = chosen.reason
    if recipe.trains_16_bits:
        name, reason = "fp32", f"without autocast: the weights are {weights}, and so is the computation"
    elif name == "fp16" and not recipe.accumulates:
        name, reason = "fp32", f"gradient release has no gradient scaler, which fp16 needs ({chosen.reason})"
    elif weights == "float16":
        name, reason = "fp16", "the frozen weights are float16, and autocast mixes no two 16-bit formats"
    elif weights == "bfloat16" and name == "fp32" and (use_cpu or accelerator_type() == "cpu"):
        name, reason = "bf16", "the frozen weights are bfloat16, and the adapters that are trained float32"
    return Change("precision", "auto", name, reason)


def sixteen_bits_here(recipe: Recipe) -> str:
    """Return the dtype beside quantised weights: the 16 bits of this machine or of autocast, float32 without these."""
    from hf_memopt.training.devices import choose_precision

    if recipe.precision == "auto":
        return "float16" if choose_precision().emulates_bf16 else "bfloat16"
    return {"fp16": "float16", "bf16": "bfloat16"}.get(recipe.precision, "float32")


def weights_dtype_here(recipe: Recipe, *, use_cpu: bool = False) -> str:
    """Return the dtype of the weights as loaded; beside quantised ones float32 becomes the 16 bits of this machine."""
    from hf_memopt.training.devices import accelerator_type, choose_precision

    if recipe.load_in is not None and recipe.weights_dtype == "float32":
        return sixteen_bits_here(recipe)
    native = choose_precision(use_cpu=use_cpu)
    if recipe.weights_dtype == "bfloat16" and native.emulates_bf16:
        other = "float32" if recipe.lora is None else "float16"
        raise ValueError(
            f"weights_dtype='bfloat16' is emulated here: {native.reason}; expected {other} on this GPU. "
            f"Call: recipe.replace(weights_dtype={other!r})"
        )
    backend = "cpu" if use_cpu else accelerator_type()
    if recipe.weights_dtype == "float16" and backend in ("cpu", "mps"):
        raise ValueError(
            f"weights_dtype='float16' cannot be trained with on this machine, whose device is {backend!r}; expected a "
            "GPU with a gradient scaler. Call: recipe.replace(weights_dtype='bfloat16')"
        )
    return recipe.weights_dtype
