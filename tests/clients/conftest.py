"""Settings of the clients: one thread, other people's warnings let be, and a file with what came of every cell."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import pytest
import torch

from comparison import ABSOLUTE, RELATIVE, Outcome

RESULTS = Path(__file__).with_name("results.jsonl")
PACKAGES = (
    "hf-memopt",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
    "sentence-transformers",
    "setfit",
    "evaluate",
    "scikit-learn",
    "optuna",
)
CELL = "cell of the table of clients"

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-results", action="store_true", help=f"rewrite {RESULTS.name}")


@pytest.fixture
def record_outcome(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return what notes an outcome for the file of results, from a worker process too; ``place``: its line there."""

    def record(place: int, client: str, setup: str, outcome: Outcome, *, is_right: bool) -> None:
        row = {"client": client, "setup": setup, "is_right": is_right, **outcome._asdict()}
        record_property(CELL, (place, row))

    return record


class ResultsFile:
    """Gathers the rows that tests have noted, and writes them once all have run."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, dict[str, object]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._rows += [value for name, value in report.user_properties if name == CELL]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        head = {
            "date": datetime.now(UTC).date().isoformat(),
            "tolerance": {"relative": RELATIVE, "absolute": ABSOLUTE},
            "versions": {package: version(package) for package in PACKAGES},
        }
        lines = [json.dumps(row) for row in (head, *(row for _, row in sorted(self._rows, key=itemgetter(0))))]
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    # Other people's code warns when it is imported; what is new with this package, a test compares.
    config.addinivalue_line("filterwarnings", "ignore")
    if config.getoption("--write-results") and config.getoption("keyword"):
        raise pytest.UsageError(f"--write-results writes the whole of {RESULTS.name}; leave -k out")
    if config.getoption("--write-results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultsFile())
