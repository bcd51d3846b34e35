"""How a change is taken back: the handle that a technique returns, and the override of a method on one object alone."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["UndoHandle", "override_method", "remove_all"]


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


def remove_all(handles: list[UndoHandle]) -> None:
    """Take back what each handle stands for, the last first, and empty the list."""
    while handles:
        handles.pop().remove()


def override_method(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> UndoHandle:
    """Let ``wrap(method)`` stand in for the method ``name`` of this one object; its class stays as it is.

    Overrides stack, the last one outermost, and may be removed in any order: once all are, the object has no attribute
    that it did not have before.

    Args:
        owner: the object, a Trainer for example.
        name: a method that is public and meant to be overridden.
        wrap: takes the method as it is now and returns what is called instead.

    Returns:
        A handle whose ``remove()`` takes this override out; it does not keep the object alive.

    Example:
        >>> class Greeter:
        ...     def greet(self): return "hello"
        >>> greeter = Greeter()
        >>> handle = override_method(greeter, "greet", lambda before: lambda: before().upper())
        >>> greeter.greet(); handle.remove(); greeter.greet(); vars(greeter)
        'HELLO'
        'hello'
        {}
    """
    # weakly: the override holds the method before, that the owner, and a handle may outlive both
    override, reference = weakref.ref(_Override(owner, name, wrap)), weakref.ref(owner)

    def undo() -> None:
        standing, alive = override(), reference()
        if standing is not None and alive is not None:
            standing.remove(alive)

    return UndoHandle(undo)


class _Override:
    """One layer over a method; out of use it passes calls on until nothing stands on top of it."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._name = name
        self._before = getattr(owner, name)
        self._is_first = name not in vars(owner)
        self._function = wrap(self._before)
        update_wrapper(self, self._before, updated=())
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def remove(self, owner: Any) -> None:
        self._function = self._before
        while isinstance(top := vars(owner).get(self._name), _Override) and top._function is top._before:
            if top._is_first:
                delattr(owner, self._name)
            else:
                setattr(owner, self._name, top._before)
