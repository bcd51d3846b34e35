"""A ``Session`` records steps, and keeps what several estimates share: models and recordings.

Recordings are kept from call to call, so that another optimizer needs a replay only: those of models that are built
from a configuration (a name, a folder, a ``PretrainedConfig``), with adapters, quantised weights and frozen parameters
too. Not those of modules and of steps with ``prepare``: a module or a function may behave differently at the next call.

Models are kept within ``keeping_models`` alone, where one serves all set-ups that prepare it in the same way. Between
two calls of ``estimate`` the classes of transformers may be replaced (Liger's kernels are put in like that), which only
building the model again would show. Modules are copied each time.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache, partial
from inspect import signature
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_memopt.notices import Aside
from hf_memopt.prediction.memory.cuda import CudaSemantics, hidden_bytes, unknown_operators
from hf_memopt.prediction.memory.models import LoadedModel, assumed_inputs, example_batch, load_model, rest_to_meta
from hf_memopt.prediction.memory.optimizers import ParameterFacts, parameter_facts
from hf_memopt.prediction.memory.recording.passes import StepTrace, autocast_dtype
from hf_memopt.prediction.memory.recording.step import cut_batch, has_padding, record_step, state_kept
from hf_memopt.prediction.memory.recording.streamed import RecordedStream
from hf_memopt.prediction.memory.recording.trainer_loss import loss_among
from hf_memopt.prediction.memory.settings import NotEstimableError, StepSettings
from hf_memopt.prediction.memory.tracking import Hidden, StorageTracker
from hf_memopt.technique_list import Technique, asked_by, load
from hf_memopt.training.binding import versions as compat
from hf_memopt.training.binding.model import unwrap_model
from hf_memopt.training.binding.model_changes import add_adapters, drop_input_gradients, prepare_quantized
from hf_memopt.training.binding.parameters import freeze
from hf_memopt.training.devices import Chip
from hf_memopt.units import format_bytes

_NOT_IN_TRACE = {item.name for item in fields(StepSettings) if item.metadata.get("changes") == "replay"}
_KEPT_TRACES = 16
_LOADED_BY_DEFAULT = {name: option.default for name, option in signature(load_model).parameters.items()}
_NOTES = {
    "Linear8bitStandIn": "8-bit linears: without outlier columns (2 bytes a row each), which depend on the data",
    "Linear4bitStandIn": "4-bit linears: a dequantised copy of each weight in forward, which some GPUs do without",
    "ExpertStack": "experts in 4 bits: each is assumed to get as many tokens as the others",
    "Conv1d": "convolutions: without the workspace that cuDNN chooses on the GPU",
    "Conv2d": "convolutions: without the workspace that cuDNN chooses on the GPU",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Examples of a batch, tokens of a row and of its targets."""

    batch_size: int
    seq_len: int | None
    labels_length: int | None = None


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model as it is before its first step, but for checkpointing, and what estimates ask of it."""

    base: nn.Module  # as it was loaded; inside ``model`` where adapters wrap it
    model: nn.Module
    trainable: tuple[ParameterFacts, ...]
    parameters: int  # the number of weights, also where one element packs two of them
    notes: tuple[str, ...]

    @classmethod
    def of(cls, base: nn.Module, settings: StepSettings) -> PreparedModel:
        model = _prepared(base, settings)
        modules: list[Any] = list(model.modules())
        kinds = {type(module).__name__ for module in modules}
        packed: dict[int, int] = {
            id(module.weight): module.in_features * module.out_features
            for module in modules
            if type(module).__name__ == "Linear4bitStandIn"  # by name: bitsandbytes takes a second to import
        }
        parameters = sum(packed.get(id(parameter), parameter.numel()) for parameter in model.parameters())
        parameters += sum(math.prod(module.shape) for module in modules if type(module).__name__ == "ExpertStack")
        notes = (*(text for name, text in _NOTES.items() if name in kinds), *_not_quantised(model, settings))
        return cls(base, model, tuple(parameter_facts(model)), parameters, notes)


class Session:
    """What estimates share: models, where ``keeps_models`` is set, and the recordings of all sessions."""

    traces: ClassVar[OrderedDict[Hashable, StepTrace]] = OrderedDict()

    def __init__(self, *, keeps_models: bool) -> None:
        self._keeps_models = keeps_models
        self._loaded: dict[Hashable, tuple[Any, LoadedModel]] = {}  # with what they were built from, whose id is a key
        self._prepared: WeakKeyDictionary[LoadedModel, PreparedModel] = WeakKeyDictionary()

    def load(self, model: Any, settings: StepSettings | None = None, **options: Any) -> LoadedModel:
        """Return what ``load_model`` returns, the same one again for all settings that prepare it in the same way.

        Not in the caller's inference mode, whose weights could not be trained. Without ``settings`` nothing is changed.
        """
        preparation = _preparation(settings or StepSettings())
        with torch.inference_mode(False):
            if not self._keeps_models or preparation is None or isinstance(model, nn.Module):
                return load_model(model, **options)
            given = {**_LOADED_BY_DEFAULT, **options, "model": id(model)}
            if given["load_in"] is None:
                given["compute_dtype"] = None  # of products with quantised weights
            key = preparation, tuple(given.items())
            if key not in self._loaded:
                self._loaded[key] = model, load_model(model, **options)
            return self._loaded[key][1]

    def record(self, loaded: LoadedModel, settings: StepSettings, shape: Shape, chip: Chip) -> StepTrace:
        """Return the recorded step of a model that ``load`` returned for these settings; it is prepared in place."""
        key = _trace_key(loaded, settings, shape, chip)
        if key is not None and key in self.traces:
            self.traces.move_to_end(key)
            return self.traces[key]
        prepared = self._prepared.get(loaded)
        if prepared is None:
            prepared = self._prepared[loaded] = PreparedModel.of(loaded.model, settings)
        with state_kept(prepared.model):  # another set-up may record it too, without checkpointing
            if settings.checkpointing and not settings.prepare:
                _checkpoint(prepared.model, settings)
            trace = _record(prepared, settings, shape, chip)
        trace.trainable, trace.parameters = prepared.trainable, prepared.parameters
        unknown = ", ".join(unknown_operators(trace.tracker.functions))
        uncounted = (f"what the kernels of {unknown} allocate beside their outputs is not counted",) if unknown else ()
        is_assumed = settings.padding is None and trace.tracker.padding and trace.tracker.padding_decides
        padded = (Aside("batches with padding: give padding=False where all rows have one length, which need no mask"),)
        trace.notes = *prepared.notes, *trace.notes, *uncounted, *(padded if is_assumed else ())
        if key is not None:
            self.traces[key] = trace
            if len(self.traces) > _KEPT_TRACES:
                self.traces.popitem(last=False)
        return trace


_KEEPING_NONE = Session(keeps_models=False)
_session: ContextVar[Session] = ContextVar("_session", default=_KEEPING_NONE)


def session() -> Session:
    """Return the session that estimates are part of now."""
    return _session.get()


@contextmanager
def keeping_models() -> Iterator[None]:
    """Keep the models that are built from a name or a configuration inside; a block inside another one adds nothing."""
    if session() is not _KEEPING_NONE:
        yield
        return
    token = _session.set(Session(keeps_models=True))
    try:
        yield
    finally:
        _session.reset(token)


# ---- What a recording depends on


def _preparation(settings: StepSettings) -> str | None:
    """Return what ``_prepared`` does by the settings; None for functions that may do something else each time."""
    own_layers = getattr(settings.lora, "_custom_modules", None)  # private, of peft 0.18 to 0.21; repr has none of it
    if settings.prepare or own_layers:
        return None
    adapters = settings.lora, settings.lora_targets, settings.load_in
    return repr((adapters, settings.freeze, [(one.name, _arguments(one, settings)) for one in _of_models(settings)]))


def _trace_key(loaded: LoadedModel, settings: StepSettings, shape: Shape, chip: Chip) -> Hashable | None:
    """Return what a trace depends on; None for a step that is not kept."""
    functions = map(callable, settings.checkpointing_options.values())
    if loaded.key is None or _preparation(settings) is None or any(functions):
        return None
    accumulates = min(settings.gradient_accumulation_steps, 2)
    if settings.precision == "tf32":
        settings = settings.replace(precision="fp32")  # the same allocations and operations
    left_out = set() if settings.streamed and settings.steps_in_backward else _NOT_IN_TRACE  # whose states travel
    values = {item.name: getattr(settings, item.name) for item in fields(settings) if item.name not in left_out}
    return loaded.key, repr(values), accumulates, settings.steps_in_backward, shape, chip


# ---- Before the first step


def _prepared(model: nn.Module, settings: StepSettings) -> nn.Module:
    """Apply what the user, the Trainer and the techniques do to a model before the first step, in this order."""
    for technique in _of_models(settings):
        if technique.on_load:
            load(technique.on_load)(model)
    if settings.load_in is not None and getattr(settings.lora, "use_dora", False):
        raise NotEstimableError(
            "not estimable: use_dora=True reads the values of quantised weights, which have none here; expected LoRA, "
            "or DoRA of plain weights. Pass LoraConfig(use_dora=False), or load_in=None"
        )
    if settings.lora is not None:
        with torch.device("meta"):
            model = rest_to_meta(add_adapters(model, settings.lora, lora_targets=settings.lora_targets))
        if settings.load_in is not None:
            prepare_quantized(model)
    if settings.checkpointing and settings.prepare:
        _checkpoint(model, settings)
    if settings.freeze:
        freeze(model, settings.freeze)
    for technique in _of_models(settings):
        if technique.on_model:
            load(technique.on_model)(model, **_arguments(technique, settings))
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
    return [one for one in asked_by(settings).values() if one.on_load or one.on_model]


def _arguments(technique: Technique, settings: StepSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in technique.arguments}


def _checkpoint(model: nn.Module, settings: StepSettings) -> None:
    compat.enable_checkpointing(model, {"use_reentrant": False, **settings.checkpointing_options})
    if settings.freeze:
        drop_input_gradients(model)


def _not_quantised(model: nn.Module, settings: StepSettings) -> Iterator[str]:
    """Yield what of the weights bitsandbytes leaves as it is, if that is a tenth: it quantises linear layers alone."""
    if settings.load_in is None:
        return
    total, left = 0, Counter[str]()
    for name, parameter in model.named_parameters():
        total += parameter.nbytes
        if parameter.dim() > 2 and parameter.is_floating_point() and not parameter.requires_grad:
            left[re.sub(r"^.*\.\d+\.|(parametrizations|original|base_layer)\.?", "", name).rstrip(".")] += (
                parameter.nbytes
            )
    if left.total() > total / 10:
        has_experts = any(hasattr(module, "has_gate") for module in model.modules())  # of its experts interface
        fix = "; quantize_experts=True puts experts into 4 bits" if has_experts else ""
        what = f"{format_bytes(left.total())} of {format_bytes(total)} of weights are not quantised"
        yield f"{what}: {', '.join(left)}, which bitsandbytes does not know; it knows linear layers{fix}"


# ---- The recording


def _record(prepared: PreparedModel, settings: StepSettings, shape: Shape, chip: Chip) -> StepTrace:
    """Record a step; where the code of its experts reads which of them a router chose, with a balanced choice."""
    try:
        return _record_with(prepared, settings, shape, chip)
    except NotEstimableError:
        if not any("expert" in name or "router" in name for name, _ in prepared.base.named_modules()):
            raise
        trace = _record_with(prepared, settings, shape, chip, balanced=True)
    trace.notes += ("each expert is assumed to get as many tokens as the others",)
    return trace


def _record_with(
    prepared: PreparedModel, settings: StepSettings, shape: Shape, chip: Chip, *, balanced: bool = False
) -> StepTrace:
    lengths = {"seq_len": shape.seq_len, "labels_length": shape.labels_length}
    loss = loss_among(settings)
    sizes = [size for size in (shape.batch_size, settings.eval_batch_size) if size is not None]
    sizes = sizes if loss is None else [size * loss.rows for size in sizes]
    batches = [example_batch(prepared.base, batch_size=size, settings=settings, **lengths) for size in sizes]
    batches = batches if loss is None else [loss.batch(one) for one in batches]
    is_made = hasattr(unwrap_model(prepared.base), "prepare_decoder_input_ids_from_labels")
    for one in batches if settings.label_smoothing_factor and is_made else ():
        # label smoothing removes the labels; the decoder's inputs, otherwise made from them, come from the collator
        one["decoder_input_ids"] = torch.zeros_like(one["labels"])
    batch, evaluation_batch = batches[0], batches[1] if len(batches) > 1 else None
    if settings.predict_with_generate and evaluation_batch is not None:
        from hf_memopt.prediction.memory.recording.generation import (
            check_generation,  # imports transformers' generation
        )

        check_generation(prepared.base)
    rows, model = settings.micro_batch_size, prepared.model
    _check_scaled_gradients(model, settings)
    tracker = StorageTracker(padding=has_padding(batch, settings), hidden=_hidden_of(chip), balanced=balanced)
    semantics = CudaSemantics(
        autocast=autocast_dtype(settings.precision),
        capability=chip.capability,
        cache=settings.autocast_cache,
        tracker=tracker,
    )
    stream = None
    with ExitStack() as around:
        if settings.streamed:
            stream = RecordedStream(model, settings, tracker, prepared.trainable)
            around.enter_context(stream.streaming())
        trace = record_step(
            model,
            batch,
            settings,
            micro_batch=cut_batch(batch, shape.batch_size, rows) if rows and rows < shape.batch_size else None,
            evaluation_batch=evaluation_batch,
            tracker=tracker,
            semantics=semantics,
        )
    trace.on_host = None if stream is None else stream.weights(len(trace.micro_batches))
    trace.notes += tuple(assumed_inputs(prepared.base, settings))
    return trace


@cache
def _hidden_of(chip: Chip) -> Hidden:
    """Return the tracker's ``hidden``: one function for each chip, beside which its answers are kept."""
    return partial(hidden_bytes, chip=chip)


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
