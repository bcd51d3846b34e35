"""Record the step of a model, or reuse the recording of an earlier call: another optimizer needs a replay only.

Recordings are kept of models that are built from a configuration (a name, a folder, a ``PretrainedConfig``), with
adapters, quantised weights and frozen parameters too. They are not kept of modules and of steps with ``prepare``: a
module or a function may behave differently at the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_memopt.binding import versions as compat
from hf_memopt.binding.conflicts import steps_in_backward
from hf_memopt.binding.frozen_parameters import freeze
from hf_memopt.binding.input_gradients import drop_input_gradients
from hf_memopt.binding.model_traits import unwrap_model
from hf_memopt.binding.quantized_weights import prepare_quantized
from hf_memopt.memory.cuda.chip import Chip
from hf_memopt.memory.cuda.kernel_buffers import hidden_bytes
from hf_memopt.memory.cuda.semantics import CudaSemantics
from hf_memopt.memory.models.example_batch import cut_batch, example_batch
from hf_memopt.memory.models.loading import LoadedModel
from hf_memopt.memory.optimizers.optimizer_memory import ParameterFacts, parameter_facts
from hf_memopt.memory.recording.longer_trace import lengthen
from hf_memopt.memory.recording.repeated_layers import NotRepeatableError, RepeatedLayers, state_kept
from hf_memopt.memory.recording.step import StepTrace, autocast_dtype, record_step
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from hf_memopt.memory.storage_tracker import StorageTracker

__all__ = ["RecordedStep", "Shape", "forget_traces", "record_or_reuse"]

_NOT_IN_TRACE = {
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "embedding_bits",
    "gradient_release",
    "optimizer_memory",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "eval_batches",
    "eval_accumulation_steps",
    "eval_do_concat_batches",
    "batch_eval_metrics",
    "torch_empty_cache_steps",
    "expandable_segments",
    "cublas_workspace_bytes",
}
_KEPT_TRACES = 8
_traces: OrderedDict[Hashable, RecordedStep] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Shape:
    """Examples of a batch, tokens of a row and of its targets."""

    batch_size: int
    seq_len: int | None
    labels_length: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step, and the facts of the prepared model that an estimate needs."""

    trace: StepTrace
    trainable: tuple[ParameterFacts, ...]
    parameters: int
    notes: tuple[str, ...]


def record_or_reuse(loaded: LoadedModel, settings: StepSettings, shape: Shape, chip: Chip) -> RecordedStep:
    """Return the recorded step of a model that ``load_model`` just returned; the model is prepared in place.

    Raises:
        ValueError: a batch or length that the model cannot take; a function of ``settings.prepare`` refuses the model.
        NotEstimableError: as ``record_step`` does.
    """
    key = _key(loaded, settings, shape, chip)
    if key is not None and key in _traces:
        _traces.move_to_end(key)
        return _traces[key]
    lengths = {"seq_len": shape.seq_len, "labels_length": shape.labels_length}
    batch = example_batch(loaded.model, batch_size=shape.batch_size, **lengths)
    if settings.label_smoothing_factor and hasattr(unwrap_model(loaded.model), "prepare_decoder_input_ids_from_labels"):
        # label smoothing removes the labels; the decoder's inputs, otherwise made from them, come from the collator
        batch["decoder_input_ids"] = torch.zeros_like(batch["labels"])
    evaluation_batch = None
    if settings.eval_batch_size is not None:
        evaluation_batch = example_batch(loaded.model, batch_size=settings.eval_batch_size, **lengths)
    generates = settings.predict_with_generate and evaluation_batch is not None
    if generates:
        from hf_memopt.memory.recording.generation import check_generation  # imports transformers' generation

        check_generation(loaded.model)
    rows = settings.micro_batch_size
    model = _prepared(loaded.model, settings)
    _check_scaled_gradients(model, settings)
    micro_batch = cut_batch(batch, shape.batch_size, rows) if rows is not None and rows < shape.batch_size else None

    def record(layers: RepeatedLayers | None) -> StepTrace:
        tracker = StorageTracker(padding=settings.padding, hidden=partial(_hidden, chip))
        semantics = CudaSemantics(
            autocast=autocast_dtype(settings.precision),
            capability=chip.capability,
            cache=settings.autocast_cache,
            tracker=tracker,
        )
        return record_step(
            model,
            batch,
            settings,
            micro_batch=micro_batch,
            releases_gradients=_releases(settings),
            evaluation_batch=evaluation_batch,
            tracker=tracker,
            semantics=semantics,
            layers=layers,
        )

    # generation runs every layer many times, by itself only some of the steps
    trace = (None if generates else _of_some_layers(model, record)) or record(None)
    trace.tracker.operations.clear()  # counted in the trace
    facts = tuple(parameter_facts(model))
    notes = (*_notes(model), *trace.notes)
    found = RecordedStep(trace, facts, _count(model), notes)
    if key is not None:
        _traces[key] = found
    if len(_traces) > _KEPT_TRACES:
        _traces.popitem(last=False)
    return found


def forget_traces() -> None:
    """Drop the recordings kept for later calls."""
    _traces.clear()


def _of_some_layers(model: nn.Module, record: Callable[[RepeatedLayers], StepTrace]) -> StepTrace | None:
    """Return the trace that was recorded with a few of many identical layers; None where it needs all of them."""
    layers = RepeatedLayers.of(model)
    if layers is None:
        return None
    try:
        with state_kept(model):
            trace = record(layers)
        if trace.host_bytes:
            return None  # how much the host holds is no event
        lengthen(trace, layers)
    except (NotEstimableError, NotRepeatableError):  # the whole model says it better, or runs
        return None
    return trace


def _hidden(chip: Chip, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, ...]:
    return hidden_bytes(func, args, kwargs, out, chip.capability, multiprocessors=chip.multiprocessors)


def _prepared(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Apply what the user, the Trainer and the techniques do to a model before the first step, in this order."""
    if settings.lora is not None:
        from hf_memopt.memory.models.adapters import add_adapters

        model = add_adapters(model, settings.lora)
        if settings.load_in is not None:
            prepare_quantized(model)
    if settings.checkpointing:
        options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
        compat.enable_checkpointing(model, {"use_reentrant": False, **options})
    if settings.freeze:
        freeze(model, settings.freeze)
        if settings.checkpointing:
            drop_input_gradients(model)
    for function in settings.prepare:
        changed = function(model)
        model = changed if isinstance(changed, nn.Module) else model
    if settings.load_in is not None and not hasattr(model, "peft_config"):
        raise ValueError(
            f"load_in={settings.load_in!r} is used without adapters: quantised weights have no gradient, and the "
            "Trainer refuses such a model; expected a function of prepare that adds some, or lora. Pass lora=16"
        )
    return model


def _count(model: nn.Module) -> int:
    """Return the number of weights; of a 4-bit weight, whose parameter packs two or more of them, its elements."""
    modules: list[Any] = list(model.modules())
    packed: dict[int, int] = {
        id(module.weight): module.in_features * module.out_features
        for module in modules
        if type(module).__name__ == "Linear4bitStandIn"  # by name: bitsandbytes takes a second to import
    }
    return sum(packed.get(id(parameter), parameter.numel()) for parameter in model.parameters())


def _check_scaled_gradients(model: nn.Module, settings: StepSettings) -> None:
    """Refuse trainable 16-bit weights under the gradient scaler, which raises at the first real step."""
    if settings.precision != "fp16":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"precision='fp16' trains {name} in {dtype}, whose gradients torch's scaler refuses; expected float32 "
                "for trainable weights. Pass weights_dtype='float32' (for a module: model.float()), or precision='fp32'"
            )


def _notes(model: nn.Module) -> tuple[str, ...]:
    """Return what the simulation assumes about a model's modules."""
    found = {type(module).__name__ for module in model.modules()}
    notes = {
        "Linear8bitStandIn": "8-bit linears: without outlier columns (2 bytes a row each), which depend on the data",
        "Linear4bitStandIn": "4-bit linears: a dequantised copy of each weight in forward, which some GPUs do without",
        "Conv1d": "convolutions: without the workspace that cuDNN chooses on the GPU",
        "Conv2d": "convolutions: without the workspace that cuDNN chooses on the GPU",
    }
    return tuple(dict.fromkeys(text for name, text in notes.items() if name in found))


def _key(loaded: LoadedModel, settings: StepSettings, shape: Shape, chip: Chip) -> Hashable | None:
    """Return what a trace depends on, or None for a step that is not kept."""
    options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
    own_layers = getattr(settings.lora, "_custom_modules", None)  # private, of peft 0.18 to 0.21; repr has none of it
    if loaded.key is None or settings.prepare or own_layers or any(callable(value) for value in options.values()):
        return None
    values = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name not in _NOT_IN_TRACE}
    accumulates = settings.gradient_accumulation_steps > 1
    return loaded.key, _code_of(loaded.model), repr(values), accumulates, _releases(settings), shape, chip


def _code_of(model: nn.Module) -> Hashable:
    """Return the classes of a model with their ``forward``, which may have been replaced, and its experts' kernels.

    A configuration's JSON has neither. ``_experts_implementation`` is private, seen in transformers 5.8.1 to 5.23.0.
    """
    code = dict.fromkeys((type(module), type(module).forward) for module in model.modules())
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return tuple(code), tuple(str(getattr(config, "_experts_implementation", None)) for config in configs.values())


def _releases(settings: StepSettings) -> bool:
    """Return whether each parameter steps within the backward pass."""
    return settings.gradient_release or steps_in_backward(settings.optim)
