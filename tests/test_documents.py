"""README, changelog, notebook and docstrings tell what the code does: their code runs, their tables are current."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hf_memopt
from hf_memopt.binding.conflicts import RUN, SETTINGS, TECHNIQUES, refusal_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_memopt"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.fixture
def table(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("table")


def test_generated_parts_of_the_readme_are_current(table) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table.rendered(readme) == readme, "run: python benchmarks/table.py"


def test_three_ways_in_are_in_the_first_twenty_lines() -> None:
    head = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20]
    assert {"preset(", "bucketed(", "BucketedCollator(", "callbacks="} <= {
        part
        for part in ("preset(", "bucketed(", "BucketedCollator(", "callbacks=")
        if any(part in line for line in head)
    }


def test_every_public_name_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    internal = {"BudgetError", "Change", "MissingExtraError", "MemoryReading"}
    assert not [name for name in hf_memopt.__all__ if name not in internal and name not in readme]


def test_changelog_has_this_version() -> None:
    assert f"## [{hf_memopt.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_makefile_has_the_targets_that_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z][a-z-]*)", readme)) - {"and"}
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    assert named <= targets, named - targets


@pytest.mark.filterwarnings("ignore::UserWarning")  # a notebook may warn; here it must only run
def test_the_notebook_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), "quickstart.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "<class 'transformers.trainer.Trainer'>" in printed
    assert "trainable afterwards" in printed
    assert "torch" in sys.modules


def test_the_matrix_tells_what_is_refused(table) -> None:
    *tables, notes = table.compatibility().split("\n\n")
    reasons = dict(note.split(". ", 1) for note in notes.splitlines())
    shown = {}
    for part in tables:
        head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines())
        columns = [TECHNIQUES[int(name) - 1] if name.isdigit() else name for name in head[1:]]
        for row, (name, *cells) in zip(TECHNIQUES, lines, strict=True):
            assert name == f"{TECHNIQUES.index(row) + 1} {row}"
            shown |= {(row, column): cell for column, cell in zip(columns, cells, strict=True)}
    assert set(shown) == {(row, column) for row in TECHNIQUES for column in (*TECHNIQUES, *SETTINGS)}
    for (row, column), cell in shown.items():
        refusal = refusal_of(row, column)
        if row == column:
            assert cell == ""
        elif refusal is not None:
            assert reasons[cell.removeprefix("no (").removesuffix(")")] == refusal.reason
        else:
            assert cell == ("yes" if column in TECHNIQUES or column in RUN else "?")
