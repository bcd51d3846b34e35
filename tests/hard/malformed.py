"""Malformed values, what a clear error is, and limits of time and memory within which a call has to answer."""

from __future__ import annotations

import math
import re
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from resource_limits import resource_limit

from hf_memopt import MissingExtraError, NotEstimableError
from hf_memopt.plain_data import shown

__all__ = ["ARRAYS", "MALFORMED", "assert_clear", "limited", "malformed"]

RULE = re.compile(r"expected .+[.:](\{\})? .+|not estimable: .+", re.DOTALL)
"""``...; expected <rule>. <action>``, as ``test_messages.py`` holds every message of the package to."""

CLEAR = (ValueError, TypeError, RuntimeError, OSError, MissingExtraError, NotEstimableError)


MALFORMED: dict[str, Any] = {
    **{repr(value): value for value in (None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 0.5, -0.0, 1e308)},
    **{repr(value): value for value in (math.nan, math.inf, -math.inf, 1j, "", " ", "no-such-word", "a\0b", "\ud800")},
    **{repr(value): value for value in ("💾", "1", "-1GB", "1e9GB", b"", b"\xff", (), [], {}, set(), [None], [-1])},
    **{repr(value): value for value in ([math.nan], ["a", 1], [[1], [2, 3]], {"a": 1}, {"": None}, {-1: "x"}, {1: 2})},
    "long text": "x" * 3000,
    "missing path": "/no/such/folder/file.json",
    "a folder": Path(),
    "object": object(),
    "class": int,
    "function": len,
    "module": torch.nn.Linear(2, 2),
    "numpy integer": np.int64(-3),
}
"""Values of every kind, by a name for the report of a failure."""

ARRAYS: dict[str, Any] = {
    "array": np.zeros(3),
    "empty array": np.zeros(0, dtype=int),
    "NaN array": np.array([math.nan, 1.0]),
    "2-D array": np.ones((2, 2), dtype=int),
    "tensor": torch.zeros(2, 2),
    "parameter": torch.nn.Parameter(torch.zeros(1)),
}
"""For arguments that take arrays: where a word or a flag is expected, numpy and torch refuse to be compared."""


def malformed() -> st.SearchStrategy[tuple[str, Any]]:
    """Return a strategy of values with their names: those of ``MALFORMED``, and numbers, texts and containers."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keyed = (st.dictionaries(keys, inner, max_size=3) for keys in (st.text(max_size=5), st.integers(-3, 3)))
        return st.lists(inner, max_size=3) | st.one_of(*keyed)

    made = st.recursive(leaves, containers, max_leaves=5)
    return st.sampled_from(list(MALFORMED.items())) | made.map(lambda value: (shown(value), value))


def assert_clear(error: BaseException, *names: str, value: Any = None) -> None:
    """Assert that an error has the form of the package's messages, and names the argument or its value."""
    text = str(error)
    message = f"{type(error).__name__}: {text}"
    assert isinstance(error, CLEAR), message
    assert RULE.search(text), message
    assert any(name in text for name in (*names, shown(value), repr(value)[:60])), message


@contextmanager
def limited(seconds: int = 60, more_bytes: int = 2 * 2**30) -> Iterator[None]:
    """Raise TimeoutError where a block takes longer, and MemoryError where its memory grows by more; no warnings."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer after {seconds} s")

    kinds = signal.SIGPROF, signal.SIGALRM  # of the process's own time; and where it sleeps
    former = [signal.signal(kind, stop) for kind in kinds]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + more_bytes
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)
    try:
        with warnings.catch_warnings(), resource_limit(resource.RLIMIT_AS, most_bytes):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, handler in zip(kinds, former, strict=True):
            signal.signal(kind, handler)
