"""Settings of the clients: one thread, other people's warnings let be, and files with what came of every cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from clients_table import counted
from comparison import ABSOLUTE, NARROW, RELATIVE, Outcome

RESULTS = {name: Path(__file__).with_name(f"{name}.jsonl") for name in ("results", "pattern_results")}
"""A file for the table of clients, and one for the table of patterns."""
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
sys.path.append(str(Path(__file__).parents[1] / "memory"))  # what measures the host's allocator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-results", action="store_true", help="rewrite the files of results of the tables that run")


@pytest.fixture
def record_outcome(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Return what notes an outcome for a file of results, from a worker process too; ``place``: its line there."""

    def record(
        place: int, client: str, setup: str, outcome: Outcome, *, is_right: bool, table: str = "results", **more: object
    ) -> None:
        row = {"client": client, "setup": setup, "is_right": is_right, **outcome._asdict(), **more}
        record_property(CELL, (table, place, row))

    return record


class ResultsFiles:
    """Gathers the rows that tests have noted, counts the patterns among them, and writes each table that has run."""

    def __init__(self, *, writes: bool) -> None:
        self._writes = writes
        self._rows: list[tuple[str, int, dict[str, Any]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._rows += [value for name, value in report.user_properties if name == CELL]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        head = {
            "date": datetime.now(UTC).date().isoformat(),
            "tolerance": {"relative": RELATIVE, "absolute": ABSOLUTE, "narrow": NARROW[0]},
            "versions": {package: version(package) for package in PACKAGES},
        }
        for table, path in RESULTS.items():
            rows = self._of(table)
            if rows and self._writes:
                lines = [json.dumps(row) for row in (head, *rows)]
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = self._of("pattern_results")
        if rows:
            terminalreporter.write_line(f"Patterns: {counted(rows)}")

    def _of(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table, in their places."""
        found = [(place, row) for name, place, row in self._rows if name == table]
        return [row for _, row in sorted(found, key=itemgetter(0))]


def pytest_configure(config: pytest.Config) -> None:
    # Other people's code warns when it is imported; what is new with this package, a test compares.
    config.addinivalue_line("filterwarnings", "ignore")
    if config.getoption("--write-results") and config.getoption("keyword"):
        raise pytest.UsageError("--write-results writes whole tables; leave -k out")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultsFiles(writes=config.getoption("--write-results")))
