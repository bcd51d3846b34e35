"""Marks of tests: which cases run with ``make test-full`` only, and which are skipped on some versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from transformers import __version__ as transformers_version

resumes_on_a_cpu = pytest.mark.skipif(
    transformers_version.startswith(("5.8.", "5.17.")),
    reason="several processes of stock cannot resume on a CPU: they read the state to 'cpu:0', which torch cannot",
)
"""Of tests in which stock loads a checkpoint in several processes under DDP."""


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, marked ``slow`` but for the ``fast`` ones; a tuple is a case of several values."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if case in fast else pytest.mark.slow))
    return found
