"""The floating-point formats of a run, as far as stock leaves something undone in them.

- ``disable_autocast_cache``: no 16-bit copies of all weights during the forward pass of a checkpointed model.
- ``keep_master_weights``: float32 weights under autocast, although ``from_pretrained`` of transformers 5 loads a 16-bit
  checkpoint in 16 bits. Updates smaller than 1/512 of a bfloat16 weight are lost otherwise; it costs 2 bytes a weight
  and 2 for its gradient.

``PrecisionCallback`` calls both. Which format suits the machine: ``devices.precision_support``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hf_memopt.changes import Change
from hf_memopt.plain_data import check_value
from hf_memopt.training.binding import checkpointing_of, versions
from hf_memopt.training.binding.compatibility import techniques_in_use
from hf_memopt.training.binding.model import unwrap_optimizer
from hf_memopt.training.binding.parameters import cast_parameters
from hf_memopt.training.binding.undo import UndoHandle, nothing_to_undo, override_method, remove_all, set_attribute
from hf_memopt.training.techniques.technique_callback import BoundCallback
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

_HALF = (torch.bfloat16, torch.float16)


# ---- Autocast's cache of weights ------------------------------------------------------------------------------------


def disable_autocast_cache(trainer: Trainer) -> UndoHandle:
    """Let the Trainer's autocast cast a weight at each use, and keep no copy of it until the forward pass ends.

    Without checkpointing it saves nothing, since autograd keeps the copies for the backward pass anyway. Under
    checkpointing a forward pass of BERT-large peaks 576 MiB lower, and so does the whole step where its peak was there:
    with accumulation or micro-batches (batch 32 x 128, 2 accumulation steps: 5,787 MiB instead of 6,203) and with
    gradient release (4,508 instead of 4,923).

    Losses and gradients stay equal to the bit, with as many casts, for all weights that a forward pass uses once. A
    weight that it uses several times (ALBERT's shared layers) is cast at each use, and its gradients are then summed in
    float32 instead of 16 bits.

    Source: ``estimate("bert-large-uncased", batch_size=32, seq_len=128, gpu="RTX 3090", precision="bf16",
    checkpointing=True, gradient_accumulation_steps=2, autocast_cache=False)``, or with gradients that are released in
    place of the accumulation; ``tests/techniques/test_precision.py``.
    """
    former = trainer.accelerator.autocast_handler
    if former is not None and former.cache_enabled is False:
        return nothing_to_undo()
    if is_under_autocast(trainer.model):
        raise ValueError(
            f"autocast_cache=False comes too late, {type(trainer.model).__name__} runs under autocast already; "
            "expected a Trainer that has neither trained nor evaluated. Call attach(trainer) right after Trainer(...)"
        )
    return _without_cache(trainer.accelerator)


def _without_cache(accelerator: Any) -> UndoHandle:
    from accelerate.utils import AutocastKwargs

    former = accelerator.autocast_handler or AutocastKwargs()
    return set_attribute(accelerator, "autocast_handler", replace(former, cache_enabled=False))


def is_under_autocast(model: Any) -> bool:
    """Return whether accelerate has put the model's forward under autocast, with the settings of that moment."""
    return hasattr(model, "_original_forward")  # accelerate's mark of it, seen in 1.15.0


def is_checkpointed(trainer: Any) -> bool:
    """Return whether the model is checkpointed, or will be once training begins."""
    names = {getattr(callback, "technique", None) for callback in trainer.callback_handler.callbacks}
    return (
        checkpointing_of(trainer.args)[0] or versions.is_checkpointing(trainer.model) or "checkpointing policy" in names
    )


# ---- Master weights -------------------------------------------------------------------------------------------------


def half_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of 16 bits that are trained, by name, tied ones once."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad and one.dtype in _HALF}


def keep_master_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> UndoHandle:
    """Turn trainable weights of 16 bits into float32, in place: parameters stay the same objects, tied ones tied.

    Running statistics of a ``BatchNorm`` follow its weight. Frozen weights stay as they are, quantised ones among them.
    """
    chosen = half_weights(model)
    if not chosen:
        return nothing_to_undo()
    for name, parameter in chosen.items():
        states = () if optimizer is None else optimizer.state.get(parameter, {}).values()
        if any(torch.is_tensor(state) and state.dtype in _HALF for state in states):
            raise ValueError(
                f"optimizer={type(optimizer).__name__} holds 16-bit states of {name}; expected one that has not "
                "stepped yet. Call keep_master_weights(model) before the optimizer is built"
            )
    statistics = {  # of BatchNorm, which takes them in the dtype of its weights alone
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and any(module.weight is one for one in chosen.values())
        for buffer in module.buffers()
        if buffer.dtype in _HALF
    }
    return cast_parameters(dict.fromkeys([*chosen.values(), *statistics], torch.float32))


# ---- The Trainer ----------------------------------------------------------------------------------------------------


class PrecisionCallback(BoundCallback):
    """Drop autocast's copies of the weights, and keep float32 weights, where a run needs it.

    With ``FreezeCallback``, name that first: weights that are frozen by then stay in 16 bits. On a CPU, whose layer
    norms compute in one dtype, freeze the embeddings together with the first layers. What is saved
    with its first weights frozen calls itself bfloat16, to which ``from_pretrained`` rounds the others: load it with
    ``dtype=torch.float32``. Of several adapters those become float32 that are active by then. TF32 is stock's:
    ``TrainingArguments(tf32=True)``. It logs no keys.

    Args:
        autocast_cache: False switches the cache off, ``"auto"`` does so if the model is checkpointed and autocast runs,
            True leaves it on.
        master_weights: whether trainable weights of 16 bits become float32 if autocast (bf16 or fp16) runs. Without
            autocast they stay as they are: that is training in pure 16 bits. So do those whose optimizer is one for
            16-bit weights (``low_memory_optimizer``).

    Attributes:
        changes: what was changed, and what was not and why.
        handle: undoes the changes to the Trainer and to the last model; None until it is bound.

    Raises:
        ValueError: an argument is invalid, at once; as ``disable_autocast_cache`` and ``keep_master_weights`` do.
        RuntimeError: training began unbound.
    """

    technique = "precision"

    def __init__(self, autocast_cache: bool | Literal["auto"] = "auto", master_weights: bool = True) -> None:
        check_value("autocast_cache", autocast_cache, bool | Literal["auto"], "auto")
        check_value("master_weights", master_weights, bool, True)
        super().__init__(autocast_cache, master_weights)
        self.autocast_cache = autocast_cache
        self.master_weights = master_weights

    def can_bind_late(self, trainer: Trainer) -> bool:
        """Return whether it may be bound when training begins: DDP holds the weights by then, autocast its cache."""
        return bool(trainer.accelerator.num_processes == 1 and not is_checkpointed(trainer))

    def change_trainer(self, trainer: Trainer) -> list[UndoHandle]:
        """Change the trainer, and its model before ``train()``: a resumed run loads float32 weights and states."""
        cached = self._disable_autocast_cache(trainer)
        try:
            self._keep_master_weights(trainer, trainer.model, trainer.optimizer)
        except BaseException:
            cached.remove()
            raise
        call = partial(self._call_model_init, trainer)
        cached_in = [cached]  # the accelerator of now
        undo = UndoHandle(partial(remove_all, cached_in))
        again = partial(self._keep_cache_off, trainer, cached_in)
        overrides = {
            "call_model_init": call,
            "create_accelerator_and_postprocess": again,
            "train": partial(self._train, trainer),
        }
        return [
            *(UndoHandle(self._handles.remove), undo),
            *(override_method(trainer, name, override) for name, override in overrides.items()),
        ]

    def _disable_autocast_cache(self, trainer: Trainer) -> UndoHandle:
        is_auto, runs_autocast = self.autocast_cache == "auto", versions.mixed_precision(trainer.args) != "no"
        if self.autocast_cache is True or (is_auto and not (runs_autocast and is_checkpointed(trainer))):
            return nothing_to_undo()
        if is_auto and is_under_autocast(trainer.model):
            late = "the model runs under autocast already, attach came too late"
            self.note(Change("autocast_cache", True, True, late))
            return nothing_to_undo()
        handle = disable_autocast_cache(trainer)
        reason = "it would keep a 16-bit copy of each weight for the forward pass"
        self.note(Change("autocast_cache", True, False, reason))
        return handle

    def _keep_cache_off(self, trainer: Trainer, cached_in: list[UndoHandle], before: Callable[[], Any]) -> None:
        """Switch the cache off in the accelerator that each trial of a hyperparameter search makes anew."""
        before()
        if not cached_in[0].is_removed:
            cached_in[:] = [_without_cache(trainer.accelerator)]

    def _keep_master_weights(self, trainer: Trainer, model: Any, optimizer: Any = None) -> None:
        self._handles.keep(model)
        weights = half_weights(model).values()
        runs_autocast = versions.mixed_precision(trainer.args) != "no"
        if not (self.master_weights and runs_autocast and weights) or "16-bit weights" in techniques_in_use(trainer):
            return
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        self._handles.keep(model, keep_master_weights(model, unwrap_optimizer(optimizer)))
        reason = f"{len(weights)} trainable weights: autocast computes in 16 bits, updates need more"
        if getattr(model, "dtype", None) in _HALF and not hasattr(model, "peft_config"):  # that of the first weights
            reason += (
                f"; what is saved calls itself {model.dtype}: load it with dtype=torch.float32, which rounds nothing"
            )
        before, after = f"16 bits, {format_bytes(size)}", f"float32, {format_bytes(2 * size)}"
        self.note(Change("master_weights", before, after, reason))

    def _train(self, trainer: Trainer, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Cast again what an evaluation with bf16_full_eval or fp16_full_eval has cast to 16 bits."""
        if self.is_in(trainer):
            self._keep_master_weights(trainer, trainer.model, trainer.optimizer)
        return before(*args, **kwargs)

    def _call_model_init(self, trainer: Trainer, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = before(*args, **kwargs)
        if self.is_in(trainer):
            self._keep_master_weights(trainer, model)
        return model
