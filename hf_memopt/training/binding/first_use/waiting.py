"""Do something once, before a Trainer is used for the first time."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from hf_memopt.training.binding.undo import UndoHandle, override_method, remove_all, undo_all

USES = (
    *("train", "evaluate", "predict", "create_optimizer"),
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"),
)
"""The methods of a Trainer by which it is used: all that is decided in a run is decided after the first call of one."""

_WAITING: weakref.WeakKeyDictionary[Any, UndoHandle] = weakref.WeakKeyDictionary()


def before_first_use(trainer: Any, act: Callable[[Any], object]) -> None:
    """Call ``act(trainer)`` when one of ``USES`` is called first, then that method as it is by then.

    Calls while the Trainer is still being built do not count: a subclass goes on after ``super().__init__()``. What
    raises waits on, so that the next use raises, too. A second call for the same Trainer changes nothing.
    """
    if trainer in _WAITING:
        return
    reference = weakref.ref(trainer)

    def first(name: str, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if _is_being_built(owner):
            return before(*args, **kwargs)
        stop_waiting(owner)
        try:
            act(owner)
        except BaseException:
            before_first_use(owner, act)
            raise
        return getattr(owner, name)(*args, **kwargs)

    _WAITING[trainer] = undo_all(*(override_method(trainer, name, partial(first, name)) for name in USES))


def stop_waiting(trainer: Any) -> None:
    """Let a Trainer be used without what waits for that."""
    remove_all([_WAITING.pop(trainer)] if trainer in _WAITING else [])


def calling_trainer(is_meant: Callable[[Any], bool]) -> Any:
    """Return the Trainer in one of whose own methods the caller was called, of those that are meant; None if none is.

    A Trainer passes itself to no callback, and arguments do not know it either. Locals are read in the frames of
    transformers' own module alone: up to Python 3.12 what was read stays alive until its function returns.
    """
    for frame in _callers():
        if frame.f_globals.get("__name__") == "transformers.trainer" and frame.f_code.co_varnames[:1] == ("self",):
            trainer = frame.f_locals["self"]
            if is_meant(trainer):
                return trainer
    return None


def _is_being_built(trainer: Any) -> bool:
    made = (inspect.unwrap(vars(kind)["__init__"]) for kind in type(trainer).__mro__ if "__init__" in vars(kind))
    codes = {code for function in made if (code := getattr(function, "__code__", None)) is not None}
    return any(
        frame.f_code in codes and frame.f_locals.get(frame.f_code.co_varnames[0]) is trainer for frame in _callers()
    )


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
