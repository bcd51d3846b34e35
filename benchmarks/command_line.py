"""What each command costs from start to end: python benchmarks/command_line.py

CPU seconds of a fresh process, system time included: the median of five rounds, each of which also runs a process that
only imports torch. The ratio to that process carries over to other machines. Wall seconds matter where a network is
missing, as the hub of the last case refuses every connection. A first round, which may compile byte code, is not
counted.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results_file import markdown, show

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5
COMMANDS: dict[str, int] = {  # the exit code of each
    "--help": 0,
    "presets": 0,
    "presets 4gb-gpu": 0,
    "estimate --list-models": 0,
    "estimate bert-larg --seq-len 128": 2,
    "estimate gpt2 --seq-len 128 --gpu RTX-9999": 2,
    "estimate gpt2 --seq-len 128 --preset 9gb": 2,
    "estimate gpt2 --seq-len 128 --optim adamm": 2,
    "estimate gpt2 --seq-len 128 --plot timeline.gif": 2,
    "doctor": 0,
    "estimate bert-large-uncased --seq-len 128 --gpu T4": 0,
    "plan bert-large-uncased --gpu RTX-4060": 0,
    "plan meta-llama/Llama-3.1-8B --gpu RTX-4090": 0,
    "lengths texts.csv": 0,
    "lengths texts.csv --tokenizer nobody/none": 2,
}


def environment() -> dict[str, str]:
    """Return the environment of the commands: offline, but for a hub that refuses connections."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    kept.pop("HF_HUB_OFFLINE", None)
    return {**kept, "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


def run_once(command: list[str], folder: str, exit_code: int = 0) -> tuple[float, float]:
    """Run a command and return its CPU seconds and its wall seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment())
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != exit_code:
        raise RuntimeError(f"{command} ended with {done.returncode}; expected {exit_code}. {done.stderr}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall


def measure(commands: dict[str, int], folder: str) -> dict[str, dict[str, float]]:
    """Return the medians of each command over the rounds, and of its ratio to ``import torch`` of the same round."""
    runs: dict[str, list[tuple[float, float, float]]] = {arguments: [] for arguments in commands}
    for round_number in range(REPEATS + 1):
        torch_seconds, _ = run_once([sys.executable, "-c", "import torch"], folder)
        for arguments, exit_code in commands.items():
            command = [sys.executable, "-m", "hf_memopt", *arguments.split()]
            cpu_seconds, wall_seconds = run_once(command, folder, exit_code)
            if round_number > 0:
                runs[arguments].append((cpu_seconds, wall_seconds, cpu_seconds / torch_seconds))
    names = ("cpu_seconds", "wall_seconds", "torch_ratio")
    return {
        arguments: dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))
        for arguments, rows in runs.items()
    }


def table(figures: dict[str, dict[str, float]]) -> str:
    """Return the costs of each command."""
    rows = [
        (
            f"`{arguments}`",
            f"{found['cpu_seconds']:.2f} s",
            f"{found['wall_seconds']:.2f} s",
            f"{found['torch_ratio']:.2f}x",
        )
        for arguments, found in figures.items()
    ]
    return markdown("| hf-memopt ... | CPU | wall | CPU of import torch |", rows)


def main() -> None:
    """Run the commands, print the table, append the row."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "texts.csv").write_text("text\n" + "some words of a text\n" * 1000, encoding="utf-8")
        figures = measure(COMMANDS, folder)
    show("command_line", figures, table(figures))


if __name__ == "__main__":
    main()
