"""Data from outside: JSON objects read strictly, values checked against annotations, messages that name the field."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tables import refusals

import hf_memopt
from hf_memopt.plain_data import (
    Count,
    CountOrZero,
    check_fields,
    check_value,
    checked_array,
    checked_path,
    from_object,
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


def test_what_does_not_fit_is_refused() -> None:
    names = (Plan, Unshown, check_value, checked_array, checked_path, from_object, hf_memopt)
    named = {one.__name__: one for one in names}
    assert refusals(__file__, Annotated=Annotated, **named) == 21


def test_values_that_fit() -> None:
    plan = Plan("x", Sizes.SMALL, 0, "fp32", ("a",), True, {"a": 1})
    assert from_object(Plan, vars(plan)) == plan
    check_value("steps", 2**63 - 1, Count)


# ---- Wherever the package reads -------------------------------------------------------------------------------------


class Unshown:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


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
        (
            "prediction/recipes/running/script_as_main.py",
            "compile",
        ),  # the script that hf-memopt run and rehearse are asked to run
        ("prediction/recipes/running/script_as_main.py", "exec"),
    }
    assert trusted == {"False"}
