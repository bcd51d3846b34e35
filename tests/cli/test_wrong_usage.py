"""What is said of a wrong command line: an error and a hint, in its own words, as wide as the terminal."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from printed_errors import stopped
from slow_cases import slow_except
from tables import tables
from terminal_runs import on_terminal
from typer.testing import CliRunner

from hf_memopt.cli.app import app

TABLES = tables(__file__)

PYTHON = re.compile(r"\w\([^)]*\)|\w=|\b(True|False|None)\b")
HINTS, WHOLE = TABLES["hints"], TABLES["whole"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a folder that holds no model and a file of token ids."""
    (tmp_path / "own-model").mkdir()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", HINTS)
def test_a_wrong_command_line_is_answered_with_what_to_type(line: str, folder: Path) -> None:
    done = CliRunner().invoke(app, line.split(), prog_name="hf-memopt")
    assert (done.exit_code, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint == f"hint: {HINTS[line]}"
    assert not PYTHON.search(done.stderr)


@pytest.mark.skipif(Version(version("typer")) < Version("0.29"), reason="older versions of typer have their own words")
@pytest.mark.parametrize("line", WHOLE)
def test_a_value_that_cannot_be_is_answered_in_whole(line: str, folder: Path) -> None:
    done = CliRunner().invoke(app, line.split(), prog_name="hf-memopt")
    assert stopped(done) == WHOLE[line]


@pytest.mark.parametrize("columns", slow_except([60], [60, 80, 120]))
def test_an_error_fits_the_terminal_in_colours(columns: int, folder: Path) -> None:
    code, printed = on_terminal(["plan", "gpt2", "--gpu", "RTX-3065"], folder, columns)
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert code == 2
    assert "\x1b[1;31merror:\x1b[0m --gpu" in printed
    assert "\x1b[1;36mhint:\x1b[0m Did you mean 'RTX 3060 12GB'?" in printed
    assert max(map(len, plain.splitlines())) <= columns
    assert " ".join(plain.split()) == (
        "error: --gpu RTX-3065 is not a GPU of the table; expected one of its 163 names, which hf-memopt gpus lists, "
        "or a size hint: Did you mean 'RTX 3060 12GB'? Pass its size: --gpu 12GB"
    )


# ---- gpus


@pytest.mark.parametrize("columns", slow_except([60], [60, 80, 120]))
def test_the_gpus_of_some_words_fit_a_terminal(columns: int, folder: Path) -> None:
    code, printed = on_terminal(["gpus", "rtx", "3060"], folder, columns)
    lines = [line.rstrip() for line in printed.splitlines()]
    assert (code, lines[:5]) == (
        0,
        [
            "GPU                 GiB usable bf16  sm TFLOP/s GB/s",
            "RTX 3060 Laptop 6GB   6   5.80  yes 8.6      22  336",
            "RTX 3060 8GB          8   7.75  yes 8.6      25  240",
            "RTX 3060 Ti           8   7.75  yes 8.6      32  448",
            "RTX 3060 12GB        12  11.75  yes 8.6      25  360",
        ],
    )
    assert max(map(len, lines)) <= columns


def test_all_gpus_are_listed_and_what_is_unknown_is_a_dash() -> None:
    lines = CliRunner().invoke(app, ["gpus"]).stdout.splitlines()
    assert len(lines) == 1 + 163 + 2
    assert max(len(line.rstrip()) for line in lines[:-2]) <= 60
    [line] = [line.split() for line in lines if line.startswith("GTX 1650 Super")]
    assert line == ["GTX", "1650", "Super", "4", "3.81", "no", "7.5", "-", "192"]


def test_gpus_as_json() -> None:
    small = json.loads(CliRunner().invoke(app, ["gpus", "laptop", "6", "GB", "--json"]).stdout)
    assert {gpu["memory_bytes"] for gpu in small} == {6 * 2**30}  # not the 16 GB whose names end in it
    found = json.loads(CliRunner().invoke(app, ["gpus", "Laptop", "24gb", "--json"]).stdout)
    assert [gpu["name"] for gpu in found] == ["RTX 5090 Laptop"]
    assert (found[0]["memory_bytes"], found[0]["compute_capability"], found[0]["bf16"]) == (24 * 2**30, [12, 0], True)
