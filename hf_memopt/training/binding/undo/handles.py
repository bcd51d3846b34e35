"""Handles that undo a change, and the override of a method or an attribute on one object alone."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch.utils.hooks import RemovableHandle


class UndoHandle(RemovableHandle):
    """torch's ``RemovableHandle`` for a change that is not a hook: ``remove()`` calls ``undo`` once.

    It works as a context manager too, as torch's own handle does. A copy undoes nothing: what it would undo belongs to
    the original.
    """

    def __init__(self, undo: Callable[[], object]) -> None:
        super().__init__(OrderedDict())
        self._undo: Callable[[], object] | None = undo

    def __reduce__(self) -> tuple[Any, ...]:
        return nothing_to_undo, ()

    @property
    def is_removed(self) -> bool:
        """Whether the change was undone."""
        return self._undo is None

    def remove(self) -> None:
        """Undo the change; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def nothing_to_undo() -> UndoHandle:
    """Return a handle that is removed already, for a function that found nothing to change."""
    handle = UndoHandle(lambda: None)
    handle.remove()
    return handle


def remove_all(handles: list[UndoHandle]) -> None:
    """Remove each handle, the last first, and empty the list."""
    failed: Exception | None = None
    while handles:
        try:
            handles.pop().remove()
        except Exception as error:  # the others have to be removed all the same
            failed = failed or error
    if failed is not None:
        raise failed


def undo_all(*handles: UndoHandle) -> UndoHandle:
    """Return one handle for several; it removes the last first."""
    return UndoHandle(partial(remove_all, list(handles)))


def set_attribute(owner: Any, name: str, value: Any) -> UndoHandle:
    """Set an attribute of one object; the handle puts the value back that it had, or deletes it if it had none.

    The handle does not keep the object alive.
    """
    had, before, reference = name in vars(owner), vars(owner).get(name), weakref.ref(owner)
    setattr(owner, name, value)

    def undo() -> None:
        alive = reference()
        if alive is not None and had:
            setattr(alive, name, before)
        elif alive is not None and name in vars(alive):
            delattr(alive, name)

    return UndoHandle(undo)


def share_attribute(owner: Any, name: str, value: Any, user: Any = None) -> UndoHandle:
    """Set an attribute of an object that several trainers may share, a dataset view for example.

    The last value that is still asked for is in force: handles may be removed in any order. A ``user``, a trainer, asks
    for its value once more whenever it makes the DataLoader of a run.
    """
    name_of_values = f"_values_of_{name}"
    own = [vars(owner)[name]] if name in vars(owner) else []  # else that of the class
    values: list[list[Any]] = vars(owner).setdefault(name_of_values, [own])
    asked = [value]
    values.append(asked)
    setattr(owner, name, value)

    def undo() -> None:
        values[:] = [other for other in values if other is not asked]
        if values[-1]:
            setattr(owner, name, values[-1][0])
        else:
            vars(owner).pop(name, None)
        if len(values) == 1:
            vars(owner).pop(name_of_values, None)

    def get_train_dataloader(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loader = before(*args, **kwargs)  # where this user asked for an earlier value, too
        values.sort(key=lambda other: other is asked)
        setattr(owner, name, value)
        return loader

    handle = UndoHandle(undo)
    if user is None:
        return handle
    return undo_all(handle, override_method(user, "get_train_dataloader", get_train_dataloader))


def override_method(owner: Any, name: str, function: Callable[..., Any], *, purpose: str = "") -> UndoHandle:
    """Call ``function(method, *args, **kwargs)`` for the method ``name`` of this one object; its class stays as it is.

    Overrides stack, the last one outermost, and may be removed in any order: once all are, the object has no attribute
    that it did not have before. They belong to this object alone: a deep copy and an unpickled one have the method
    that stood there before the first override. A shallow copy shares them, as it shares all else.

    Args:
        owner: the object, a Trainer for example.
        name: a method that is public and meant to be overridden.
        function: is called instead, with the method as it is now before the arguments.
        purpose: a name for this override, by which ``is_overridden`` finds it.

    Examples:
        >>> class Greeter:
        ...     def greet(self): return "hello"
        >>> greeter = Greeter()
        >>> handle = override_method(greeter, "greet", lambda before: before().upper())
        >>> greeter.greet(); handle.remove(); greeter.greet(); vars(greeter)
        'HELLO'
        'hello'
        {}
    """
    # weakly: the override holds the method before, that the owner, and a handle may outlive both
    override, reference = weakref.ref(_Override(owner, name, function, purpose)), weakref.ref(owner)

    def undo() -> None:
        standing, alive = override(), reference()
        if standing is not None and alive is not None:
            standing.remove(alive)

    return UndoHandle(undo)


def is_overridden(owner: Any, name: str, purpose: str) -> bool:
    """Return whether an override of this purpose is in force; of a copy of its object it is not."""
    layer = vars(owner).get(name)
    while isinstance(layer, _Override):
        if layer._purpose == purpose and layer._function is not layer._before:
            return True
        layer = layer._before
    return False


def function_below(layer: Any) -> Any:
    """Return the function of a method below all overrides: that of the class, or what the object had of its own."""
    while isinstance(layer, _Override):
        layer = layer._before
    return getattr(layer, "__func__", layer)


class _Override:
    """One layer over a method; once removed, it passes calls on until no other layer is above it."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any], purpose: str) -> None:
        self._owner, self._name, self._purpose = owner, name, purpose
        self._before = getattr(owner, name)
        self._is_first = name not in vars(owner)
        self._function = partial(function, self._before)
        update_wrapper(self, self._before, updated=())
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of owner and arguments, as bound methods have: torch's schedulers wrap that of ``step``."""
        return update_wrapper(lambda owner, *args, **kwargs: self(*args, **kwargs), self._before, updated=())

    def __reduce__(self) -> tuple[Any, ...]:
        """Become what the method is without overrides, as a bound method does: that of the class, of the copied owner,
        whose attributes are not restored yet when this is called; or the owner's own attribute.
        """
        lowest = self
        while isinstance(lowest._before, _Override):
            lowest = lowest._before
        return (getattr, (self._owner, self._name)) if lowest._is_first else (_same, (lowest._before,))

    def remove(self, owner: Any) -> None:
        self._function = self._before
        while isinstance(top := vars(owner).get(self._name), _Override) and top._function is top._before:
            if top._is_first:
                delattr(owner, self._name)
            else:
                setattr(owner, self._name, top._before)


def _same(value: Any) -> Any:
    return value
