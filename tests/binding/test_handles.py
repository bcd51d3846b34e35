"""Overrides of one object's methods: they stack, come off in any order, keep nothing alive and leave nothing behind."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.training.binding.undo import UndoHandle, is_overridden, override_method, set_attribute, undo_all


class Speaker:
    """Says a word as often as it is told."""

    def say(self, word: str, times: int = 1) -> str:
        """Return the word, repeated."""
        return " ".join([word] * times)


def framed(mark: str) -> Callable[..., str]:
    """Put a mark on either side of what the method before returns."""

    def say(before: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        return f"{mark}{before(*args, **kwargs)}{mark}"

    return say


def loud(word: str) -> str:
    """A method of the object's own."""
    return word.upper()


def test_a_handle_undoes_once() -> None:
    undone: list[str] = []
    handle = UndoHandle(lambda: undone.append("by hand") or 1 / 0)
    assert not handle.is_removed
    with pytest.raises(ZeroDivisionError):
        handle.remove()
    handle.remove()
    assert handle.is_removed
    with UndoHandle(lambda: undone.append("at the end")):
        assert undone == ["by hand"]
    assert undone == ["by hand", "at the end"]


@given(steps=st.lists(st.integers(-4, 3), max_size=12), has_own=st.booleans())
def test_overrides_stack_and_come_off_in_any_order(steps: list[int], has_own: bool) -> None:
    """Against a list of marks: 0 and more puts a mark on top, below 0 takes the n-th of those in force off."""
    speaker, other, in_force = Speaker(), Speaker(), []
    if has_own:
        speaker.say = loud  # type: ignore[assignment,method-assign]
    before = dict(vars(speaker))
    for step in steps:
        if step >= 0:
            mark = "-+*/"[step]
            in_force.append((mark, override_method(speaker, "say", framed(mark))))
        elif in_force:
            in_force.pop(step % len(in_force))[1].remove()
        frame = "".join(mark for mark, _ in in_force)
        assert speaker.say("a") == f"{frame[::-1]}{'A' if has_own else 'a'}{frame}"
        assert other.say("a") == "a"
    for _, handle in in_force:
        handle.remove()
    assert vars(speaker) == before


@pytest.mark.parametrize("is_removed", [False, True], ids=["object gone", "override removed"])
def test_what_is_over_keeps_nothing_alive(is_removed: bool) -> None:
    class Told:
        """What the function that stands in holds."""

    speaker, told = Speaker(), Told()
    references = [weakref.ref(told)] if is_removed else [weakref.ref(told), weakref.ref(speaker)]
    handle = override_method(speaker, "say", lambda before, word, told=told: (told, before(word)))
    kept = speaker.say if is_removed else None  # as a bound callback may
    del told
    if is_removed:
        handle.remove()
        assert kept is not None
        assert kept("a") == "a"
    else:
        del speaker
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    handle.remove()


def test_what_another_put_on_top_stays() -> None:
    speaker = Speaker()
    handle = override_method(speaker, "say", framed("-"))
    ours = speaker.say
    foreign = speaker.say = lambda word: f"({ours(word)})"
    handle.remove()
    assert speaker.say is foreign
    assert speaker.say("a") == "(a)"


def test_the_signature_name_and_text_are_those_of_the_method() -> None:
    """Stock reads signatures of methods, ``compute_loss`` for example."""
    speaker = Speaker()
    before = inspect.signature(speaker.say)
    for mark in "-+":
        override_method(speaker, "say", framed(mark))
    assert inspect.signature(speaker.say) == before
    assert (speaker.say.__name__, speaker.say.__doc__) == ("say", "Return the word, repeated.")


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda speaker: pickle.loads(pickle.dumps(speaker))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_copy_has_the_method_of_its_class_and_is_another_object(
    layers: int, copied: Callable[[Speaker], Speaker]
) -> None:
    speaker = Speaker()
    for mark in "-+"[:layers]:
        override_method(speaker, "say", framed(mark), purpose=mark)
    twin = copied(copied(speaker))
    assert twin.say("a") == "a"
    assert twin.say.__self__ is twin  # type: ignore[attr-defined]
    assert not is_overridden(twin, "say", "-")
    override_method(twin, "say", framed("*"))
    assert twin.say("a") == "*a*"
    assert speaker.say("a") == ("-a-" if layers == 1 else "+-a-+")


def test_what_was_changed_last_is_undone_first() -> None:
    """Also where one of them fails, whose error is raised when the others are undone."""
    speaker = Speaker()
    speaker.word = "a"  # type: ignore[attr-defined]
    undone: list[str] = []
    handles = [set_attribute(speaker, "word", "b"), UndoHandle(lambda: 1 / 0), set_attribute(speaker, "word", "c")]
    handles.append(UndoHandle(lambda: undone.append(speaker.word)))  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        undo_all(*handles).remove()
    assert (undone, vars(speaker)) == (["c"], {"word": "a"})
