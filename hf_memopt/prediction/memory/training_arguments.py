"""The estimate of a step that ``TrainingArguments`` describe, or of a ``Trainer`` as it is, with its techniques."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_memopt.plain_data import checked_array, shown
from hf_memopt.prediction.memory.estimation import estimate_of_step, of_own_dtype
from hf_memopt.prediction.memory.optimizers import check_optimizer
from hf_memopt.prediction.memory.recording import Shape, trainer_loss
from hf_memopt.prediction.memory.result import Estimate
from hf_memopt.prediction.memory.settings import REFUSED, NotEstimableError, StepSettings, checked_lengths
from hf_memopt.prediction.memory.several_gpus import notes_for_one_gpu
from hf_memopt.technique_list import TECHNIQUES, load
from hf_memopt.training.binding import versions as compat
from hf_memopt.training.binding.compatibility import optimizers_of, techniques_in_use
from hf_memopt.training.devices import Gpu, current_gpu, find_gpu

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, Trainer, TrainingArguments

    from hf_memopt.prediction.memory.settings import BatchShape


def settings_of_arguments(args: TrainingArguments) -> StepSettings:
    """Return the settings that affect the memory of a step."""
    checkpointing, options = compat.checkpointing_of(args)
    evaluates = args.eval_strategy != "no" or args.eval_on_start
    mixed = compat.mixed_precision(args)
    config: Any = args.accelerator_config
    of_accelerator = config.gradient_accumulation_kwargs or {}  # the Trainer refuses both above 1
    same = compat.training_argument_names() & {item.name for item in fields(StepSettings)}
    return StepSettings(
        **{
            **{name: getattr(args, name) for name in same},
            "optim": str(getattr(args.optim, "value", args.optim)),
            "precision": "tf32" if mixed == "no" and args.tf32 else "fp32" if mixed == "no" else mixed,
            "checkpointing": checkpointing and (options or True),
            "eval_batch_size": args.per_device_eval_batch_size // _parts(args) if evaluates else None,
            "gradient_accumulation_steps": max(args.gradient_accumulation_steps, of_accelerator.get("num_steps", 1)),
            **_generation(args),
        }
    )


def _parts(args: TrainingArguments) -> int:
    """Return how many processes share a batch: all under ``split_batches``, else each has its own."""
    config: Any = args.accelerator_config
    return args.world_size if config.split_batches else 1


def _generation(args: TrainingArguments) -> dict[str, Any]:
    """Return what ``Seq2SeqTrainingArguments`` say about generation in evaluation."""
    if not getattr(args, "predict_with_generate", False):
        return {}
    config = getattr(args, "generation_config", None)
    if isinstance(config, str | os.PathLike):
        raise NotEstimableError(
            f"not estimable: generation_config={os.fspath(config)!r} is not read; expected a GenerationConfig or None. "
            "Pass GenerationConfig.from_pretrained(path)"
        )
    new = getattr(config, "max_new_tokens", None)  # wins over any length; the decoder's first token is beside them
    longest = getattr(args, "generation_max_length", None) or getattr(config, "max_length", None)
    return {
        "predict_with_generate": True,
        "generation_max_length": longest if new is None else new + 1,
        "generation_num_beams": getattr(args, "generation_num_beams", None) or getattr(config, "num_beams", None),
    }


def estimate_from_arguments(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    args: TrainingArguments,
    lengths: int | Sequence[int] | np.ndarray | None,
    *,
    gpu: str | Gpu | None = None,
    **overrides: Any,
) -> Estimate:
    """Predict the memory of a training step from existing ``TrainingArguments``.

    Args:
        model: as for ``estimate``.
        args: not changed. Evaluation is included where ``eval_strategy`` is not ``"no"`` or ``eval_on_start`` is set,
            with one batch unless ``eval_batches=`` gives their number.
        lengths: tokens of the examples, such as ``token_lengths(dataset)``, or of the longest; None for images, and for
            the default of ``estimate``. Every batch counts as long as the longest example; ``estimate(lengths=)`` takes
            those of the batches in order.
        gpu: as for ``estimate``.
        overrides: fields of ``StepSettings`` that the arguments do not have; ``task`` and ``labels_length``.

    It is for one GPU: where several processes train, or FSDP or DeepSpeed shards, a note says what that adds.

    Raises:
        NotEstimableError: the arguments ask for something that is not simulated: compilation, Liger kernels, NEFTune, a
            key-value cache in training, metrics that get the inputs.
        ValueError, TypeError: as ``estimate`` does; ``lengths`` is empty.
    """
    if not hasattr(args, "per_device_train_batch_size"):
        raise TypeError(
            f"args={shown(args)} are not TrainingArguments; expected those of the Trainer. Pass trainer.args"
        )
    for name, reason in REFUSED.items():
        if value := compat.is_compiled(args) if name == "torch_compile" else getattr(args, name, None):
            raise NotEstimableError(f"not estimable: {name}={value!r}: {reason}")
    longest = None
    if lengths is not None:
        longest = int(checked_lengths(np.atleast_1d(checked_array("lengths", lengths)), least=0).max())
    of_model = {name: overrides.pop(name) for name in ("task", "labels_length") if name in overrides}
    found_gpu = current_gpu() if gpu is None else find_gpu(gpu)
    settings = settings_of_arguments(args).replace(**overrides)
    if settings.eval_batch_size is not None and "inputs" in args.include_for_metrics:
        raise NotEstimableError(
            f"not estimable: include_for_metrics={args.include_for_metrics!r}: inputs that are gathered on the GPU "
            "besides the logits are not simulated"
        )
    rows = args.per_device_train_batch_size // _parts(args)
    shape = Shape(rows, longest, of_model.pop("labels_length", None))
    found = estimate_of_step(
        model, shape, settings, found_gpu, **of_model, weights_dtype=overrides.get("weights_dtype")
    )
    own = of_own_dtype(model, settings, overrides.get("weights_dtype"))
    notes = [
        f"{name} changes nothing while training: the Trainer casts the weights only in an evaluate() outside train()"
        for name in ("bf16_full_eval", "fp16_full_eval")
        if getattr(args, name)
    ]
    engine = "deepspeed" if args.deepspeed else "fsdp" if args.fsdp else ""
    of_several = notes_for_one_gpu(found, max(args.world_size, args.n_gpu), engine)
    return replace(found, notes=(*found.notes, *own, *notes, *of_several))


# ---- A Trainer as it is


def estimate_of(trainer: Trainer, shape: BatchShape, **overrides: Any) -> Estimate:
    """Return the estimate of the trainer's steps with batches of this shape; ``overrides`` replace its settings."""
    model: Any = trainer.model
    args = copy.copy(trainer.args)
    engines = {"deepspeed": trainer.is_deepspeed_enabled, "fsdp": trainer.is_fsdp_enabled}  # by a launcher's file too
    vars(args).update({name: getattr(args, name) or is_on for name, is_on in engines.items()})
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise NotEstimableError(
            f"not estimable: ZeRO-3 has cut the weights of <{type(model).__name__}> already; expected whole ones, "
            "as an estimate is for one GPU without sharding. Call: estimate(trainer.model.config)"
        )
    is_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    settings = {**settings_of(trainer), **overrides}
    loss = trainer_loss(trainer)
    if loss is not None:
        settings["prepare"] = *settings.get("prepare", ()), loss
        if loss.rows > 1:  # pairs, whose losses see all rows of a batch
            shape, settings["micro_batch_size"] = replace(shape, rows=-(-shape.rows // loss.rows)), None
    args.per_device_train_batch_size = shape.rows * _parts(args)  # the shape is that of one process
    if is_decoder and shape.labels_length is not None:
        settings["labels_length"] = shape.labels_length
    return estimate_from_arguments(model, args, shape.seq_len, **settings)


_OF_TORCH = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop"}
_OF_BITSANDBYTES = {"AdamW": "adamw", "Adam": "adamw", "Lion": "lion", "AdEMAMix": "ademamix", "RMSprop": "rmsprop_bnb"}


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of ``StepSettings`` that the trainer's callbacks and optimizer decide."""
    used = techniques_in_use(trainer)
    given = _given_optimizer(trainer)
    handler, has_metric = trainer.accelerator.autocast_handler, trainer.compute_metrics is not None
    own = {item.name: item.default for item in fields(StepSettings)}
    techniques = [TECHNIQUES[name] for name in used]
    found: dict[str, Any] = {field: True for one in techniques for field in one.fields if own.get(field) is False}
    if functions := [load(one.on_model) for one in techniques if one.on_model and not own.keys() & one.fields.keys()]:
        found["prepare"] = tuple(functions)
    found["prediction_loss_only"] = trainer.args.prediction_loss_only or not has_metric  # as stock's evaluate
    found["autocast_cache"] = handler is None or bool(handler.cache_enabled)
    found["expandable_segments"] = "expandable_segments:True" in compat.allocator_settings().replace(" ", "")
    if "16-bit weights" in used:
        found["rounding"] = next(one.rounding for one in optimizers_of(trainer) if hasattr(one, "rounding"))
    callback: Any
    for callback in trainer.callback_handler.callbacks:
        technique = getattr(callback, "technique", None)
        if technique in used:
            found |= {name: getattr(callback, name) for name in TECHNIQUES[technique].arguments}
        if technique == "checkpointing policy":
            found["checkpointing"] = _checkpointing(callback.policy, callback.offload)
        if technique == "micro-batching" and callback.max_examples is not None:
            found["micro_batch_size"] = min(callback.max_examples, trainer.args.train_batch_size)
    return {**given, **found}


def _given_optimizer(trainer: Trainer) -> dict[str, Any]:
    """Return the fields that describe an optimizer, or a class of it, that a trainer has; nothing where it has none."""
    optimizer, kind = optimizers_of(trainer)
    kind = kind if optimizer is None else type(optimizer)
    if kind is None:
        return {}
    _, kwargs = trainer.optimizer_cls_and_kwargs or (None, {})
    options: dict[str, Any] = kwargs if optimizer is None else optimizer.defaults
    while hasattr(kind, "_plain_class"):  # inside ours
        kind = kind._plain_class
    known = ("torch.optim.", "bitsandbytes.")  # a subclass has the state of its base
    bases = (base for base in kind.__mro__ if base.__module__.startswith(known) and base.__name__ != "Optimizer")
    kind = next(bases, kind)
    model: Any = trainer.model
    named, _ = type(trainer).get_optimizer_cls_and_kwargs(trainer.args, model)
    if kind.__module__.startswith("bitsandbytes."):
        bits = getattr(getattr(optimizer, "args", None), "optim_bits", options.get("optim_bits", 32))
        bits = 8 if kind.__name__.endswith("8bit") else bits
        is_paged = getattr(optimizer, "is_paged", options.get("is_paged", "Paged" in kind.__name__))
        of_kind = kind.__name__.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
        name = f"{'paged_' * is_paged}{_OF_BITSANDBYTES.get(of_kind, of_kind)}_{bits}bit"
        # stock registers 32 bits for embeddings where optim_bits=8 is given, which a class of 8 bits does not take
        is_plain_8bit = bits == 8 and kind is not named and not kwargs.get("optim_bits")
        found: dict[str, Any] = {"optim": {"ademamix_32bit": "ademamix"}.get(name, name)}
        found["embedding_bits"] = 8 if is_plain_8bit else 32
    else:
        name = _OF_TORCH.get(kind.__name__, "") if kind.__module__.startswith("torch.optim.") else ""
        read = [f"{key}={options[key]}" for key in ("momentum", "centered") if options.get(key)]
        found = {"optim": name + "_fused" * bool(options.get("fused")), "optim_args": ",".join(read) or None}
        groups: Any = ({"weight_decay": trainer.args.weight_decay},) if optimizer is None else optimizer.param_groups
        found["weight_decay"] = decay = max(group.get("weight_decay", 0.0) for group in groups)
        is_copied = kind.__name__ == "Adam" and decay and not options.get("fused")
        if options.get("amsgrad") or is_copied:
            what = f"weight_decay={decay}, for which it copies all gradients" if is_copied else "amsgrad=True"
            raise NotEstimableError(
                f"not estimable: optimizer=<{kind.__name__}> with {what} is not counted; expected one that "
                "TrainingArguments(optim=...) names. Pass optim='adamw_torch_fused' in its place"
            )
    try:
        check_optimizer(found["optim"])
    except ValueError:
        if kind is named:
            return {}
        raise NotEstimableError(
            f"not estimable: the memory of optimizer=<{kind.__name__}> is not known; expected one that "
            "TrainingArguments(optim=...) names. Pass optim='adamw_torch_fused' in its place"
        ) from None
    return {"optim_args": None, **found}


def _checkpointing(policy: str, offload: bool) -> bool | Mapping[str, Any]:
    kind, _, number = policy.partition("_")
    options: dict[str, Any] = {"every_n_layers": int(number)} if kind == "every" else {}
    return {**options, **({"offload": offload} if offload else {})} or True
