"""Reading the JSON of a plan: other versions and nonsense are refused by the place where they are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import tables

from hf_memopt.reports.plan import read_plan_text

TABLES = tables(__file__)


def changed(text: str, place: str, value: Any) -> str:
    """Return the JSON with another value at a place such as ``candidates.0.name``; without it where it is None."""
    told = json.loads(text)
    *path, last = (int(part) if part.isdigit() else part for part in place.split("."))
    inner: Any = told
    for part in path:
        inner = inner[part]
    if value == DELETED:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(told)


DELETED = "DELETED"  # instead of a value: the field is taken out
NONSENSE = TABLES["nonsense"]


@pytest.mark.parametrize(("place", "value", "says"), NONSENSE, ids=[f"{place}-{value}" for place, value, _ in NONSENSE])
def test_nonsense_is_refused_with_its_place(text: str, place: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        read_plan_text(changed(text, place, value), "plan.json")
    message = str(error.value)
    assert message.startswith("path='plan.json' cannot be read as a plan (")
    assert says in message
    assert message.endswith("Write it anew: hf-memopt plan MODEL --json > plan.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "(it is empty)"),
        (b"[1]", "(it is not an object but [1])"),
        (b'{"format": NaN}', "(it has NaN, which is not a finite number)"),
        (b"\xff", "(it is not UTF-8 text: "),
        (b"\xff\xfe", "(it is empty)"),
        (b"{}", "(it has format None, written by hf-memopt another version)"),
    ],
)
def test_a_file_of_something_else_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError) as error:
        read_plan_text(content, "plan.json")
    assert says in str(error.value)


def test_what_no_report_shows_may_be_anything(text: str) -> None:
    told = json.loads(text)
    told["more"] = told["candidates"][0]["more"] = [None]
    assert read_plan_text(json.dumps(told), "plan.json")["model"] == told["model"]
