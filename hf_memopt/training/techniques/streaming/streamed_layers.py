"""Train a model that is larger than the GPU: its layers wait in host memory, and come to the GPU one after the other.

Weights, gradients, optimizer state and checkpoints are ordinary ones on the host; on the GPU are ``prefetch + 1``
layers, what is outside the layers (embeddings, head, adapters), and the activations of a model whose layers are all
recomputed. Weights and losses are bit for bit those of stock with checkpointing. A step of L layers copies
2 L - 1 - prefetch of them to the GPU, beside the compute of those before; so it pays where a batch has enough tokens.
Of a model that is a little too large most layers can stay: ``resident`` says how many, and L counts the others.

Gradients are *parked*: each goes to the host when its layer is done, where stock accumulates, clips and steps. With
``low_memory_optimizer(release=True)`` they are *released*: weight and state visit the GPU, which steps within the
backward pass; no gradient is kept.

Limitations: one process; no ``torch.compile``; what is outside the layers has to fit, with its gradient and state.

Source: the idea of MegaTrain (https://arxiv.org/abs/2604.05091) and of FSDP2's ``CPUOffloadPolicy``.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hf_memopt.changes import Change
from hf_memopt.notices import notify
from hf_memopt.plain_data import Count, CountOrZero, check_value
from hf_memopt.training.binding import refuse_data_parallel, versions
from hf_memopt.training.binding.compatibility import check_settings, refusal_of
from hf_memopt.training.binding.model import check_model, unwrap_model, unwrap_optimizer
from hf_memopt.training.binding.parameters import layer_stacks, parameters_outside_adapters
from hf_memopt.training.binding.undo import UndoHandle, override_method, set_attribute, undo_all
from hf_memopt.training.devices.readings import read_memory
from hf_memopt.training.techniques import Lanes, ModelCallback
from hf_memopt.training.techniques.optimizers import optimizer_state_bytes
from hf_memopt.training.techniques.streaming.gradients import DeviceSteps, HostGradients
from hf_memopt.training.techniques.streaming.layer import StreamedLayer, resident_forward
from hf_memopt.training.techniques.streaming.resident import (
    MEASURED_STEPS,
    check_measurable,
    check_resident,
    layers_that_wait,
    most_resident,
    move_state,
)
from hf_memopt.training.techniques.streaming.ring import Ring
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

TECHNIQUE = "streamed layers"
FEWEST_LAYERS = 3
_HANDLES: weakref.WeakKeyDictionary[nn.Module, StreamedHandle] = weakref.WeakKeyDictionary()


class StreamedHandle(UndoHandle):
    """The handle of ``stream_layers``: ``remove()`` gives the layers their own forward passes back.

    The weights stay on the host, page-locked; what is outside the layers stays on the device.
    """

    def __init__(self, ring: Ring, options: dict[str, Any], *handles: UndoHandle) -> None:
        undo = undo_all(*handles)

        def stop() -> None:
            ring.clear()
            undo.remove()
            for layer in ring.layers:
                layer.switch_back()

        super().__init__(stop)
        self.ring = ring  # the layers that wait and their copies, with the counts fetches, live_bytes and peak_bytes
        self.options = options  # of stream_layers


def stream_layers(
    model: Any,
    *,
    prefetch: int = 1,
    rows: int | None = None,
    embeddings_on_host: bool = False,
    resident: int | Literal["auto"] = 0,
    device: torch.device | str | None = None,
    lanes: Lanes | None = None,
) -> StreamedHandle:
    """Keep the weights of a model's layers in host memory; each call of a layer fetches them.

    The layers are those of ``layer_stacks``. Their parameters stay the same objects, on the host for good: optimizers,
    ``state_dict``, saving, merging and copies of the model see nothing of this. Adapters in the layers
    (``modules_to_save`` too), buffers, embeddings and head are moved to the device. Every layer is recomputed in the
    backward pass; stock's own checkpointing of it is switched off.

    A ``Trainer`` moves its model to the GPU when it is built. So call this on a model that does not fit there before::

        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)  # on the host
        stream_layers(model)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[StreamedLayersCallback()])

    A ``.grad`` on the host is written anew in the next backward pass, also where somebody else still holds it. Where
    gradients are recorded no cache is kept, in evaluation neither: decode under ``torch.no_grad()``. To merge adapters
    that were trained on a GPU, call ``handle.remove()`` and ``model.cpu()`` first.

    Args:
        model: to be trained, or the Trainer that has it.
        prefetch: layers to fetch ahead. On the device are at most ``prefetch + 1``.
        rows: how many rows of a batch a layer computes at once; the weights are fetched once for all parts. None for
            all. Dropout then draws its numbers in another order; gradients are the same but for the order of sums. The
            first time, two parts are compared with both at once, and a layer whose rows meet is refused.
        embeddings_on_host: look the tokens up on the host. The embeddings, their gradient and state are then nowhere
            on the device; stock steps them on the host, released or not.
        resident: how many layers stay on the device, spread evenly over all, with gradient and state. They are
            recomputed only where stock's checkpointing is on, and get all rows at once. At most
            ``resident + prefetch + 1`` layers are there at once; with all of them nothing is streamed. ``"auto"`` lets
            ``StreamedLayersCallback`` find the number: it measures two steps of streamed layers, then keeps as many as
            fit with 5 % of the GPU left, and logs it. Longer rows and evaluation later need more.
        device: that computes; the Trainer's, else the accelerator, else the CPU.
        lanes: makes the copies; for tests.

    Returns:
        The handle that undoes it.

    Raises:
        ValueError: the model cannot be streamed, or settings of the Trainer cannot work with it, each by name; there is
            not enough host memory.
        TypeError: ``model`` is neither.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=4)
        >>> model = LlamaForCausalLM(config)
        >>> handle = stream_layers(model, device="cpu")
        >>> ids = torch.ones(2, 6, dtype=torch.int64)
        >>> model(ids, labels=ids).loss.backward()
        >>> handle.ring.fetches  # 2 * 4 - 1 - prefetch
        6
    """
    from transformers import Trainer

    options = {"prefetch": prefetch, "rows": rows, "embeddings_on_host": embeddings_on_host, "resident": resident}
    _check_options(**options)
    if isinstance(model, Trainer):
        _check_arguments(model.args)
        model, device = model.model, device or model.args.device
    check_model(model)
    target = torch.device(read_memory(device).device) if lanes is None else lanes.device
    _check_model(model, is_simulated=target.type == "meta")
    _check_prefixes(model)
    layers = _layers_of(model)
    check_resident(resident, layers, target)
    adapters = {*model.parameters()} - {*parameters_outside_adapters(model)}
    ring = Ring(lanes or Lanes(target), prefetch)
    away = layers_that_wait(layers, 0 if resident == "auto" else resident)
    ring.layers = [StreamedLayer(layer, ring, adapters, rows) for layer in away]
    _check_shared(model, ring)
    if embeddings_on_host:
        _check_untied(model)
    if ring.lanes.device.type != "meta":  # of a simulation
        _to_host(ring)
    overrides = [
        override_method(layer.module, name, function)
        for layer in ring.layers
        for name, function in (("forward", layer.forward), ("_apply", layer.move))
    ]
    stay = [layer for layer in layers if layer not in away] if away else []
    overrides += [override_method(layer, "forward", partial(resident_forward, layer, ring)) for layer in stay]
    if embeddings_on_host:
        overrides += _keep_embeddings(model, ring)
    if getattr(model, "hf_device_map", None):  # of bitsandbytes' models; accelerate refuses another device than its own
        overrides.append(set_attribute(unwrap_model(model), "hf_device_map", {"": ring.lanes.device}))
    nn.Module.to(model, ring.lanes.device)  # not its own, which bitsandbytes' models refuse
    handle = _HANDLES[model] = StreamedHandle(ring, options, *overrides)
    return handle


class StreamedLayersCallback(ModelCallback):
    """Keep the weights of the layers in host memory: call ``stream_layers`` for each model not streamed yet.

    The callback alone comes too late for a model that does not fit the GPU, where the ``Trainer`` moves it when it is
    built: call ``stream_layers`` before. With a released optimizer class each layer steps on the device.

    It takes what ``stream_layers`` does, and logs no keys.

    Attributes:
        changes: what was changed, one ``Change``.
        handle: of the last model; None before the first.

    Raises:
        ValueError: as ``stream_layers`` does, when the ``Trainer`` is constructed or attached; when training begins,
            where gradients and optimizer state do not fit into host memory.
    """

    technique = TECHNIQUE
    handle: StreamedHandle | None

    def __init__(
        self,
        prefetch: int = 1,
        rows: int | None = None,
        *,
        embeddings_on_host: bool = False,
        resident: int | Literal["auto"] = 0,
    ) -> None:
        _check_options(prefetch, rows, embeddings_on_host, resident)
        self.prefetch, self.rows, self.embeddings_on_host = prefetch, rows, embeddings_on_host
        self.resident: int = 0 if resident == "auto" else resident
        self._options: dict[str, Any] = {"prefetch": prefetch, "rows": rows, "embeddings_on_host": embeddings_on_host}
        self._options["resident"] = resident
        self._steps = 0  # of this run
        super().__init__(**self._options)

    def change_model(self, model: Any, args: TrainingArguments) -> None:
        """Call ``stream_layers``, unless the model's layers are streamed."""
        if model is None:  # model_init makes it when training begins
            return
        _check_evaluation(model, args)
        _check_prefixes(model)  # adapters may have come after stream_layers
        handle = _handle_of(model)
        if handle is None:
            if (place := next(model.parameters()).device).type != "cpu":
                notify(
                    logger,
                    f"StreamedLayersCallback: the whole model was on {place} before its layers could wait in host "
                    "memory. Where it does not fit, call before Trainer(...): stream_layers(model)",
                )
            handle = stream_layers(model, device=args.device, **self._options)
        elif self._handles.model is model:
            return
        elif self._options["resident"] == "auto" and handle.options["resident"] == 0:
            check_resident("auto", [], handle.ring.lanes.device)
            handle.options["resident"] = "auto"
        self._keep(model, handle)

    def _keep(self, model: Any, handle: StreamedHandle) -> None:
        self._handles.keep(model, handle)
        self.handle = handle
        streamed = sum(parameter.nbytes for layer in handle.ring.layers for parameter in layer.parameters)
        self.resident = 0 if handle.options["resident"] == "auto" else handle.options["resident"]
        stay = f", {self.resident} stay on the device" if self.resident else ""
        reason = f"{format_bytes(streamed)} of {len(handle.ring.layers)} layers wait in host memory{stay}"
        self.note(Change("weights of the layers", "on the device", "fetched", reason))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Stream a new model's layers, find out who steps, and look for the memory that the host needs."""
        _check_arguments(args)
        super().on_train_begin(args, state, control, model=model, **kwargs)
        assert self.handle is not None  # of the model
        ring, optimizer, self._steps = self.handle.ring, unwrap_optimizer(optimizer), 0
        _begin(ring, optimizer)
        _check_training(model, ring, args, optimizer)
        if self.handle.options["resident"] == "auto":
            check_measurable(ring, args, optimizer)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Let as many layers stay as fit, when the steps were measured that this takes."""
        self._steps += 1
        assert self.handle is not None
        if self._steps != MEASURED_STEPS or self.handle.options["resident"] != "auto":
            return
        ring, optimizer, count = self.handle.ring, unwrap_optimizer(optimizer), len(self.handle.ring.layers)
        number, free_bytes = most_resident(ring, args, optimizer)
        self.handle.remove()
        self._keep(model, stream_layers(model, lanes=ring.lanes, **{**self.handle.options, "resident": number}))
        _begin(self.handle.ring, optimizer)
        move_state(optimizer, model)
        notify(
            logger,
            f"StreamedLayersCallback: {number} of {count} layers stay on {ring.lanes.device} from here on, since "
            f"{format_bytes(free_bytes)} were free beside the peak of {MEASURED_STEPS} steps and a margin of 5 %. Next "
            f"time pass resident={number}",
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let go of the device copies and of the optimizer."""
        if self.handle is not None:
            ring = self.handle.ring
            ring.clear()
            ring.steps, ring.gradients = None, HostGradients(ring.lanes)


def _begin(ring: Ring, optimizer: Any) -> None:
    """Let layers know who steps: gradients of an earlier run are dropped by stock."""
    ring.gradients = HostGradients(ring.lanes)
    for layer in ring.layers:
        layer.switch_off()
    ring.steps = DeviceSteps(ring.lanes, optimizer) if hasattr(optimizer, "step_copy") else None


# ---- The model


def _handle_of(model: nn.Module) -> StreamedHandle | None:
    """Return the handle of a model, or of the one inside its adapters."""
    found = (_HANDLES.get(module) for module in model.modules())
    return next((handle for handle in found if handle is not None and not handle.is_removed), None)


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, each once, in their order."""
    layers = list(dict.fromkeys(layer for stack in layer_stacks(model).values() for layer in stack))
    if len(layers) < FEWEST_LAYERS:
        raise ValueError(
            f"model=<{type(model).__name__}> has {len(layers)} repeated layers; expected {FEWEST_LAYERS} or more, "
            "since two are on the device at any time. Train it without StreamedLayersCallback"
        )
    return layers


def _check_model(model: nn.Module, *, is_simulated: bool = False) -> None:
    """Refuse what moves or cuts weights by itself, and weights that are not there."""
    problem = None
    if _handle_of(model) is not None:
        problem = "is streamed already; expected a plain model. Call remove() of its handle first"
    elif hasattr(model, "_orig_mod"):
        problem = "is compiled, and compiled code keeps its weights; expected a plain model. Leave torch.compile out"
    elif any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        problem = "has sharded weights (FSDP2 or tensor parallelism); expected whole ones. Leave the sharding out"
    elif any(hasattr(module, "_hf_hook") for module in model.modules()):
        problem = "has hooks of accelerate that move its weights; expected none. Load it without device_map"
    elif any(parameter.is_meta for parameter in model.parameters()) and not is_simulated:
        problem = "has weights on meta, which have no values; expected loaded weights. Load it without device_map"
    if problem is not None:
        raise ValueError(f"model=<{type(model).__name__}> {problem}")


def _check_prefixes(model: Any) -> None:
    """Refuse keys and values that PEFT hands to the layers as a cache, which recomputed layers do without."""
    config = getattr(model, "active_peft_config", None) if hasattr(model, "get_base_model") else None
    if getattr(config, "peft_type", None) == "PREFIX_TUNING":
        raise ValueError(
            f"model=<{type(model).__name__}> has PEFT's prefix tuning, whose keys and values recomputed layers do not "
            "get; expected LoRA, or prompts before the text. Take PromptTuningConfig in place of PrefixTuningConfig"
        )


def _check_shared(model: nn.Module, ring: Ring) -> None:
    """Refuse a parameter that two layers fetch, or that is used outside of its layer."""
    inside = {module for layer in ring.layers for module in layer.module.modules()}
    places = [p for module in model.modules() if module not in inside for p in module._parameters.values()]
    owned = [parameter for layer in ring.layers for parameter in layer.parameters]
    if len({*owned}) < len(owned) or not {*owned}.isdisjoint(places):
        raise ValueError(
            f"model=<{type(model).__name__}> shares a parameter between two layers, or between a layer and the rest; "
            "expected layers that own their weights. Clone the shared one: layer.weight = nn.Parameter("
            "layer.weight.detach().clone())"
        )


def _to_host(ring: Ring) -> None:
    """Put the weights where copies are fast, one layer after the other, so that only one is in memory twice.

    What ``from_pretrained`` returns may be a mapped file, which takes no memory before this and all of it afterwards.
    """
    for number, layer in enumerate(ring.layers, 1):
        waiting = layer.host_tensors()
        is_slow = ring.lanes.is_async and not all(tensor.is_pinned() for tensor in waiting)  # they are, streamed again
        if is_slow or any(tensor.device.type != "cpu" for tensor in waiting):
            what = f"the weights of layer {number} of {len(ring.layers)}"
            _check_host_memory(sum(tensor.nbytes for tensor in waiting), what)
            layer.to_host()


def _check_untied(model: Any) -> None:
    """Refuse embeddings that another module needs on the device."""
    embeddings = model.get_input_embeddings()
    inside, owned = {*embeddings.modules()}, {*embeddings.parameters()}
    others = [p for module in model.modules() if module not in inside for p in module._parameters.values()]
    if not owned.isdisjoint(others):
        raise ValueError(
            "embeddings_on_host=True cannot be used with tied embeddings, which the head needs on the device; expected "
            "weights of their own. Pass embeddings_on_host=False"
        )


def _keep_embeddings(model: Any, ring: Ring) -> list[UndoHandle]:
    """Let the input embeddings compute on the host; autograd brings their gradient there."""
    embeddings = model.get_input_embeddings()
    embeddings.to("cpu")

    def forward(before: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return before(ids.cpu(), *args, **kwargs).to(ring.lanes.device)

    stay = override_method(embeddings, "_apply", lambda *_, **__: embeddings)
    return [override_method(embeddings, "forward", forward), stay]


# ---- The arguments


def _check_options(prefetch: Any, rows: Any, embeddings_on_host: Any, resident: Any) -> None:
    check_value("prefetch", prefetch, CountOrZero, 1)
    check_value("rows", rows, Count | None, 8)
    check_value("embeddings_on_host", embeddings_on_host, bool, False)
    check_value("resident", resident, CountOrZero | Literal["auto"], 0)


def _check_arguments(args: TrainingArguments) -> None:
    refuse_data_parallel(args.n_gpu)
    check_settings(TECHNIQUE, args)
    for setting, is_used in (("FSDP2", args.fsdp), ("DeepSpeed", args.deepspeed)):
        if is_used:
            raise ValueError(str(refusal_of(TECHNIQUE, setting)))


def _check_evaluation(model: nn.Module, args: TrainingArguments) -> None:
    """Refuse an evaluation after training for which stock casts the weights."""
    dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16 if args.bf16_full_eval else None
    if dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
        name = "fp16" if args.fp16_full_eval else "bf16"
        raise ValueError(
            f"{name}_full_eval=True casts all weights, and those of streamed layers stay as they are; expected weights "
            f"of that dtype, or an evaluation as in training. Set {name}_full_eval=False"
        )


def _check_training(model: nn.Module, ring: Ring, args: TrainingArguments, optimizer: Any) -> None:
    """Refuse what cannot work with weights that are trained on the host, and too little host memory."""
    if versions.mixed_precision(args) == "fp16" and any(
        p.requires_grad for layer in ring.layers for p in layer.parameters
    ):
        raise ValueError(
            "fp16=True scales gradients on the GPU, and those of streamed layers are on the host; expected bf16, or "
            "adapters alone to train. Set bf16=True"
        )
    if ring.steps is not None and getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"optim=<{type(optimizer).__name__}> pages its state, and that of streamed layers is on the host already; "
            "expected an optimizer without pages. Set optim='adamw_bnb_8bit'"
        )
    # embeddings may be there too
    trained = [p for p in model.parameters() if p.requires_grad and p.device.type == "cpu"]
    gradients = 0 if ring.steps is not None else sum(p.nbytes for p in trained)
    state = sum(_state_bytes(optimizer, p) for p in trained) - sum(optimizer_state_bytes(optimizer).values())
    _check_host_memory(gradients + max(state, 0), "gradients and optimizer state")


def _state_bytes(optimizer: Any, parameter: torch.Tensor) -> int:
    """Return what the state of a parameter takes: one tensor of its shape for each moment."""
    defaults = optimizer.defaults
    moments = 2 if "betas" in defaults else int(bool(defaults.get("momentum")))
    is_widened = getattr(optimizer, "rounding", None) is not None  # 16-bit weights have float32 moments
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32 if is_widened else 8 * parameter.itemsize)
    return moments * parameter.numel() * int(bits) // 8


def _check_host_memory(needed_bytes: int, what: str) -> None:
    available_bytes = read_memory("cpu").host_available_bytes
    if needed_bytes > available_bytes:
        raise ValueError(
            f"streamed layers need {format_bytes(needed_bytes)} of host memory for {what}, and "
            f"{format_bytes(available_bytes)} are available; expected no more, since the machine would swap. Train "
            "adapters, set optim='adamw_bnb_8bit', or load the model with dtype=torch.bfloat16"
        )
