"""The floating-point formats of training: which one the card computes natively, and what stock leaves undone in it.

- ``choose_precision``: bfloat16 where it is native (never where it is emulated: Turing, Volta, Pascal), else float16
  with float32 master weights and a gradient scaler, else float32. On a CPU float32, unless its instruction set
  multiplies bfloat16.
- ``disable_autocast_cache``: no 16-bit copies of all weights through the forward pass of a checkpointed model.
- ``keep_master_weights``: float32 weights under autocast, although ``from_pretrained`` of transformers 5 loads a 16-bit
  checkpoint in 16 bits. Updates smaller than 1/512 of a bfloat16 weight are lost otherwise; it costs 2 bytes a weight
  and 2 for its gradient.

``PrecisionCallback`` (``precision_callback.py``) calls the last two.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hf_memopt.binding.handles import UndoHandle
from hf_memopt.binding.versions import checkpointing_of, is_checkpointing

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = [
    "Precision",
    "check_precision",
    "choose_precision",
    "disable_autocast_cache",
    "half_weights",
    "is_checkpointed",
    "is_under_autocast",
    "keep_master_weights",
]

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Precision:
    """A floating-point format of the autocast region and why it was chosen; weights stay float32."""

    name: Literal["bf16", "fp16", "fp32"]
    reason: str

    @property
    def bf16(self) -> bool:
        """The value of ``TrainingArguments(bf16=...)``."""
        return self.name == "bf16"

    @property
    def fp16(self) -> bool:
        """The value of ``TrainingArguments(fp16=...)``."""
        return self.name == "fp16"


def choose_precision(*, use_cpu: bool = False) -> Precision:
    """Return the precision that suits the accelerator at hand, or the CPU where there is none or ``use_cpu`` is set.

    The first visible device decides; the devices of one machine are taken to be alike.
    """
    backend = "cpu" if use_cpu else accelerator_type()
    if backend == "cuda":
        name = torch.cuda.get_device_name()
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", f"{name} (compute capability {capability}) computes bfloat16 natively")
        return Precision("fp16", f"{name} (compute capability {capability}) only emulates bfloat16")
    if backend == "xpu":
        return Precision("bf16", f"{torch.xpu.get_device_name()} computes bfloat16 natively")
    if backend == "mps":
        return Precision("fp32", "mixed precision on MPS is not yet measured by this project")
    if backend == "cpu":
        return _choose_on_cpu()
    return Precision("fp32", f"no rule for the accelerator {backend!r} yet")


def _choose_on_cpu() -> Precision:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # public since torch 2.11
    for instruction_set in ("amx_bf16", "avx512_bf16"):
        if capabilities.get(instruction_set):
            return Precision("bf16", f"this CPU multiplies bfloat16 ({instruction_set}); the gain is not yet measured")
    return Precision("fp32", "this CPU has no bfloat16 instructions, so 16 bit would only be slower")


def accelerator_type() -> str:
    """Return torch's name of the accelerator at hand: ``cuda`` (ROCm too), ``xpu``, ``mps``, ... or ``cpu``."""
    if not torch.accelerator.is_available():
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def check_precision(*, bf16: bool, fp16: bool, use_cpu: bool = False) -> None:
    """Refuse a precision that the machine at hand cannot train in.

    Raises:
        ValueError: both are set; fp16 on a CPU or on MPS, which have no gradient scaler; bf16 on a card that emulates
            it.
    """
    if bf16 and fp16:
        raise ValueError(
            "bf16=True, fp16=True are given together; expected one of them. Drop one: preset(..., bf16=True)"
        )
    backend = "cpu" if use_cpu else accelerator_type()
    native = choose_precision(use_cpu=use_cpu)
    if fp16 and backend in ("cpu", "mps"):
        raise ValueError(
            f"fp16=True cannot train on this machine, whose device is {backend!r}; expected a card with a gradient "
            f"scaler. Leave fp16 out: this machine trains in {native.name}"
        )
    if bf16 and native.fp16:
        raise ValueError(f"bf16=True is emulated here: {native.reason}; expected fp16 on this card. Pass fp16=True")


# ---- Autocast's cache of weights ------------------------------------------------------------------------------------


def disable_autocast_cache(trainer: Trainer) -> UndoHandle:
    """Let the Trainer's autocast cast a weight at each use, and keep no copy of it until the forward pass ends.

    Without checkpointing it saves nothing, since autograd keeps the copies for the backward pass anyway. Under
    checkpointing nothing but the cache does: a forward pass of BERT-large peaks 576 MiB lower without it. The step does
    too as far as its peak was there: with accumulation or micro-batches, since the gradients of earlier ones exist
    already (batch 32 x 128, 2 micro-batches accumulated: 5,787 MiB instead of 6,203), and with gradient release (4,508
    instead of 4,923). Otherwise it peaks at the end of the backward pass, the same either way (5,249).

    Losses and gradients stay equal to the bit, and the casts as many, for all weights that a forward pass uses once.
    One that it uses several times (ALBERT's shared layers) is cast at each use, and its gradients are then summed in
    float32 instead of 16 bits: 42 casts instead of 18 in an ALBERT of 3 layers.

    Source: ``estimate("bert-large-uncased", batch_size=32, seq_len=128, gpu="RTX 3090", precision="bf16",
    checkpointing=True, gradient_accumulation_steps=2, autocast_cache=False)``, or ``gradient_release=True,
    max_grad_norm=0.0`` in place of the accumulation; ``tests/techniques/test_precision.py``.

    Returns:
        A handle that puts the former setting back for models that are prepared later.

    Raises:
        ValueError: the model is prepared already, with the cache.
    """
    from accelerate.utils import AutocastKwargs

    accelerator = trainer.accelerator
    former = accelerator.autocast_handler
    if former is not None and former.cache_enabled is False:
        return UndoHandle(lambda: None)
    if is_under_autocast(trainer.model):
        raise ValueError(
            f"autocast_cache=False comes too late, {type(trainer.model).__name__} runs under autocast already; "
            "expected a Trainer that has neither trained nor evaluated. Call attach(trainer) right after Trainer(...)"
        )
    accelerator.autocast_handler = replace(former or AutocastKwargs(), cache_enabled=False)
    reference = weakref.ref(accelerator)

    def undo() -> None:
        if (alive := reference()) is not None:
            alive.autocast_handler = former

    return UndoHandle(undo)


def is_under_autocast(model: Any) -> bool:
    """Tell whether accelerate has put the model's forward under autocast, with the settings of that moment."""
    return hasattr(model, "_original_forward")  # accelerate's mark of it, seen in 1.15.0


def is_checkpointed(trainer: Any) -> bool:
    """Tell whether the model is checkpointed, or will be once training begins."""
    names = {getattr(callback, "technique", None) for callback in trainer.callback_handler.callbacks}
    return checkpointing_of(trainer.args)[0] or is_checkpointing(trainer.model) or "checkpointing policy" in names


# ---- Master weights -------------------------------------------------------------------------------------------------


def half_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of 16 bits by name, tied ones once."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype in _HALF
    }


def keep_master_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> UndoHandle | None:
    """Turn trainable weights of 16 bits into float32, in place: parameters stay the same objects, tied ones tied.

    Frozen weights stay as they are, quantised ones among them.

    Args:
        model: the model.
        optimizer: one that is built for it already, if any.

    Returns:
        A handle that turns them back: exactly before training, rounded after it. None where there was none to turn.

    Raises:
        ValueError: the optimizer has stepped with some of them and holds 16-bit states.
    """
    chosen = half_weights(model)
    if not chosen:
        return None
    for name, parameter in chosen.items():
        states = () if optimizer is None else optimizer.state.get(parameter, {}).values()
        if any(torch.is_tensor(state) and state.dtype in _HALF for state in states):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} holds 16-bit states of {name}; expected one that has not "
                "stepped yet. Call keep_master_weights(model) before the optimizer is built"
            )
    ids = {id(parameter) for parameter in chosen.values()}
    former = [
        (weakref.ref(module), name, parameter.dtype)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in ids
    ]
    for parameter in chosen.values():
        _cast(parameter, torch.float32)

    def undo() -> None:
        for reference, name, dtype in former:
            if (module := reference()) is not None:
                _cast(module.get_parameter(name), dtype)

    return UndoHandle(undo)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.grad = None  # of the former dtype
    parameter.data = parameter.data.to(dtype)
