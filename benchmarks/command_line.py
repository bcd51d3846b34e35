"""What each command costs from start to end: python benchmarks/command_line.py

CPU seconds of a fresh process, system time included, as the median of five runs that take turns with a process that
only imports torch; the ratio to that process carries over to other machines. Wall seconds matter where a network is
missing: the hub of the last case refuses every connection. A first run of each command, which may compile byte code,
is not counted.
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

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 5
BASELINE = "python -c 'import torch'"
LIMITS_SECONDS = {"doctor": 4.0, "estimate bert-large-uncased --seq-len 128 --gpu T4": 6.0}
OTHERS_LIMIT_SECONDS = 1.0
COMMANDS: dict[str, int] = {  # the exit code of each
    "--help": 0,
    "presets": 0,
    "presets 4gb-gpu": 0,
    "presets 9gb": 2,
    "estimate --list-models": 0,
    "estimate bert-larg --seq-len 128": 2,
    "estimate gpt2 --seq-len 128 --gpu RTX-9999": 2,
    "estimate gpt2 --seq-len 128 --preset 9gb": 2,
    "estimate gpt2 --seq-len 128 --optim adamm": 2,
    "estimate gpt2 --seq-len 128 --precision fp17": 2,
    "estimate gpt2 --seq-len 128 --plot timeline.svg": 2,
    "estimate gpt2 --seq-len 1000001": 2,
    "doctor": 0,
    "estimate bert-large-uncased --seq-len 128 --gpu T4": 0,
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


def measure(command: list[str], folder: str, exit_code: int) -> dict[str, float]:
    """Return the medians of a command, and its ratio to runs of the baseline in between."""
    run_once(command, folder, exit_code)
    runs = []
    for _ in range(REPEATS):
        torch_seconds, _ = run_once([sys.executable, "-c", "import torch"], folder)
        runs.append((*run_once(command, folder, exit_code), torch_seconds))
    cpu, wall, torch_cpu = (statistics.median(column) for column in zip(*runs, strict=True))
    ratio = statistics.median(seconds / base for seconds, _, base in runs)
    return {"cpu_seconds": cpu, "wall_seconds": wall, "torch_ratio": ratio, "torch_cpu_seconds": torch_cpu}


def main() -> int:
    """Run the commands, print a table, append the figures to the results."""
    from results_file import append

    figures = {}
    print(f"{'hf-memopt ...':<52}{'CPU':>8}{'limit':>8}{'wall':>8}{'of ' + BASELINE:>29}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "texts.csv").write_text("text\n" + "some words of a text\n" * 1000, encoding="utf-8")
        for arguments, exit_code in COMMANDS.items():
            command = [sys.executable, "-m", "hf_memopt", *arguments.split()]
            figures[arguments] = found = measure(command, folder, exit_code)
            limit = LIMITS_SECONDS.get(arguments, OTHERS_LIMIT_SECONDS)
            times = f"{found['cpu_seconds']:>6.2f} s{limit:>6.1f} s{found['wall_seconds']:>6.2f} s"
            print(f"{arguments:<52}{times}{found['torch_ratio']:>28.2f}x", flush=True)
    append("command_line", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
