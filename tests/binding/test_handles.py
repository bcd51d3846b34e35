"""Overrides of one object's methods: they stack, come off in any order, keep nothing alive and leave nothing behind."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from torch import nn

from hf_memopt.binding.undo import UndoHandle, is_overridden, override_method


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


def test_a_handle_undoes_once() -> None:
    undone: list[str] = []
    handle = UndoHandle(lambda: undone.append("by hand"))
    assert not handle.is_removed
    handle.remove()
    handle.remove()
    assert handle.is_removed
    with UndoHandle(lambda: undone.append("at the end")):
        assert undone == ["by hand"]
    assert undone == ["by hand", "at the end"]


def test_a_handle_whose_undo_raises_does_not_try_again() -> None:
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise ZeroDivisionError

    handle = UndoHandle(fail)
    with pytest.raises(ZeroDivisionError):
        handle.remove()
    handle.remove()
    assert tries == [1]


def test_an_override_is_of_one_object_alone() -> None:
    speaker, other = Speaker(), Speaker()
    override_method(speaker, "say", framed("-"))
    assert speaker.say("a", times=2) == "-a a-"
    assert other.say("a") == "a"


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=lambda order: "".join(map(str, order)))
def test_overrides_stack_and_come_off_in_any_order(order: tuple[int, ...]) -> None:
    speaker, marks = Speaker(), ["-", "+", "*"]
    handles = [override_method(speaker, "say", framed(mark)) for mark in marks]
    assert speaker.say("a") == "*+-a-+*"
    left = dict(enumerate(marks))
    for index in order:
        handles[index].remove()
        del left[index]
        frame = "".join(left.values())
        assert speaker.say("a") == f"{frame[::-1]}a{frame}"
    assert vars(speaker) == {}


def test_an_override_goes_on_after_others_came_off() -> None:
    speaker = Speaker()
    first = override_method(speaker, "say", framed("-"))
    second = override_method(speaker, "say", framed("+"))
    first.remove()
    third = override_method(speaker, "say", framed("*"))
    assert speaker.say("a") == "*+a+*"
    second.remove()
    third.remove()
    assert vars(speaker) == {}


def test_what_the_object_had_of_its_own_comes_back() -> None:
    speaker = Speaker()
    own = speaker.say = lambda word: word.upper()
    below, above = override_method(speaker, "say", framed("-")), override_method(speaker, "say", framed("+"))
    assert speaker.say("a") == "+-A-+"
    below.remove()
    above.remove()
    assert speaker.say is own


def test_what_another_put_on_top_stays() -> None:
    speaker = Speaker()
    handle = override_method(speaker, "say", framed("-"))
    ours = speaker.say
    foreign = speaker.say = lambda word: f"({ours(word)})"
    handle.remove()
    assert speaker.say is foreign
    assert speaker.say("a") == "(a)"


def test_an_override_of_no_method_leaves_nothing() -> None:
    speaker = Speaker()
    with pytest.raises(AttributeError):
        override_method(speaker, "shout", framed("-"))
    assert vars(speaker) == {}


def test_the_signature_name_and_text_are_those_of_the_method() -> None:
    """Stock reads signatures of methods, ``compute_loss`` for example."""
    speaker = Speaker()
    before = inspect.signature(speaker.say)
    for mark in "-+":
        override_method(speaker, "say", framed(mark))
    assert inspect.signature(speaker.say) == before
    assert (speaker.say.__name__, speaker.say.__doc__) == ("say", "Return the word, repeated.")


def test_modules_take_overrides_too() -> None:
    module = nn.Linear(2, 2)
    before = set(vars(module))
    with override_method(module, "extra_repr", framed("-")):
        assert repr(module) == "Linear(-in_features=2, out_features=2, bias=True-)"
        assert set(module.state_dict()) == {"weight", "bias"}
    assert set(vars(module)) == before


def loud(word: str) -> str:
    """A method of the object's own."""
    return word.upper()


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


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_keeps_what_the_object_had_of_its_own(copied: Callable[[Speaker], Speaker]) -> None:
    speaker = Speaker()
    speaker.say = loud  # type: ignore[assignment,method-assign]
    override_method(speaker, "say", framed("-"))
    assert copied(speaker).say is loud


def test_an_override_is_found_by_its_purpose_while_it_is_in_force() -> None:
    speaker = Speaker()
    below = override_method(speaker, "say", framed("-"), purpose="below")
    override_method(speaker, "say", framed("+"))
    assert [is_overridden(speaker, "say", purpose) for purpose in ("below", "above")] == [True, False]
    below.remove()  # it passes calls on until the one on top comes off
    assert not is_overridden(speaker, "say", "below")
    assert not is_overridden(Speaker(), "say", "below")


def test_a_handle_keeps_neither_object_nor_override_alive() -> None:
    class Told:
        """What the function that stands in holds."""

    speaker, told = Speaker(), Told()
    references = weakref.ref(speaker), weakref.ref(told)
    handle = override_method(speaker, "say", lambda before, word, told=told: (told, before(word)))
    del speaker, told
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    handle.remove()


def test_a_removed_override_lets_go_of_what_it_held() -> None:
    class Told:
        """What the function that stands in holds."""

    speaker, told = Speaker(), Told()
    reference = weakref.ref(told)
    handle = override_method(speaker, "say", lambda before, word, told=told: (told, before(word)))
    kept = speaker.say  # as a bound callback may
    del told
    handle.remove()
    gc.collect()
    assert reference() is None
    assert kept("a") == "a"
