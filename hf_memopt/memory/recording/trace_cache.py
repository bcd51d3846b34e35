"""Record the step of a model, or reuse the recording of an earlier call: another optimizer needs a replay only.

Recordings are kept of models that are built from a configuration (a name, a folder, a ``PretrainedConfig``), with
adapters, quantised weights and frozen parameters too. They are not kept of modules and of steps with ``prepare``: a
module or a function may behave differently at the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial

import torch
from torch import nn

from hf_memopt.binding import versions as compat
from hf_memopt.binding.adapters import add_adapters
from hf_memopt.binding.frozen_parameters import freeze
from hf_memopt.binding.input_gradients import drop_input_gradients
from hf_memopt.binding.model_traits import unwrap_model
from hf_memopt.binding.quantized_weights import prepare_quantized
from hf_memopt.binding.techniques import TECHNIQUES, Technique, asked_by, load
from hf_memopt.memory.cuda.chip import Chip
from hf_memopt.memory.cuda.kernel_buffers import hidden_bytes
from hf_memopt.memory.cuda.semantics import CudaSemantics
from hf_memopt.memory.distributed.shares import sharded_step, without_autocast
from hf_memopt.memory.models.example_batch import cut_batch, example_batch
from hf_memopt.memory.models.loading import LoadedModel
from hf_memopt.memory.models.meta_copy import rest_to_meta
from hf_memopt.memory.optimizers.optimizer_memory import ParameterFacts
from hf_memopt.memory.recording.isolation import configs_of, state_kept
from hf_memopt.memory.recording.kept_models import PreparedModel, prepare_or_reuse
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.recording.step_trace import StepTrace
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.storage_tracker import Hidden, StorageTracker

__all__ = ["RecordedStep", "Shape", "forget_traces", "record_or_reuse"]

_NOT_IN_TRACE = {
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "embedding_bits",
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
    *(name for one in TECHNIQUES.values() if one.optimizer for name in one.fields),
}
_NOT_IN_MODEL = _NOT_IN_TRACE | {
    "precision",
    "autocast_cache",
    "micro_batch_size",
    "label_smoothing_factor",
    "padding",
    "eval_batch_size",
    "prediction_loss_only",
    "zero_grad_to_none",
    "checkpointing",  # which is switched on around the recording
}
_KEPT_TRACES = 16
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
    prepared = _prepare(loaded, settings)
    with _checkpointing(prepared.model, settings):
        trace = _record(prepared, settings, shape, chip)
    found = RecordedStep(trace, prepared.trainable, prepared.parameters, (*prepared.notes, *trace.notes))
    if key is not None:
        _traces[key] = found
        if len(_traces) > _KEPT_TRACES:
            _traces.popitem(last=False)
    return found


def _prepare(loaded: LoadedModel, settings: StepSettings) -> PreparedModel:
    key = _values_of(settings, left_out=_NOT_IN_MODEL)
    changes = (settings.lora, settings.load_in, settings.freeze, settings.prepare)
    if not any((*changes, _of_models(settings))):
        return prepare_or_reuse(loaded, None, key)
    return prepare_or_reuse(loaded, partial(_prepared, settings=settings), key)


@contextmanager
def _checkpointing(model: nn.Module, settings: StepSettings) -> Iterator[None]:
    """Switch checkpointing on inside, in a model that other set-ups train without it."""
    if not settings.checkpointing or settings.prepare:  # functions that prepare a model find it switched on
        yield
        return
    with state_kept(model):
        _checkpoint(model, settings)
        yield


def _checkpoint(model: nn.Module, settings: StepSettings) -> None:
    options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
    compat.enable_checkpointing(model, {"use_reentrant": False, **options})
    if settings.freeze:
        drop_input_gradients(model)


def _record(prepared: PreparedModel, settings: StepSettings, shape: Shape, chip: Chip) -> StepTrace:
    lengths = {"seq_len": shape.seq_len, "labels_length": shape.labels_length}
    batch = example_batch(prepared.base, batch_size=shape.batch_size, **lengths)
    if settings.label_smoothing_factor and hasattr(
        unwrap_model(prepared.base), "prepare_decoder_input_ids_from_labels"
    ):
        # label smoothing removes the labels; the decoder's inputs, otherwise made from them, come from the collator
        batch["decoder_input_ids"] = torch.zeros_like(batch["labels"])
    evaluation_batch = None
    if settings.eval_batch_size is not None:
        evaluation_batch = example_batch(prepared.base, batch_size=settings.eval_batch_size, **lengths)
    if settings.predict_with_generate and evaluation_batch is not None:
        from hf_memopt.memory.recording.generation import check_generation  # imports transformers' generation

        check_generation(prepared.base)
    rows = settings.micro_batch_size
    model = prepared.model
    recorded = without_autocast(settings)
    _check_scaled_gradients(model, recorded)
    micro_batch = cut_batch(batch, shape.batch_size, rows) if rows is not None and rows < shape.batch_size else None

    tracker = StorageTracker(padding=settings.padding, hidden=_hidden_of(chip))
    semantics = CudaSemantics(
        autocast=autocast_dtype(recorded.precision),
        capability=chip.capability,
        cache=settings.autocast_cache,
        tracker=tracker,
    )
    with ExitStack() as around:
        around.enter_context(state_kept(model))  # another set-up may record it too
        sharded = sharded_step(model, settings)
        if sharded is not None:
            around.enter_context(sharded.sharding())
        return record_step(
            model,
            batch,
            recorded,
            micro_batch=micro_batch,
            releases_gradients=settings.steps_in_backward,
            evaluation_batch=evaluation_batch,
            tracker=tracker,
            semantics=semantics,
            sharded=sharded,
        )


def forget_traces() -> None:
    """Drop the recordings kept for later calls."""
    _traces.clear()


@cache
def _hidden_of(chip: Chip) -> Hidden:
    """Return the tracker's ``hidden``: one function for each chip, beside which its answers are kept."""
    return partial(hidden_bytes, capability=chip.capability, multiprocessors=chip.multiprocessors)


def _prepared(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Apply what the user, the Trainer and the techniques do to a model before the first step, in this order."""
    if settings.lora is not None:
        with torch.device("meta"):
            model = rest_to_meta(add_adapters(model, settings.lora, targets=settings.lora_targets))
        if settings.load_in is not None:
            prepare_quantized(model)
    if settings.checkpointing and settings.prepare:
        _checkpoint(model, settings)
    if settings.freeze:
        freeze(model, settings.freeze)
    for technique in _of_models(settings):
        load(technique.on_model)(model)
    for function in settings.prepare:
        changed = function(model)
        model = changed if isinstance(changed, nn.Module) else model
    if settings.load_in is not None and not hasattr(model, "peft_config"):
        raise ValueError(
            f"load_in={settings.load_in!r} is used without adapters: quantised weights have no gradient, and the "
            "Trainer refuses such a model; expected a function of prepare that adds some, or lora. Pass lora=16"
        )
    return model


def _of_models(settings: StepSettings) -> list[Technique]:
    """Return the techniques that the settings ask for and that change a model."""
    return [one for one in asked_by(settings).values() if one.on_model]


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


def _key(loaded: LoadedModel, settings: StepSettings, shape: Shape, chip: Chip) -> Hashable | None:
    """Return what a trace depends on, or None for a step that is not kept."""
    values = _values_of(settings, left_out=_NOT_IN_TRACE)
    if loaded.key is None or values is None:
        return None
    accumulates = min(settings.gradient_accumulation_steps, 3 if settings.is_sharded else 2)
    return loaded.key, _code_of(loaded.model), values, accumulates, settings.steps_in_backward, shape, chip


def _values_of(settings: StepSettings, left_out: Set[str]) -> str | None:
    """Return the values of all settings but some; None where they have functions, which may change."""
    if settings.precision == "tf32":
        settings = settings.replace(precision="fp32")  # the same allocations and operations
    options = settings.checkpointing if isinstance(settings.checkpointing, Mapping) else {}
    own_layers = getattr(settings.lora, "_custom_modules", None)  # private, of peft 0.18 to 0.21; repr has none of it
    if settings.prepare or own_layers or any(callable(value) for value in options.values()):
        return None
    return repr({item.name: getattr(settings, item.name) for item in fields(settings) if item.name not in left_out})


def _code_of(model: nn.Module) -> Hashable:
    """Return the classes of a model with their ``forward``, which may have been replaced, and its experts' kernels.

    A configuration's JSON has neither. ``_experts_implementation`` is private, seen in transformers 5.8.1 to 5.23.0.
    """
    modules = list(model.modules())
    code = dict.fromkeys((type(module), type(module).forward) for module in modules)
    return tuple(code), tuple(str(getattr(config, "_experts_implementation", None)) for config in configs_of(modules))
