"""``Binding``: the one trainer that a callback works for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from hf_memopt.training.binding.undo import UndoHandle, nothing_to_undo, remove_all


class Binding:
    """The trainer that a callback works for, which is not kept alive, and what the callback put over it.

    A callback has it as ``binding``. A copy is unbound, since what it would undo belongs to the original's trainer.
    """

    def __init__(self) -> None:
        self._trainer: Callable[[], Any] = lambda: None
        self._handle = nothing_to_undo()
        self.is_passed = False  # it was only passed to its trainer, so another one may take it over
        self.was_ended = False  # it belonged to a trainer, and does not any more

    def __reduce__(self) -> tuple[Any, ...]:
        return Binding, ()

    @property
    def handle(self) -> UndoHandle:
        """The handle of the last ``to``."""
        return self._handle

    @property
    def trainer(self) -> Any:
        """The trainer, None while there is none."""
        return self._trainer()

    def to(self, trainer: Any, *handles: UndoHandle) -> UndoHandle:
        """Belong to this trainer, and no other any more; return the handle that undoes that and ``handles``."""
        self.end()
        reference, held = weakref.ref(trainer), list(handles)

        def undo() -> None:
            if self._trainer is reference:
                self._trainer, self.was_ended = lambda: None, True
            remove_all(held)

        self._trainer, self._handle, self.was_ended = reference, UndoHandle(undo), False
        return self._handle

    def end(self) -> None:
        """Belong to no trainer any more."""
        self._handle.remove()

    def serving(self, callback: object, state: Any) -> Any:
        """Return the trainer whose state this is; raise RuntimeError if the callback was not attached to it."""
        trainer = self._trainer()
        if trainer is None or trainer.state is not state:
            raise unbound_error(callback)
        return trainer

    def refuse_another(self, callback: object, trainer: Any) -> None:
        """Raise ValueError if the callback belongs to another trainer, unless ``callback.handle`` was removed."""
        handle = getattr(callback, "handle", None)
        if self._trainer() in (None, trainer) or (handle is not None and handle.is_removed):
            return
        gc.collect()  # a trainer is in reference cycles: one that was let go may be there until they are collected
        if self._trainer() is not None:  # no local name for it: a traceback would keep it alive
            name, former = type(callback).__name__, _described(self._trainer())
            raise ValueError(
                f"callbacks=<{name}> is attached to another trainer already ({former}) and cannot serve this one too "
                f"({_described(trainer)}); expected a callback for each trainer. "
                f"Pass a second one: attach(trainer, {name}(...))"
            )


def _described(trainer: Any) -> str:
    return f"{type(trainer).__name__} of {type(trainer.model).__name__}, output_dir={trainer.args.output_dir!r}"


def unbound_error(callback: object) -> RuntimeError:
    """Return the error of a callback that needs the trainer and came too late to bind itself, or was unbound."""
    name = type(callback).__name__
    return RuntimeError(
        f"{name} is not bound to this Trainer: it came after the Trainer was built, or was unbound; expected a bound "
        "callback. "
        "Call attach(trainer) before trainer.train(), with: from hf_memopt import attach"
    )
