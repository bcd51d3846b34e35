"""The handles of what a callback has changed in one model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hf_memopt.binding.handles import UndoHandle, remove_all

__all__ = ["ModelHandles"]


class ModelHandles:
    """The handles of all changes to the last model (or optimizer) of a callback, which is not kept alive.

    ``model_init`` gives a Trainer a new model for each run. The changes to a former model are not undone by this: they
    stay with it.
    """

    def __init__(self) -> None:
        self._model: Callable[[], Any] = lambda: None
        self._handles: list[UndoHandle] = []

    @property
    def model(self) -> Any:
        """The last model; None before the first, or if it is gone."""
        return self._model()

    def keep(self, model: Any, *handles: UndoHandle) -> UndoHandle:
        """Add handles of changes to a model; return one that undoes all changes to it, the last first."""
        if self._model() is not model:
            self._model, self._handles = weakref.ref(model), []
        self._handles += handles
        kept = self._handles
        return UndoHandle(lambda: remove_all(kept))

    def remove(self) -> None:
        """Undo all changes to the last model."""
        remove_all(self._handles)

    def handle_of(self, model: Any) -> UndoHandle:
        """Return a handle that undoes all changes to this model, unless another one has become the last."""
        reference = weakref.ref(model)

        def undo() -> None:
            if reference() is not None and self._model() is reference():
                self.remove()

        return UndoHandle(undo)
