"""What is said of a wrong command line: an error and a hint, in its own words, as wide as the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from terminal_runs import on_terminal
from typer.testing import CliRunner

from hf_memopt.cli.app import app

PYTHON = re.compile(r"\w\([^)]*\)|\w=|\b(True|False|None)\b")
MANY = "Pass --effective-batch 32, the examples of an optimizer step: plan cuts them into what fits"
OF_A_RUN = "Pass it to TrainingArguments, since neither memory nor the plan depends on it"
HINTS = {
    "plan gpt2 --lora 16": "Pass --method lora",
    "plan gpt2 --lora": "Pass --method lora",
    "plan gpt2 --qlora": "Pass --method qlora",
    "plan gpt2 --load-in-4bit": "Pass --method qlora",
    "plan gpt2 --batch-size 8": MANY,
    "plan gpt2 -b 8": MANY,
    "plan gpt2 --per_device_train_batch_size 8": MANY,
    "plan gpt2 --grad-accum 4": MANY,
    "plan gpt2 --max-length 512": "Pass --seq-len 512",
    "plan gpt2 --seq-length 512": "Did you mean '--seq-len'?",
    "plan gpt2 --seq_len 512": "Did you mean '--seq-len'?",
    "plan gpt2 --epochs 3": OF_A_RUN,
    "plan gpt2 --learning_rate 1": OF_A_RUN,
    "plan gpt2 --vram 8GB": "Pass --gpu 8GB",
    "plan gpt2 --num-gpus 2": "Pass --world-size 2",
    "plan gpt2 --output out": "Pass --write DIR",
    "plan --model gpt2": "Pass the model by itself: hf-memopt plan gpt2",
    "plan gpt2 --optim sgd": "It is an option of hf-memopt estimate",
    "plan gpt2 --zzz": "See: hf-memopt plan --help",
    "plan": "See: hf-memopt plan --help",
    "plan gpt2 --effective-batch x": "See: hf-memopt plan --help",
    "estimate gpt2 --qlora": "Pass --lora 16 --load-in nf4",
    "estimate gpt2 --bs 8": "Pass --batch-size 8",
    "lengths a.csv --max-seq-length 8": "Pass --max-length 512",
    "doctor --gpu T4": "It is an option of hf-memopt estimate, hf-memopt plan and hf-memopt run",
    "paln gpt2": "Did you mean 'plan'?",
    "zzz": "See: hf-memopt --help",
    "plan train.py": "Call: hf-memopt measure train.py",
    "plan train.jsonl": "Call: hf-memopt lengths train.jsonl",
    "plan ./mymodel": "Check the path",
    "plan ./own-modl": "Did you mean 'own-model'? Check the path",
    "plan own-model": "Pass the folder of a model",
    "plan bert-larg": "Did you mean 'bert-large-uncased'? List the well-known names: hf-memopt estimate --list-models",
    "plan dinov3-base": "List the well-known names: hf-memopt estimate --list-models",
    "plan openai/gpt-oss-safeguard-20b": "List the well-known names: hf-memopt estimate --list-models",
    "plan gpt2 --gpu MX450": "Pass its size: --gpu 8GB",
    "plan gpt2 --gpu 2x-T4": "Pass --gpu T4 and --world-size 2",
    "plan gpt2 --gpu RTX-3065": "Did you mean 'RTX 3060 12GB'? Pass its size: --gpu 8GB",
    "plan gpt2 --gpu T4 --data missing.jsonl": "Check the path",
    "plan gpt2 --gpu T4 --data rows.jsonl --column x": "Pass --column NAME",
    "plan gpt2 --gpu T4 --goal fast": "Pass --goal speed",
    "plan gpt2 --gpu T4 --allow bf16_weights": "Leave 'bf16_weights' out",
    "plan gpt2 --gpu T4 --budget 20GB": "Pass --budget 14909MiB",
    "plan gpt2 --gpu T4 --effective-batch 9 --gpus 2": "Pass --effective-batch 8",
    "plan gpt2 --gpu T4 --force": "Pass --write DIR",
    "estimate gpt2 --gpu T4 --data missing.jsonl": "Check the path",
    "estimate gpt2 --optim adamw9": "Did you mean 'adamw_torch'? Pass --optim adamw_torch",
    "estimate gpt2 --load-in gptq": "Pass no --load-in",
    "estimate gpt2 --load-in nf4": "Pass --lora 16",
    "estimate gpt2 --gradient-release": "Pass --max-grad-norm 0, or --no-gradient-release",
    "estimate gpt2 --compare --lora 8": "Drop --compare or --lora",
    "estimate gpt2 --compute-capability 8.6": "Pass --gpu-memory 4GiB --compute-capability 8.6",
    "measure none.py": "Call: hf-memopt measure train.py",
    "report missing": "Write it: hf-memopt plan MODEL --json > plan.json",
    "gpus quark": "List all: hf-memopt gpus",
}


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


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_an_error_fits_the_terminal_in_colours(columns: int, folder: Path) -> None:
    code, printed = on_terminal(["plan", "gpt2", "--gpu", "RTX-3065"], folder, columns)
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert code == 2
    assert "\x1b[1;31merror:\x1b[0m --gpu" in printed
    assert "\x1b[1;36mhint:\x1b[0m Did you mean 'RTX 3060 12GB'?" in printed
    assert max(map(len, plain.splitlines())) <= columns
    assert " ".join(plain.split()) == (
        "error: --gpu RTX-3065 is not a GPU of the table; expected one of its 162 names, which hf-memopt gpus lists, "
        "or a size hint: Did you mean 'RTX 3060 12GB'? Pass its size: --gpu 8GB"
    )


# ---- gpus


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_gpus_of_some_words_fit_a_terminal(columns: int, folder: Path) -> None:
    code, printed = on_terminal(["gpus", "rtx", "3060"], folder, columns)
    lines = [line.rstrip() for line in printed.splitlines()]
    assert (code, lines[:5]) == (
        0,
        [
            "GPU                 GiB usable bf16  sm TFLOP/s GB/s",
            "RTX 3060 Laptop 6GB   6   5.80  yes 8.6      22  336",
            "RTX 3060 8GB          8   7.75  yes 8.6      25  240",
            "RTX 3060 12GB        12  11.75  yes 8.6      25  360",
            "RTX 3060 Ti           8   7.75  yes 8.6      32  448",
        ],
    )
    assert max(map(len, lines)) <= columns


def test_all_gpus_are_listed_and_what_is_unknown_is_a_dash() -> None:
    lines = CliRunner().invoke(app, ["gpus"]).stdout.splitlines()
    assert len(lines) == 1 + 162 + 1
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 60
    [line] = [line.split() for line in lines if line.startswith("GTX 1650 Super")]
    assert line == ["GTX", "1650", "Super", "4", "3.81", "no", "7.5", "-", "192"]


def test_gpus_as_json() -> None:
    found = json.loads(CliRunner().invoke(app, ["gpus", "Laptop", "24gb", "--json"]).stdout)
    assert [gpu["name"] for gpu in found] == ["RTX 5090 Laptop"]
    assert (found[0]["memory_bytes"], found[0]["compute_capability"], found[0]["bf16"]) == (24 * 2**30, [12, 0], True)
