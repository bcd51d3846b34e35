"""A pytest plugin under which every Trainer that a test builds goes through ``attach`` when it is first used.

``HF_MEMOPT_UPSTREAM`` names the variant, ``HF_MEMOPT_OUTCOMES`` the file that gets a line for each test.
"""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from transformers import Trainer, TrainerCallback

from hf_memopt import EvaluationGuardCallback, MicrobatchCallback, OverflowCallback, attach

VARIANTS: dict[str, tuple[Callable[[], TrainerCallback], ...] | None] = {
    "stock": None,
    "attached": (),
    "attached with callbacks": (
        MicrobatchCallback,
        OverflowCallback,
        lambda: EvaluationGuardCallback(reduce=None),
    ),
}

_attached: WeakSet[Trainer] = WeakSet()


def attached_first(method: Callable[..., Any], callbacks: tuple[Callable[[], TrainerCallback], ...]) -> Any:
    """Return the method of Trainer as users call it: ``attach(trainer, *callbacks)``, then the method."""

    @functools.wraps(method)
    def wrapped(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self in _attached:
            return method(self, *args, **kwargs)
        _attached.add(self)
        attach(self, *(make() for make in callbacks))
        return getattr(self, method.__name__)(*args, **kwargs)  # a callback may stand over it now

    return wrapped


def pytest_configure() -> None:
    callbacks = VARIANTS[os.environ["HF_MEMOPT_UPSTREAM"]]
    if callbacks is not None:
        for name in ("train", "evaluate", "predict"):
            setattr(Trainer, name, attached_first(getattr(Trainer, name), callbacks))


def pytest_collection_finish() -> None:
    """Keep what the imports left out of the garbage collection with which each training starts, as conftest.py does."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Append the outcome and the reason of a skip or the first line of an error."""
    text: Any = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr or "")
    if isinstance(text, tuple):  # of a skip: file, line, reason
        text = text[2].removeprefix("Skipped: ")
    lines = str(text).strip().splitlines() or [""]
    line = lines[0] if hasattr(report.longrepr, "reprcrash") or report.outcome == "skipped" else lines[-1]
    with Path(os.environ["HF_MEMOPT_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([report.nodeid, report.outcome, line[:200]]) + "\n")
