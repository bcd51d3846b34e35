"""The comparison with transformers' own tests: a small checkout in its place, run stock and attached."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from tables import tables

HERE = Path(__file__).resolve().parent / "upstream"

LINES = tables(__file__)
TESTS = Path(__file__).with_name("upstream_checkout.txt").read_text(encoding="utf-8")


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("compare")


def checkout(folder: Path) -> Path:
    """Return a folder like a checkout of transformers, with one file of tests."""
    tests = folder / "tests" / "trainer"
    tests.mkdir(parents=True)
    (folder / "tests" / "__init__.py").touch()
    (tests / "__init__.py").touch()
    (tests / "test_trainer.py").write_text(TESTS, encoding="utf-8")
    package = folder / "src" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "5.99.0"\n', encoding="utf-8")
    return folder


@pytest.mark.slow  # two runs of pytest with all imports; make test-upstream does the same
def test_runs_a_checkout_stock_and_attached(compare: ModuleType, tmp_path: Path) -> None:
    source = checkout(tmp_path)
    assert compare.versions_of(source).startswith("tests of transformers 5.99.0 (")
    runs = {variant: compare.outcomes_of(source, variant, []) for variant in ("stock", "attached")}
    lines, code = compare.report(runs)
    assert lines == LINES["a checkout"]
    assert code == 1


def test_a_test_that_did_not_run_is_a_new_failure(compare: ModuleType) -> None:
    lines, code = compare.report({"stock": {"file::test": compare.Outcome("passed")}, "attached": {}})
    assert lines[2:] == [
        "attached: file::test missing: it did not run",
        "  NEW: no reason is known",
        "1 new failures without a known reason",
    ]
    assert code == 1
