"""What is incompatible: techniques with each other, with settings of stock, and with the engines of several processes.

A technique is a callback, a data view or an optimizer class of this package that bears its name as ``technique``, and
what it is refused with stands in its entry of ``TECHNIQUES``; a setting is what ``TrainingArguments`` or the launcher
ask stock for. ``attach`` asks what a ``Trainer`` uses of them, and refuses.

Limitations: an engine is found by stock's own flags and by the parameters, so a model that a user shards by hand after
``attach`` is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_memopt.plain_data import packaged_rows, shown
from hf_memopt.technique_list import LATE_LOSS, TECHNIQUES, VARIANTS, Refusal, Technique, asked_by
from hf_memopt.training.binding import versions

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback, TrainingArguments


SETTINGS: Mapping[str, str] = {
    row["setting"]: row["means"] for row in packaged_rows("hf_memopt.training.binding.compatibility", "settings.csv")
}
"""The settings of stock that some technique cannot work with, and what is meant by each."""


def refusal_of(one: str, other: str) -> Refusal | None:
    """Return why two techniques, or a technique and a setting, are refused together; None if they are not."""
    listed = TECHNIQUES | VARIANTS
    for first, second in ((one, other), (other, one)):
        if first in listed and second in listed[first].refused:
            return Refusal(first, second, *listed[first].refused[second])
    return None


def refused_fields(set_up: Any, setting: str) -> dict[str, tuple[Technique, Refusal]]:
    """Return by field what a set-up, a ``Recipe`` or ``StepSettings``, asks for and is refused with a setting."""
    found = ((one, refusal_of(name, setting)) for name, one in asked_by(set_up).items())
    return {one.field_in(set_up): (one, refusal) for one, refusal in found if refusal is not None}


def refuse_without_adapters(load_in: str | None, lora: Any) -> None:
    """Raise ValueError for quantised weights without adapters beside them."""
    if load_in is not None and lora is None:
        raise ValueError(
            f"load_in={load_in!r}, lora=None leave nothing to train: quantised weights have no gradient, and the "
            "Trainer refuses such a model; expected adapters. Pass lora=16"
        )


def is_of_bitsandbytes(optim: str) -> bool:
    """Return whether stock's optimizer of this name is one of bitsandbytes; those of torchao have "torch" in theirs."""
    return optim.startswith(("paged_", "lion", "ademamix", "rmsprop_bnb")) or (
        optim.endswith("_8bit") and "torch" not in optim
    )


def steps_in_backward(optim: str) -> bool:
    """Return whether stock's optimizer of this name steps each parameter within the backward pass."""
    return optim in ("lomo", "adalomo") or optim.endswith("_layerwise")


# ---- What a Trainer uses


def check_compatibility(trainer: Trainer, *callbacks: TrainerCallback) -> None:
    """Refuse techniques and settings that are incompatible: those of a Trainer, and callbacks it is to get."""
    for found in refusals_of(trainer, *callbacks):
        raise ValueError(str(found))


def check_settings(technique: str, args: TrainingArguments) -> None:
    """Refuse settings that a technique cannot work with, where there are arguments but no Trainer to ask."""
    if not isinstance(getattr(args, "world_size", None), int):  # of the class it is a property
        raise TypeError(
            f"args={shown(args)} are not TrainingArguments; expected those of the Trainer. Pass trainer.args"
        )
    for setting in settings_in_use(args, world_size=args.world_size):
        found = refusal_of(technique, setting)
        if found is not None:
            raise ValueError(str(found))


def refusals_of(trainer: Trainer, *callbacks: TrainerCallback) -> list[Refusal]:
    """Return every pair in use that is refused, of a Trainer and callbacks it is to get."""
    asked = _names_in_use(trainer, *callbacks)
    names = [name for name in (*TECHNIQUES, *VARIANTS) if name in asked]
    engine = _sharding_engine(trainer)
    world_size = trainer.args.world_size if engine is None else 1  # else the model is not wrapped by DDP
    used = [*names, *settings_in_use(trainer.args, world_size=world_size)]
    used += [] if engine is None else [engine]
    used += ["ZeRO-3"] * (
        getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", None) == 3
    )
    used += ["TRL"] * any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)
    pairs = ((one, other) for one in names for other in used)
    found = dict.fromkeys(refusal_of(one, other) for one, other in pairs)
    return [refusal for refusal in found if refusal is not None]


def _sharding_engine(trainer: Any) -> str | None:
    """Return the engine that splits the weights, or what they are trained by; None for DDP and for one process."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed"
    if trainer.is_fsdp_enabled:
        return "FSDP2" if trainer.accelerator.is_fsdp2 else "other sharding"
    parameters = () if trainer.model is None else trainer.model.parameters()  # none before a search has made it
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    return "other sharding" if is_sharded else None


def techniques_in_use(trainer: Trainer, *callbacks: TrainerCallback) -> tuple[str, ...]:
    """Return the names of this package's techniques that a Trainer uses, in the order of ``TECHNIQUES``."""
    names = _names_in_use(trainer, *callbacks)
    return tuple(name for name in TECHNIQUES if name in names)


def _names_in_use(trainer: Any, *callbacks: Any) -> set[Any]:
    """Return the names that the parts of a Trainer bear, and those of uses that more is refused for."""
    given = (*trainer.callback_handler.callbacks, *callbacks, trainer.train_dataset, *optimizers_of(trainer))
    names = {name for part in given for name in names_of(part)}
    if "fused cross-entropy" in names and trainer.compute_loss_func is not None:
        names.add(LATE_LOSS)
    kinds = [part if isinstance(part, type) else type(part) for part in optimizers_of(trainer)]
    has_class = any(base.__module__.startswith("bitsandbytes") for kind in kinds for base in kind.__mro__)
    asked = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    is_chosen = trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None
    if has_class or (is_chosen and is_of_bitsandbytes(asked)):
        names.add("bitsandbytes optimizer")
    return names


def names_of(part: Any) -> set[Any]:
    """Return the names that a part bears: an optimizer class may be one technique around another."""
    kind = part if isinstance(part, type) else type(part)
    return {getattr(part, "technique", None), *(vars(base).get("technique") for base in kind.__mro__)}


def optimizers_of(trainer: Any) -> tuple[Any, ...]:
    """Return the optimizer that a Trainer was given or has built, and the class it is to build one from."""
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's AcceleratedOptimizer
    asked = trainer.optimizer_cls_and_kwargs
    return (inner, None if asked is None else asked[0])


DDP_FLAGS = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
"""Those with which each process may cut its batches by itself."""


def settings_in_use(args: TrainingArguments, *, world_size: int) -> tuple[str, ...]:
    """Return the names among ``SETTINGS`` that ``TrainingArguments`` ask for."""
    is_checkpointed, options = versions.checkpointing_of(args)
    optim = str(getattr(args.optim, "value", args.optim))
    are_flags_set = all(getattr(args, name) == value for name, value in DDP_FLAGS.items())
    asked = {
        "bf16": versions.mixed_precision(args) == "bf16",
        "fp16": versions.mixed_precision(args) == "fp16",
        "accumulation": args.gradient_accumulation_steps > 1,
        "norm clipping": (args.max_grad_norm or 0) > 0,
        "NEFTune": args.neftune_noise_alpha is not None,
        "reentrant checkpointing": is_checkpointed and options.get("use_reentrant") is True,
        "layer-wise optimizer": steps_in_backward(optim),
        "paged optimizer": optim.startswith("paged_"),
        "auto_find_batch_size": args.auto_find_batch_size,
        "torch.compile": versions.is_compiled(args),
        "Liger kernel": args.use_liger_kernel,
        "DDP": world_size > 1 and are_flags_set,
        "DDP, default flags": world_size > 1 and not are_flags_set,
    }
    return tuple(name for name in SETTINGS if asked.get(name))
