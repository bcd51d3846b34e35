"""The handle that a technique returns to take its change back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

__all__ = ["UndoHandle"]


class UndoHandle(RemovableHandle):
    """torch's ``RemovableHandle`` for a change that is not a hook: ``remove()`` calls ``undo`` once.

    It works as a context manager too, as torch's own handle does.

    Example:
        >>> undone = []
        >>> handle = UndoHandle(lambda: undone.append("undone"))
        >>> handle.remove(); handle.remove(); undone
        ['undone']
    """

    def __init__(self, undo: Callable[[], None]) -> None:
        super().__init__(OrderedDict())
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Undo the change; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
