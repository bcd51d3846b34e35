"""A wrong value in any parameter of the public interface is refused by a message that names the parameter, or it works.

No message of numpy, torch or Python comes out of the middle of a function: each value is compared only where its type
is known.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from public_calls import CALLS, llama
from tables import refusals

import hf_memopt
import tiny


class Unprintable:
    """A user's object whose ``__repr__`` fails, as that of a half-built module does."""

    def __repr__(self) -> str:
        raise RuntimeError("no text for this object")


VALUES: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array([1, 2]),
    "scalar": lambda: torch.tensor(2),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "nan": lambda: float("nan"),
    "empty": lambda: "",
    "object": object,
    "dict": lambda: {"a": 1},
    "large": lambda: 10**30,
    "unprintable": Unprintable,
}
INTERNAL = re.compile(
    r"ambiguous|0-d|unhashable|\bbug\b|' object |no len\(\)|not subscriptable|not supported between|unsupported operand"
    r"|positional argument|no text for|not iterable|invalid literal|could not convert|must be real|be interpreted"
)


SECONDS_EACH = ("StepSettings, estimated", "Plan.report", "MemoryReportCallback")  # in make test-hard alone


@pytest.mark.parametrize("kind", VALUES)
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failures = []
    for called, call in CALLS.items():
        for name in () if called in SECONDS_EACH else sorted(call.valid(tmp_path).keys() - call.skip):
            folder = tmp_path / f"{called} {name}"
            folder.mkdir()
            arguments = {**call.valid(folder), name: VALUES[kind]()}
            problem = problem_of(partial(call.function, **arguments), name, *call.also.get(name, ()))
            if problem:
                failures.append(f"{called}({name}=<{kind}>): {problem}")
    assert not failures, "\n".join(failures)


def problem_of(call: Callable[[], Any], *names: str) -> str:
    """Return what is wrong with the refusal of a value; "" if the call works, or names the parameter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (ValueError, TypeError, FileNotFoundError, NotADirectoryError) as error:
        text = str(error)
        is_named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
        is_clear = (is_named or text.startswith("a=1 is")) and not INTERNAL.search(text)
        return "" if is_clear else f"{type(error).__name__}: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_whole_messages() -> None:
    named = {"Unprintable": Unprintable, "hf_memopt": hf_memopt, "llama": llama, "np": np, "tiny": tiny, "torch": torch}
    assert refusals(__file__, **named, transformers=transformers) == 11
