"""Data from outside: JSON objects read strictly, values checked against annotations, messages that name the field."""

from __future__ import annotations

import ast
import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_memopt
from hf_memopt.plain_data import (
    Count,
    CountOrZero,
    check_fields,
    check_value,
    checked_array,
    checked_path,
    from_object,
    parse_object,
    shown,
)


@dataclass(frozen=True)
class Plan:
    name: str
    steps: Count = 8
    workers: CountOrZero | None = None
    kind: Literal["bf16", "fp32"] = "bf16"
    names: tuple[str, ...] = ()
    flag: bool = False
    notes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


class Sizes(enum.IntEnum):
    SMALL = 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        (b"", "it is empty"),
        ("nonsense", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[1]", "it is not an object but [1]"),
        ("null", "it is not an object but None"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a":' * 100_000, "it is nested too deeply"),
        ('{"a": {"b": 1, "b": 2}}', "it has the key 'b' twice"),
        ('{"a": NaN}', "it has NaN, which is not a finite number"),
        ('{"a": -Infinity}', "it has -Infinity, which is not a finite number"),
        ('{"a": 1e999}', "it has 1e999, which is not a finite number"),
        (b'{"a": "\xff"}', "it is not UTF-8 text: invalid start byte at byte 7"),
        ("{}".encode("utf-16"), "it is not UTF-8 text: invalid start byte at byte 0"),
    ],
    ids=range(14),
)
def test_what_is_no_json_object_is_refused(text, reason) -> None:
    with pytest.raises(ValueError) as error:
        parse_object(text)
    assert str(error.value) == reason


@pytest.mark.parametrize("text", [b'\xef\xbb\xbf{"a": 1.5}', '{"a": 1.5}', '\n{"a": 15e-1}\n'])
def test_objects_are_read(text) -> None:
    assert parse_object(text) == {"a": 1.5}


@given(text=st.text() | st.binary())
def test_any_text_is_an_object_or_refused_with_a_reason(text) -> None:
    try:
        assert isinstance(parse_object(text), dict)
    except ValueError as error:
        assert type(error) is ValueError  # noqa: PT017  # either is fine


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "name is missing; expected a string. Add name"),
        (
            {"name": "x", "step": 1},
            "step=1 is not a field of Plan; expected one of name, steps, workers, kind, names, flag, notes. "
            "Did you mean 'steps'? Remove it",
        ),
        ({"name": 1}, "name=1 is invalid; expected a string. Pass another name"),
        ({"steps": 0}, "steps=0 is invalid; expected an integer of 1 or more. Pass steps=8"),
        ({"steps": True}, "steps=True is invalid; expected an integer of 1 or more. Pass steps=8"),
        ({"steps": 2.0}, "steps=2.0 is invalid; expected an integer of 1 or more. Pass steps=8"),
        (
            {"steps": 2**63},
            "steps=9223372036854775808 is invalid; expected an integer of 1 or more, below 2**63. Pass steps=8",
        ),
        ({"steps": 10**5000}, "steps=<int> is invalid; expected an integer of 1 or more, below 2**63. Pass steps=8"),
        ({"workers": -1}, "workers=-1 is invalid; expected an integer of 0 or more, or None. Pass workers=None"),
        (
            {"kind": "bf61"},
            "kind='bf61' is invalid; expected 'bf16' or 'fp32'. Did you mean 'bf16'? Pass kind='bf16'",
        ),
        ({"kind": ["bf16"]}, "kind=['bf16'] is invalid; expected 'bf16' or 'fp32'. Pass kind='bf16'"),
        ({"names": "base"}, "names='base' is invalid; expected a tuple or list of strings. Pass names=()"),
        ({"names": (1,)}, "names=(1,) is invalid; expected a tuple or list of strings. Pass names=()"),
        ({"flag": 0}, "flag=0 is invalid; expected True or False. Pass flag=False"),
        ({"flag": "false"}, "flag='false' is invalid; expected True or False. Pass flag=False"),
    ],
)
def test_a_field_that_does_not_fit_is_named_first(values, message) -> None:
    with pytest.raises(ValueError) as error:
        from_object(Plan, {"name": "x", **values} if values else values)
    assert str(error.value) == message


def test_values_that_fit() -> None:
    plan = Plan("x", Sizes.SMALL, 0, "fp32", ("a",), True, {"a": 1})
    assert from_object(Plan, vars(plan)) == plan
    check_value("steps", 2**63 - 1, Count)


@given(value=st.recursive(st.none() | st.integers() | st.text(), st.lists))
def test_what_is_shown_is_short(value: Any) -> None:
    assert len(shown(value)) <= 60
    assert shown(value) == repr(value) or shown(value).endswith("...")


def test_what_has_no_repr_is_shown_by_its_type() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert (shown(deep), shown(10**5000)) == ("<list>", "<int>")
    assert json.loads(json.dumps(shown("\ud800"))) == "'\\ud800'"


# ---- Wherever the package reads -------------------------------------------------------------------------------------


class Unshown:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


NO_PATH = "plot={} cannot be a path ({}; expected text or a pathlib.Path. Pass another path"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: parse_object('{"a": 1' + "0" * 5000 + "}"), "Exceeds the limit (4300 digits)<...>"),
    (
        lambda: check_value("steps", 9, Annotated[int, range(1, 9)], 8),
        "steps=9 is invalid; expected an integer of 1 or more, below 9. Pass steps=8",
    ),
    (lambda: checked_path("plot", 5), NO_PATH.format("5", "<...>)")),  # each version of Python says it in other words
    (lambda: checked_path("plot", "a\0b"), NO_PATH.format("'a\\x00b'", "<...>)")),
    (lambda: checked_path("plot", "x" * 300), NO_PATH.format("'" + "x" * 56 + "...", "File name too long)")),
    (
        lambda: checked_array("lengths", [[1], [2, 3]]),
        "lengths=[[1], [2, 3]] is not an array (<...> Pass lengths=[64, 128, 256]",
    ),
    (
        lambda: hf_memopt.LengthBuckets([3, 4], batch_size=Unshown()),  # type: ignore[arg-type]
        "batch_size=<Unshown> is invalid; expected an integer of 1 or more. Pass<...>",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_value_that_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    anything_between = ".*".join(map(re.escape, message.split("<...>")))
    assert re.fullmatch(anything_between, str(error.value))


def test_paths_and_arrays_that_fit_are_returned() -> None:
    assert checked_path("plot", "no/such/file.png") == Path("no/such/file.png")
    assert checked_array("lengths", [1, 2]).tolist() == [1, 2]


RUNS_WHAT_IT_READS = re.compile(
    r"(eval|exec|compile|__import__|(torch|np|numpy|yaml|joblib|jsonpickle)\.load|yaml\.(unsafe|full)_load|shelve\.open|"
    r"(pickle|cloudpickle|dill|marshal)\.loads?|os\.(system|popen)|runpy\.run_path)"
)


def test_what_is_read_is_data() -> None:
    """Nothing from a file is run; and no code of a repository, whatever its configuration asks for."""
    package, found, trusted = Path(hf_memopt.__file__).parent, set(), set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and RUNS_WHAT_IT_READS.fullmatch(ast.unparse(node.func)):
                found.add((str(file.relative_to(package)), ast.unparse(node.func)))
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                trusted.add(ast.unparse(node.value))
    assert found == {
        ("recipes/measuring/script.py", "compile"),  # the script that hf-memopt measure and run are asked to run
        ("recipes/measuring/script.py", "exec"),
    }
    assert trusted == {"False"}
