"""Command lines over foreign files on a real terminal: no escape sequence of theirs reaches it, and ours do."""

from __future__ import annotations

from pathlib import Path

import pytest
from terminal_runs import FOREIGN, NAME, on_terminal, write_foreign_files

STEP = ["--batch-size", "1", "--seq-len", "8"]
PLAN = ["--gpu", "RTX 3060 12GB", "--seq-len", "8", "--effective-batch", "2", "--method", "full"]
LINES = {
    "estimate a folder": ["estimate", NAME, *STEP],
    "estimate a missing folder": ["estimate", f"x{NAME}"],
    "estimate a model_type": ["estimate", "type", *STEP],
    "estimate a hidden_act": ["estimate", "act", *STEP],
    "plan a folder": ["plan", NAME, *PLAN],
    "plan --write": ["plan", NAME, *PLAN, "--write", f"pw{NAME}"],
    "lengths of a file": ["lengths", f"{NAME}.parquet"],
    "lengths of one column": ["lengths", "one.parquet"],
    "lengths of columns": ["lengths", "esc.parquet"],
    "lengths --column": ["lengths", "esc.parquet", "--column", NAME],
    "lengths of a missing file": ["lengths", f"nowhere{NAME}"],
    "report of two": ["report", f"{NAME}.json", "run_a.json"],
    "report by its name": ["report", f"{NAME}.json", "--output", "o.html", "--force"],
    "report of one": ["report", "run_a.json"],
    "presets": ["presets", NAME],
    "no such command": ["ladder", NAME],
    "no such option": [f"--{NAME}"],
    "no such option of a command": ["doctor", f"--{NAME}"],
}
COLOURED = {"estimate a folder", "plan a folder", "report of two"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("foreign")
    write_foreign_files(found)
    return found


@pytest.mark.parametrize("line", LINES)
def test_no_foreign_escape_reaches_the_terminal(line: str, folder: Path) -> None:
    code, shown = on_terminal(LINES[line], folder)
    assert [one for one in FOREIGN if one in shown] == []
    assert code in (0, 1, 2), shown
    assert "Traceback" not in shown
    assert "bug in hf-memopt" not in shown
    if line in COLOURED:
        assert "\x1b[1" in shown  # bold: rich's own
