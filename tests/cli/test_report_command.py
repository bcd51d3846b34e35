"""What ``hf-memopt report`` refuses, in whole; its pages are tested in ``tests/reports``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hand_made_runs import finished_run
from invoked import invoked
from printed_errors import stopped

import tiny
from hf_memopt import estimate

WRITE_IT = "Write it: hf-memopt plan MODEL --json > plan.json"
COMPARISON = "ask for a comparison, which reports no longer make; expected one file or folder. Make a page of each:"
NO_PAGE = "it has neither the field candidates of a plan nor micro_batching of a run"
REFUSED = {
    "a.json b.json": f"2 files {COMPARISON} hf-memopt report a.json",
    "a.json b.json a.json -o grew.html": f"3 files {COMPARISON} hf-memopt report a.json",
    "run run --json": f"--json {COMPARISON.replace('ask', 'asks', 1)} hf-memopt report run",
    "a.json --json": f"--json {COMPARISON.replace('ask', 'asks', 1)} hf-memopt report a.json",
    "estimate.json": (
        f"'estimate.json' is nothing to report ({NO_PAGE}); expected what `hf-memopt plan --json` or a "
        f"MemoryReportCallback wrote. {WRITE_IT}"
    ),
    "none.json": f"'none.json' does not exist; expected the output folder of a run, or the JSON of a plan. {WRITE_IT}",
    "empty.json": (
        "'empty.json' is nothing to report (it is not JSON: Expecting value: line 1 column 1 (char 0)); expected what "
        f"`hf-memopt plan --json` or a MemoryReportCallback wrote. {WRITE_IT}"
    ),
    "folder": (
        "'folder' is a folder without memopt_run.json; expected the output folder of a run with a "
        "MemoryReportCallback. Call: attach(trainer, MemoryReportCallback()) before trainer.train()"
    ),
    "a.json -o there.html": (
        "--output there.html exists already; expected a new file. Pass another name, or --force to replace it"
    ),
    "x" * 5000: (
        f"'{'x' * 56}... cannot be a path (File name too long); expected text or a pathlib.Path. Pass another path"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs and an estimate, as they are written, and files that are neither."""
    found = tmp_path_factory.mktemp("reported")
    for name in ("run", "folder"):
        (found / name).mkdir()
    for name in ("a.json", "b.json", "run/memopt_run.json"):
        (found / name).write_text(json.dumps(finished_run()))
    (found / "estimate.json").write_text(estimate(tiny.bert_config(), batch_size=1, seq_len=8).to_json())
    (found / "empty.json").write_text("")
    (found / "there.html").write_text("kept")
    return found


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:40])
def test_what_has_no_page_is_answered_with_what_to_type(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = tiny.files_of(folder)
    assert stopped(invoked("report", *line.split())) == REFUSED[line]
    assert tiny.files_of(folder) == before
