"""Malformed arguments of every public function: it works, or one clear error names the argument, and no file is left.

No inner traceback (``AttributeError``, ``KeyError``, torch's own message), no hang, no allocation of gigabytes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from malformed import ARRAYS, MALFORMED, assert_clear, limited, malformed
from public_calls import CALLS, TAKE_ARRAYS, UNCALLED

import hf_memopt

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers, about what is odd but works

ARGUMENTS = {name: sorted(set(call.valid(Path())) - set(call.skip)) for name, call in CALLS.items()}
QUICK = [name for name, call in CALLS.items() if not call.is_slow]
SLOW = [name for name, call in CALLS.items() if call.is_slow]
numbers = itertools.count()


def call_with(name: str, argument: str | None, value: Any, folder: Path) -> None:
    """Call a function with one of its arguments replaced; assert that it works or raises a clear error."""
    call = CALLS[name]
    folder.mkdir()
    before, former = {**os.environ}, Path.cwd()
    try:
        os.chdir(folder)
        arguments = dict(call.valid(folder))
        if argument is not None:
            arguments[argument] = value
        there = sorted(path.name for path in folder.iterdir())
        try:
            with limited(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                call.use(call.function(**arguments))
        except Exception as error:
            if argument is None:
                raise
            assert_clear(error, argument, *call.also.get(argument, ()), value=value)
            assert sorted(path.name for path in folder.iterdir()) == there, "a file is left"
    finally:
        os.chdir(former)
        shutil.rmtree(folder)
    assert dict(os.environ) == before


def test_every_public_name_is_called_or_named() -> None:
    called = {name.split()[0].split(".")[0] for name in CALLS}
    assert set(hf_memopt.__all__) <= called | set(UNCALLED)
    assert not called & (set(UNCALLED) - {"PaddingReport", "Estimate", "Plan"})


@pytest.mark.parametrize("name", CALLS)
def test_valid_arguments_work(name: str, tmp_path: Path) -> None:
    call_with(name, None, None, tmp_path / "call")


@pytest.mark.parametrize("name", QUICK)
def test_each_malformed_value_in_each_argument(name: str, tmp_path: Path) -> None:
    for argument in ARGUMENTS[name]:
        for value in (*MALFORMED.values(), *(ARRAYS.values() if argument in TAKE_ARRAYS else ())):
            call_with(name, argument, value, tmp_path / "call")


@st.composite
def calls(draw: st.DrawFn, names: list[str]) -> tuple[str, str, Any]:
    name = draw(st.sampled_from(names))
    return name, draw(st.sampled_from(ARGUMENTS[name])), draw(malformed())[1]


@pytest.mark.parametrize(("names", "count"), [(QUICK, 1000), (SLOW, 1500)], ids=["quick", "slow"])
def test_drawn_values(names: list[str], count: int, tmp_path: Path) -> None:
    @seed(18)
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(call=calls(names))
    def check(call: tuple[str, str, Any]) -> None:
        call_with(*call, tmp_path / f"call-{next(numbers)}")

    check()
