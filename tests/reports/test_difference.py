"""What grew between two estimates, plans or runs: in terminals of any width, as JSON, as a page; what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hand_made_runs import MIB, estimate_data, finished_run, lost_run
from html_page import Page
from invoked import invoked
from printed_errors import in_one_line
from rich.console import Console

import tiny
from hf_memopt import estimate
from hf_memopt.reports.difference import compare, print_difference, read_side


def newer() -> dict[str, Any]:
    """Return the estimate of another version: 600 MiB more activations, 100 MiB fewer gradients."""
    components = estimate_data()["components"]
    components |= {"activations": 1593 * MIB, "gradients": 2257 * MIB}
    return estimate_data(
        components=components,
        settings={**estimate_data()["settings"], "optim": "adamw_torch_fused", "lora": None},
        versions={**estimate_data()["versions"], "transformers": "5.23.0"},
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    for path, told in zip(paths, (estimate_data(), newer()), strict=True):
        path.write_text(json.dumps(told))
    return paths


def test_what_grew_is_told_by_component_phase_setting_and_version(files: tuple[Path, Path]) -> None:
    found = json.loads(invoked("report", *files, "--json").output)
    changed = {row["name"]: row["change_bytes"] for row in found["components"] if row["change_bytes"]}
    assert changed == {"activations": 600 * MIB, "gradients": -100 * MIB}
    assert found["total"]["change_bytes"] == sum(row["change_bytes"] for row in found["components"]) == 500 * MIB
    assert found["total"]["before_bytes"] == sum(row["before_bytes"] for row in found["components"])
    assert [row["name"] for row in found["phases"]] == ["forward", "backward"]
    assert found["settings"] == {"optim": ["adamw_torch", "adamw_torch_fused"], "lora": [None, "None"]}
    assert found["versions"] == {"transformers": ["5.8.1", "5.23.0"]}
    assert found["verdict"] == (
        "B needs 500.0 MiB more than A: 7.71 GiB to 8.20 GiB (+6.3 %). Most of it: activations +600.0 MiB, gradients "
        "-100.0 MiB. A is tight with 0 B to spare on RTX 4060. B is 500.0 MiB over on RTX 4060."
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_hold_at_any_width(files: tuple[Path, Path], width: int) -> None:
    text = io.StringIO()
    print_difference(compare(*map(read_side, files)), Console(file=text, width=width, color_system=None))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    row = next(line.split() for line in lines if line.split()[:1] == ["activations"])
    assert row[:7] == ["activations", "993.0", "MiB", "1.56", "GiB", "+600.0", "MiB"]
    assert (row[7:] == []) is (width == 60)
    said = " ".join(text.getvalue().split())
    assert "B needs 500.0 MiB more than A" in said
    assert "setting optim: adamw_torch -> adamw_torch_fused" in said
    assert "version transformers: 5.8.1 -> 5.23.0" in said


def test_two_runs_and_one_that_ran_out_of_memory(tmp_path: Path) -> None:
    for name, told in (("old", finished_run()), ("new", lost_run())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memopt_run.json").write_text(json.dumps(told))
    page = tmp_path / "grew.html"
    found = invoked("report", tmp_path / "old", tmp_path / "new", "--output", page, "--json")
    told = json.loads(found.output)
    assert told["verdict"].endswith("B ran out of memory in step 3, backward.")
    assert told["before"]["components"] == {
        "CUDA context": 412 * MIB,
        "weights": 2357 * MIB,
        "optimizer state": 1200 * MIB,
        "gradients, activations and others": (6370 - 2357 - 1200) * MIB,
        "reserved, not in use": 300 * MIB,
    }
    assert Page(page.read_text(encoding="utf-8")).open == []


def test_real_estimates_and_the_sum_of_their_parts(tmp_path: Path) -> None:
    sides = []
    for rows in (2, 8):
        found = estimate(tiny.bert_config(), batch_size=rows, seq_len=16, gpu="RTX 3060 12GB")
        path = tmp_path / f"{rows}.json"
        path.write_text(found.to_json())
        sides.append(read_side(path))
        assert sum(sides[-1].components.values()) == found.total_bytes == sides[-1].total_bytes
    grew = {row.name: row.change_bytes for row in compare(*sides).components}
    assert grew["activations"] > 0
    assert grew["weights"] == 0


def test_it_says_that_the_models_differ(tmp_path: Path) -> None:
    for name, model in (("a", "bert-base-uncased"), ("b", "bert-large-uncased")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**estimate_data(), "model": model}))
    found = json.loads(invoked("report", tmp_path / "a.json", tmp_path / "b.json", "--json").stdout)
    assert found["settings"] == {"model": ["bert-base-uncased", "bert-large-uncased"]}
    assert found["verdict"].startswith("The models differ: bert-base-uncased and bert-large-uncased. Both need ")


def test_what_cannot_be_compared_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    run, old = tmp_path / "run.json", tmp_path / "old.json"
    run.write_text(json.dumps(finished_run()))
    old.write_text(json.dumps(estimate_data(format=2)))
    there = tmp_path / "there.html"
    there.write_text("kept")
    for arguments, says in {
        (files[0], run): "are an estimate and a run; expected two of one kind, since what is predicted and what is",
        (files[0], old): "cannot be read as an estimate (it has format 2, written by hf-memopt 0.2.0); expected what",
        (files[0], tmp_path): "is a folder without memopt_run.json; expected the output folder of a run",
        (files[0], tmp_path / "x.json"): "does not exist; expected the output folder of a run, or the JSON of a plan",
        (files[0], "x" * 5000): "cannot be a path (File name too long); expected text or a pathlib.Path.",
        (*files, run): "3 files are too many; expected one or two.",
        (*files, "--output", there): "exists already; expected a new file. Pass another name, or --force to replace it",
        (*files, "--force"): "--force has nothing to replace: no file is written; expected --output.",
        (run, "--json"): "one is JSON already; expected two.",
    }.items():
        found = invoked("report", *arguments)
        assert found.exit_code == 2, found.output
        assert says.rstrip(".") in " ".join(in_one_line(found.output).split())
    assert there.read_text() == "kept"
