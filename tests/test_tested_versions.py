"""What `make test-compat` installs, and the table made of what it found."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import table_of_code
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
COUNTS = '<testsuites><testsuite tests="9" failures="2" errors="1" skipped="3"/></testsuites>'


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "compat"))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    module = importlib.import_module("run")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.jsonl")
    return module


def test_an_environment_has_the_named_transformers_and_the_oldest_or_the_pinned_rest(runner) -> None:
    pinned = dict(line.split("==") for line in runner.constraints_of("python3.12") if "==" in line)
    newer = dict(line.split("==") for line in runner.constraints_of("5.8.1") if "==" in line)
    oldest = dict(line.split("==") for line in runner.constraints_of("5.8.1-oldest") if "==" in line)
    assert newer == {**pinned, "transformers": "5.8.1"}
    changed = {name for name in pinned if oldest[name] != pinned[name]}
    assert {"transformers", "accelerate", "datasets", "bitsandbytes", "typer"} <= changed
    assert "torch" not in changed
    assert not list(runner.constraints_of("newest"))
    assert all(Requirement(f"{name}>={oldest[name]}").specifier.contains(pinned[name]) for name in changed)


def test_a_python_that_is_not_installed_is_told_and_noted(runner, capsys) -> None:
    assert runner.main("python3.99") == 0
    assert capsys.readouterr().out == "python3.99: not installed, so nothing was run with it\n"
    assert json.loads(runner.RESULTS.read_text(encoding="utf-8"))["counts"] is None


def test_results_are_kept_by_environment_and_become_the_table(runner, monkeypatch, tmp_path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(COUNTS, encoding="utf-8")
    runner.note({"environment": "5.8.1", "counts": None})
    runner.note({"environment": "python3.99", "counts": None})
    runner.note({"environment": "5.8.1", "versions": {"Python": "3.11.7"}, "counts": runner.counts_of(report)})
    monkeypatch.setattr(table_of_code, "TESTED", runner.RESULTS)
    lines = [line.rpartition(" | ")[0] for line in table_of_code.tested_versions().splitlines()]
    assert lines[0] == "| | Python | passed | failed | skipped"
    assert lines[2:] == ["| `5.8.1` | 3.11.7 | 3 | 3 | 3", "| `python3.99` | not installed, not run |  |  | "]
