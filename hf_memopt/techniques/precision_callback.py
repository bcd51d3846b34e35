"""The callback that decides when the ``Trainer``'s run gets autocast without a cache, and master weights.

The functions that do it, and what each saves and costs, stand in ``precision.py``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from transformers import TrainerCallback

from hf_memopt.binding.callback_binding import Binding, unbound_error
from hf_memopt.binding.conflicts import check_compatibility
from hf_memopt.binding.handles import UndoHandle, override_method, remove_all
from hf_memopt.changes import Change, add_change
from hf_memopt.techniques.precision import (
    disable_autocast_cache,
    half_weights,
    is_checkpointed,
    is_under_autocast,
    keep_master_weights,
)
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["PrecisionCallback"]

logger = logging.getLogger(__name__)

_CHOICES: dict[str, tuple[Any, ...]] = {
    "autocast_cache": ("auto", False, True),
    "master_weights": (True, False),
}


class PrecisionCallback(TrainerCallback):
    """Set up what stock leaves undone in a run's floating-point formats.

    Bound with ``attach(trainer)`` it does all of it. Passed in ``callbacks=`` alone it cannot reach autocast, and gives
    no master weights to what ``model_init`` builds. With ``FreezeCallback``, name that first: weights that are frozen
    by then stay in 16 bits. TF32 is stock's: ``TrainingArguments(tf32=True)``.

    Args:
        autocast_cache: False switches the cache off, ``"auto"`` does where the model is checkpointed and autocast runs,
            True leaves it alone.
        master_weights: whether trainable weights of 16 bits become float32 where autocast (bf16 or fp16) runs. Without
            autocast they stay as they are: that is training in pure 16 bits.

    Attributes:
        changes: what was done, and what was not and why.
        handle: undoes what was done to the Trainer and the model seen last; None before the first. Until ``attach`` is
            called again it also unbinds the callback.

    Raises:
        ValueError: an unknown value, at once; as ``disable_autocast_cache`` and ``keep_master_weights`` do.
        RuntimeError: it was not bound and needs to be, when training begins.
    """

    technique = "precision"

    def __init__(self, autocast_cache: bool | Literal["auto"] = "auto", master_weights: bool = True) -> None:
        self.autocast_cache = _checked("autocast_cache", autocast_cache)
        self.master_weights = _checked("master_weights", master_weights)
        self.changes: list[Change] = []
        self.handle: UndoHandle | None = None
        self.binding = Binding()
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._undo_model: list[UndoHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy starts unused and unbound: handles belong to this process, its trainer and its model
        return type(self), (self.autocast_cache, self.master_weights)

    def bind(self, trainer: Trainer) -> None:
        """Reach what only the trainer has; ``attach`` calls it."""
        if self.binding.trainer is trainer:
            return
        self.binding.to(
            trainer,
            *self._disable_autocast_cache(trainer),
            override_method(trainer, "call_model_init", lambda before: self._with_master_weights(trainer.args, before)),
        )
        # before train(): a resumed run loads float32 weights and states into these
        self._keep_master_weights(trainer.args, trainer.model, trainer.optimizer)

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Give the model master weights before the optimizer is built."""
        self._keep_master_weights(args, model, optimizer)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Check that what was asked for could be done."""
        trainer = self.binding.trainer
        is_bound = trainer is not None and trainer.state is state
        if is_bound:
            check_compatibility(trainer)
        elif self.autocast_cache is False or (model is not self._model() and self._needs_masters(args, model)):
            raise unbound_error(self)
        self._keep_master_weights(args, model, optimizer)

    def _disable_autocast_cache(self, trainer: Trainer) -> list[UndoHandle]:
        if self.autocast_cache is True:
            return []
        if self.autocast_cache == "auto":
            if not (trainer.args.bf16 or trainer.args.fp16) or not is_checkpointed(trainer):
                return []
            if is_under_autocast(trainer.model):
                self._record(
                    "autocast_cache", True, True, "the model runs under autocast already, attach came too late"
                )
                return []
        handle = disable_autocast_cache(trainer)
        self._record("autocast_cache", True, False, "it would keep a 16-bit copy of each weight for the forward pass")
        return [handle]

    def _needs_masters(self, args: Any, model: nn.Module) -> bool:
        return bool(self.master_weights and (args.bf16 or args.fp16) and half_weights(model))

    def _keep_master_weights(self, args: Any, model: Any, optimizer: Any = None) -> None:
        if self._model() is not model:
            self._model, self._undo_model = weakref.ref(model), []
        self.handle = UndoHandle(self._undo)
        if not self._needs_masters(args, model):
            return
        weights = half_weights(model).values()
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        handle = keep_master_weights(model, getattr(optimizer, "optimizer", optimizer))
        if handle is not None:
            self._undo_model.append(handle)
            reason = f"{len(weights)} trainable weights: autocast computes in 16 bits, updates need more"
            self._record(
                "master_weights", f"16 bits, {format_bytes(size)}", f"float32, {format_bytes(2 * size)}", reason
            )

    def _with_master_weights(self, args: Any, before: Callable[..., Any]) -> Callable[..., Any]:
        def call_model_init(*positional: Any, **named: Any) -> Any:
            model = before(*positional, **named)
            self._keep_master_weights(args, model)
            return model

        return call_model_init

    def _undo(self) -> None:
        self.binding.end()
        remove_all(self._undo_model)

    def _record(self, name: str, old: Any, new: Any, reason: str) -> None:
        change = Change(name, old, new, reason)
        if add_change(self.changes, change):
            logger.info("PrecisionCallback: %s", change)


def _checked(name: str, value: Any) -> Any:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in _CHOICES[name]):
        choices = _CHOICES[name]
        raise ValueError(
            f"{name}={value!r} is unknown; expected one of {', '.join(map(repr, choices))}. "
            f"Pass PrecisionCallback({name}={choices[0]!r})"
        )
    return value
