"""Do what needs no network with all sockets refused; print who was asked for. A program of ``test_no_network.py``."""

from __future__ import annotations

import json
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

folder = Path(sys.argv[1])
asked: list[str] = []


def refuse(*arguments: Any, **_: Any) -> Any:
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[-6:-1]]
    asked.append(f"{arguments[-2:]} from {frames}")
    raise OSError("no network")


socket.socket.connect = socket.socket.connect_ex = refuse  # type: ignore[method-assign,assignment]
socket.getaddrinfo = socket.create_connection = socket.gethostbyname = refuse  # type: ignore[assignment]

sys.path[:0] = [str(Path(__file__).parents[1])]


def command(*arguments: str) -> None:
    """Run the command line; what it prints is not looked at."""
    from typer.testing import CliRunner

    from hf_memopt.cli.app import app

    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code in (0, 1), (arguments, done.output[-500:], done.stderr[-500:])


def look() -> None:
    import hf_memopt

    assert hf_memopt.__version__
    command("doctor")
    command("presets")
    command("presets", "auto")
    command("presets", "4gb-gpu", "--json")


def estimates() -> None:
    from hf_memopt import estimate
    from hf_memopt.gpus import find_gpu

    command("estimate", "--list-models")
    command("estimate", "bert-base-uncased", "--batch-size", "1", "--seq-len", "16", "--gpu", "T4")
    command("estimate", "gpt2", "--batch-size", "1", "--seq-len", "16", "--preset", "4gb-gpu", "--json")
    estimate("Qwen/Qwen2.5-0.5B-Instruct", batch_size=1, seq_len=16, gpu=find_gpu("T4"), lora=4, load_in="nf4")


def plans_and_reports() -> None:
    from tiny_plans import fitting_plan

    import tiny

    found = fitting_plan()
    found.write(folder / "run")
    (folder / "plan.json").write_text(found.to_json(figures=True))
    command("report", str(folder / "plan.json"))
    tiny.llama_config().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 8)
    command("lengths", str(folder / "rows.jsonl"))
    options = ("--gpu", "T4", "--data", str(folder / "rows.jsonl"), "--effective-batch", "1", "--method", "full")
    command("plan", str(folder / "model"), *options, "--write", str(folder / "written"))


def trainings() -> None:
    from technique_table import GROUPS, run

    for number, names in enumerate(list(GROUPS.values())[:4]):
        compatible = [name for name in GROUPS_OF_LISTS[number] if name in names]
        run(compatible, folder / f"train-{number}", max_steps=1, max_grad_norm=0.0, save_strategy="steps", save_steps=1)


GROUPS_OF_LISTS = (
    ("length buckets", "freezing", "micro-batching", "memory report", "sharded checkpoints", "precision"),
    ("32-bit embeddings", "evaluation guard", "checkpointing policy", "non-finite detection"),
    ("gradient release", "16-bit weights"),
    ("sparse tied embedding",),
)

for part in (look, estimates, plans_and_reports, trainings):
    part()
print("asked:" + json.dumps(asked))
