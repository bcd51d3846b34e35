"""The cases of a parametrised test that run by default; the others run with ``make test-full``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases, marked ``slow`` but for the ``fast`` ones; a tuple is a case of several values."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if case in fast else pytest.mark.slow))
    return found
