"""Let callbacks and arguments of ours attach the Trainer that they are passed to: passing is enough.

A Trainer is noted while it is built and attached before its first use. ``add_callback`` and a copied Trainer give no
sign before ``on_train_begin``; what is too late by then raises, and the message names ``attach``.

Limitations: a subclass that writes the training loop anew and calls no method of ``Trainer`` in it; a copied Trainer
that only evaluates.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hf_memopt.training.binding.attachment import CHECKS, attach, kept_handles, parts_of
from hf_memopt.training.binding.callback_binding import Binding, unbound_error
from hf_memopt.training.binding.first_use import before_first_use, calling_trainer
from hf_memopt.training.binding.losses import ignores_items, repair_gradient_scale
from hf_memopt.training.binding.protocols import AttachedPart, EvaluationView, TrainingView
from hf_memopt.training.binding.undo import is_overridden

if TYPE_CHECKING:
    from transformers import TrainingArguments

ONLY_WATCHES = "only_watches"  # the attribute of a callback that needs nothing else of ``attach``
ASKED = "get_process_log_level"


def note_trainer(callback: Any) -> None:
    """Let the Trainer that is being built with this callback attach itself; for ``on_init_end``."""
    trainer = calling_trainer(lambda one: _has(one, callback))
    if trainer is not None:
        before_first_use(trainer, _attach_itself)


def note_trainer_of(args: TrainingArguments) -> None:
    """Let each Trainer that is built with these arguments, or a copy, repair its gradient scale before its first use.

    ``Trainer.__init__`` asks its arguments for the level of its log (5.8.1 to 5.24.0; pinned by a test).
    """
    setattr(args, ASKED, _NotingLevel(args))  # the type of the arguments stays what it is


class _NotingLevel:
    """The level of the log as arguments say it, and the Trainer noted that asks for it."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __call__(self) -> int:
        trainer = calling_trainer(lambda one: vars(getattr(one, "args", self)).get(ASKED) is self)
        if trainer is not None:
            before_first_use(trainer, _attach_itself)
        return int(type(self._args).get_process_log_level(self._args))

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotingLevel:
        return _NotingLevel(memo[id(self._args)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._args, ASKED)  # arguments that are saved load without this package


def bind_late(callback: Any, state: Any) -> None:
    """Attach the Trainer that begins to train, if this callback came by ``add_callback`` or the Trainer is a copy.

    A callback that was unbound by ``memopt_handle.remove()`` stays so.

    Raises:
        RuntimeError: what has happened by then would be wrong without it: batches planned, a checkpoint read.
    """
    binding: Binding = callback.binding
    if binding.was_ended or (binding.trainer is not None and binding.trainer.state is state):
        return
    trainer = calling_trainer(lambda one: _has(one, callback))
    if trainer is None:
        return
    unbound = [one for one in _ours(trainer) if one.binding.trainer is not trainer]
    is_late = any(hasattr(one, "can_bind_late") and not one.can_bind_late(trainer) for one in unbound)
    if _wants_attach(trainer) and not is_overridden(trainer, "create_optimizer", CHECKS):  # not attached before
        is_late |= state.global_step > 0 or isinstance(trainer.train_dataset, TrainingView)
    if is_late:
        raise unbound_error(callback)
    _attach_itself(trainer)


def _attach_itself(trainer: Any) -> None:
    """Do what ``attach`` does; where nothing but watching or a repair was asked for, do that alone."""
    is_repaired = isinstance(vars(trainer.args).get(ASKED), _NotingLevel)
    unbound = [callback for callback in _ours(trainer) if callback.binding.trainer is not trainer]
    if not (unbound or is_repaired):
        return  # removed since, or bound by hand
    for callback in unbound:
        _take_over(callback, trainer)
    if _wants_attach(trainer):
        attach(trainer)
        return
    with kept_handles(trainer) as handles:
        if is_repaired:
            handles.append(repair_gradient_scale(trainer))
        else:
            _warn_of_scale(trainer)
        handles += [callback.bind(trainer) for callback in unbound]


def _wants_attach(trainer: Any) -> bool:
    """Return whether there is more than callbacks that only watch: another callback, a view, a collator of ours."""
    evaluated = trainer.eval_dataset
    views = evaluated.values() if isinstance(evaluated, dict) else (evaluated,)
    return any(isinstance(part, AttachedPart | EvaluationView) for part in (*parts_of(trainer), *views)) or not all(
        getattr(callback, ONLY_WATCHES, False) for callback in _ours(trainer)
    )


def _warn_of_scale(trainer: Any) -> None:
    factor = trainer.args.gradient_accumulation_steps * trainer.accelerator.num_processes
    if factor > 1 and trainer.is_local_process_zero() and ignores_items(trainer):
        warnings.warn(
            f"gradient_accumulation_steps={trainer.args.gradient_accumulation_steps} multiplies the gradients of "
            f"{type(trainer.model).__name__} by {factor}, as its loss ignores num_items_in_batch; expected their mean. "
            "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach",
            stacklevel=4,
        )


def _take_over(callback: Any, trainer: Any) -> None:
    """Let a callback that was only passed serve this Trainer now; the other one binds it anew when it is used again."""
    binding: Binding = callback.binding
    former = binding.trainer
    if former is not None:
        if former.is_in_train or not binding.is_passed:
            binding.refuse_another(callback, trainer)
        binding.end()
        before_first_use(former, _attach_itself)
    binding.is_passed = True


def _ours(trainer: Any) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(getattr(one, "binding", None), Binding)]


def _has(trainer: Any, callback: Any) -> bool:
    handler = getattr(trainer, "callback_handler", None)  # None while the Trainer is being built
    return handler is not None and any(one is callback for one in handler.callbacks)
