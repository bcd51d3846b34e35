"""``hf-memopt plan``: exit codes, one line for what is wrong before torch is imported, text as wide as the terminal."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from printed_errors import in_one_line
from rich.console import Console
from tables import tables
from typer.testing import CliRunner

import tiny
from hf_memopt import NotEstimableError, Plan, estimate, plan
from hf_memopt.cli.app import app
from hf_memopt.prediction.recipes.planning import print_plans
from hf_memopt.prediction.recipes.planning import simulated as simulation

TABLES = tables(__file__)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.llama_config(num_hidden_layers=1, max_position_embeddings=64).save_pretrained(folder)
    return str(folder)


def run(*arguments: str, width: int = 80) -> Any:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["plan", *arguments])


@pytest.mark.slow
def test_a_plan_for_a_file_of_lengths(model: str, tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * length, "url": "a"} for length in [8] * 60 + [40] * 39 + [64]]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    asked = (model, "--gpu", "RTX 3060 12GB", "--data", str(data), "--effective-batch", "4", "--method", "full")
    found = run(*asked)
    assert found.exit_code == 0, found.output
    assert max(map(len, found.output.splitlines())) <= 80
    assert "100 examples, mean " in found.output
    shown = " ".join(found.output.split())
    assert "Note columns that are not read: url Note 1 more note: -v Trust" in shown
    assert "\nFITS with full fine-tuning" in found.output
    assert len(found.output.splitlines()) <= 18
    whole = " ".join(run(*asked, "--verbose").output.split())
    assert "Note the longest example has 64 tokens, and none is cut; --seq-len 40 needs less memory and cuts" in whole
    assert " cuts 1.0 % of the examples" in whole


def test_a_plan_for_a_budget_alone_is_printed_in_any_encoding(model: str) -> None:
    options = ("--budget", "6GB", "--effective-batch", "1", "--seq-len", "8", "--method", "full")
    found = CliRunner(charset="cp1252").invoke(app, ["plan", model, *options])
    assert found.exit_code == 0, found.output
    assert "\nFITS with full fine-tuning, fp32, batch " in found.output
    assert not {"█", "░"} & set(found.output)


def test_json_and_the_exit_code_of_what_does_not_fit(model: str) -> None:
    options = ("--gpu", "160MiB", "--effective-batch", "1", "--seq-len", "8", "--method", "full", "--json")
    found = run(model, *options)
    assert found.exit_code == 1, found.output
    told = json.loads(found.output)
    assert told["fits"] is False
    assert told["shortfall"]["lacks_bytes"] > 0


@pytest.mark.slow
def test_json_and_report_are_of_one_plan(model: str, tmp_path: Path) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
    options = ("--gpu", "RTX 3060 12GB", "--effective-batch", "2", "--seq-len", "16", "--method", "full")
    found = run(model, *options, "--json", "--report", str(page), "--plot", str(picture))
    assert found.exit_code == 0, found.output
    assert found.stderr.splitlines()[-2:] == [f"Report: {page}", f"Picture: {picture}"]
    assert picture.read_text(encoding="utf-8").startswith("<?xml")
    told = json.loads(found.stdout)
    assert sorted(shlex.split(told["command"])) == sorted(["hf-memopt", "plan", model, *options])
    (tmp_path / "again.json").write_text(found.stdout)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "again.json")]).exit_code == 0
    assert (tmp_path / "again.html").read_text() == page.read_text()
    assert told["command"] in page.read_text().replace("&#39;", "'")


def test_a_report_that_is_there_is_refused_before_the_search(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_memopt.prediction.recipes.planning.plan", None)
    page = tmp_path / "plan.html"
    page.write_text("kept")
    found = run(model, "--gpu", "T4", "--report", str(page))
    assert found.exit_code == 2
    assert "plan.html exists already; expected a new file. Pass another name, or --force to replace it" in in_one_line(
        found.output
    )
    assert page.read_text() == "kept"


@pytest.mark.parametrize(("options", "says"), TABLES["cannot be planned"])
def test_what_cannot_be_planned_is_said_as_an_error_and_a_hint(options: tuple[str, ...], says: str) -> None:
    gpu = () if "--gpu" in options else ("--gpu", "RTX 3060 12GB")
    found = run("bert-base-uncased", *gpu, *options)
    assert found.exit_code == 2
    assert says in in_one_line(found.output)
    assert [line.split(":")[0] for line in found.output.splitlines()] == ["error", "hint"]


# ---- Several GPUs


def several(*gpus: str) -> list[str]:
    return [word for gpu in gpus for word in ("--gpu", gpu)]


SMALL = ("--effective-batch", "2", "--method", "full")


@pytest.fixture(scope="module")
def compared(model: str) -> list[Plan]:
    lengths = np.full(4 * 10**6, 40)
    gpus = ("T4", "RTX PRO 6000", "150MiB")
    return [plan(model, gpu=gpu, lengths=lengths, effective_batch_size=2, method="full") for gpu in gpus]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_several_gpus_are_a_row_each(compared: list[Plan], columns: int) -> None:
    console = Console(file=(stream := io.StringIO()), width=columns)
    print_plans(compared, console, str)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    at = next(at for at, line in enumerate(lines) if line.startswith("   GPU: set-up"))
    assert lines[at].split() == ["GPU:", "set-up", "batch", "GiB", "free", "tokens/s", "epoch"]
    rows = [line for line in lines[at + 1 : lines.index("", at)] if re.search(r" \d x \d ", line)]
    for found, row in zip(compared, rows, strict=True):
        one = found.chosen or found.shortfall.nearest
        sizes = [f"{size / 2**30:.2f}" for size in (one.total_bytes, one.spare_bytes)]
        timed = (
            [f"{one.tokens / one.seconds:,.0f}", f"{4 * 10**6 * one.seconds / 2 / 3600:.1f} h"] if found.fits else "--"
        )
        assert row.startswith(f" {' ' if found.fits else 'x'} {found.gpu.name}: full".rstrip()[:18])
        assert re.split(r"\s\s+", row)[-5:] == [one.batch, *sizes, *timed]
    assert any(line.startswith(" x does not fit") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert text.startswith(
        f"{compared[0].model} (16,736) on 3 GPUs: 4,000,000 examples, mean 40 tokens, padded 40, planned for 40 "
    )
    assert "Note custom 150.0 MiB: assumed of custom 150.0 MiB: compute capability 8.6 " in text


@pytest.mark.slow
def test_several_gpus_as_json_are_a_list_of_plans(model: str) -> None:
    found = run(model, *several("150MiB", "T4"), *SMALL, "--seq-len", "8", "--json")
    assert found.exit_code == 0, found.output  # of the one that fits
    told = json.loads(found.stdout)
    assert [one["fits"] for one in told] == [False, True]
    alone = json.loads(plan(model, gpu="T4", effective_batch_size=2, method="full", seq_len=8).to_json())
    assert {**told[1], "command": "", "script": ""} == {**alone, "command": "", "script": ""}
    assert told[1]["command"] == shlex.join(["hf-memopt", "plan", model, "--seq-len", "8", *SMALL, "--gpu", "T4"])
    assert run(model, *several("150MiB", "140MiB"), *SMALL, "--seq-len", "8", "--json").exit_code == 1


LORA = "LoRA could not be simulated for {model}: its pass fails"


@pytest.mark.parametrize(
    ("gpu", "method", "as_json", "said"),
    [
        ("24GiB", "lora", ["--json"], f"{LORA}. Rehearse your own script instead: hf-memopt rehearse train.py"),
        (
            *("160MiB", "auto", []),
            "full fine-tuning does not fit, and LoRA and QLoRA could not be simulated for {model}: its pass fails. "
            "To plan what can be simulated, pass --method full",
        ),
    ],
    ids=["no method", "one method"],
)
def test_what_could_not_be_simulated_is_no_answer(
    gpu: str, method: str, as_json: list[str], said: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, as for what cannot be planned: not known to fit, and not known not to."""

    def refuse(*args: Any, recipe: Any, **settings: Any) -> Any:
        if recipe.lora:
            raise NotEstimableError("not estimable: its pass fails")
        return estimate(*args, recipe=recipe, **settings)

    monkeypatch.setattr(simulation, "estimate", refuse)
    options = ("--gpu", gpu, "--effective-batch", "1", "--seq-len", "8", "--method", method, *as_json)
    found = run(model, *options)
    assert (found.exit_code, found.stdout) == (2, "")
    assert in_one_line(found.stderr) == f"not estimable: {said.format(model=model)}\n"
    with pytest.raises(NotEstimableError, match="could not be simulated"):
        plan(model, gpu=gpu, effective_batch_size=1, seq_len=8, method=method)
