"""Predicted against measured memory on a CUDA GPU: eight models in seven set-ups of the stock Trainer.

Each case runs in a process of its own (``gpu_case.py``): ``estimate`` on the meta device, then four real optimizer
steps of the very same configuration with random weights. A case that does not fit the GPU, crashes or hangs is a row
like any other. Cases are ordered so that the first few already cover models and set-ups, and a run goes on where the
last one was stopped. Needs no installation of the package: torch, transformers, accelerate and psutil are enough, and a
case that needs more (bitsandbytes, peft) is skipped without it.

    python benchmarks/gpu.py [--only PATTERN] [--again] [--out FILE]
    python benchmarks/gpu.py --device cpu --tiny        # the harness itself, on any machine; no figures of a GPU

Errors of the prediction are in percent of what was measured, below zero for too little. "allocated" and "reserved" are
torch's peaks from the loading of the weights on; "total" is what the GPU holds for the process, its context included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import results_file  # noqa: E402
from gpu_figures import CASE, CRASH, MEASURED, OOM, SKIPPED, TIMEOUT, errors_table, latest, read_rows  # noqa: E402
from gpu_setups import Case, ordered_cases  # noqa: E402

from hf_memopt.units import format_bytes  # noqa: E402

CASE_FILE = ROOT / "benchmarks" / "gpu_case.py"
STDERR_LINES = 6

Figures = dict[str, Any]


# ---- What is left to do ---------------------------------------------------------------------------------------------


def undone(cases: Iterable[Case], rows: Iterable[dict[str, Any]], common: Figures) -> list[Case]:
    """Return the cases without a row of this GPU, commit and versions. One that was skipped is tried again."""
    done = [row["figures"] for row in rows if row["figures"]["status"] != SKIPPED]
    names = {figures["name"] for figures in done if common.items() <= figures.items()}
    return [case for case in cases if case.name not in names]


# ---- One case -------------------------------------------------------------------------------------------------------


def run_child(arguments: list[str], timeout: float, device: str) -> tuple[Figures | None, str, str | None]:
    """Run ``gpu_case.py`` and return what it wrote (None for nothing), the end of its stderr, and how it failed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one GPU: stock would use DataParallel
    environment["CUDA_VISIBLE_DEVICES"] = visible if device == "cuda" else ""
    failure = None
    with tempfile.TemporaryDirectory() as folder:
        out, stderr = Path(folder) / "figures.json", Path(folder) / "stderr"
        command = [sys.executable, str(CASE_FILE), "--device", device, "--out", str(out), *arguments]
        with stderr.open("wb") as log:
            try:
                # a file, not a pipe: a grandchild that lives on must not keep this process waiting
                done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=timeout)
                if done.returncode:
                    failure = f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                failure = TIMEOUT
        lines = stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        figures = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    return figures, "\n".join(lines[-STDERR_LINES:]), failure


def run_case(case: Case, common: Figures, options: argparse.Namespace) -> Figures:
    """Return the row's figures of a case, whatever becomes of its process."""
    arguments = ["--case", json.dumps(case.as_dict()), "--machine", json.dumps(common)]
    begin = time.monotonic()
    found, stderr, failure = run_child(arguments, options.timeout, options.device)
    figures: Figures = {**common, "name": case.name, **case.as_dict(), "status": CRASH, "predicted": None}
    figures |= {"measured": None, "errors": {}, **(found or {})}
    figures |= {"batch_size": case.batch_size, "seq_len": case.seq_len, "settings": vars(case.settings)}
    if failure == TIMEOUT:
        figures |= {"status": TIMEOUT, "reason": f"not done after {options.timeout:.0f} s"}
    elif failure is not None:
        figures |= {"status": CRASH, "reason": f"{failure}\n{stderr}"}
    return {**figures, "wall_seconds": round(time.monotonic() - begin, 1)}


def line_of(figures: Figures) -> str:
    """Return what became of a case, in one line."""
    if figures["status"] != MEASURED:
        reason = figures.get("reason", "").strip().splitlines()
        predicted = figures["predicted"]
        said = f"; predicted {format_bytes(predicted['reserved_bytes'])} reserved" if predicted else ""
        return f"{figures['status']}: {reason[-1] if reason else 'no reason given'}{said}"
    if not figures["predicted"]:
        measured = format_bytes(figures["measured"]["allocated_bytes"])
        return f"measured {measured} allocated, {figures.get('reason', 'not predicted')}"
    errors = ", ".join(f"{name} {error:+.2f} %" for name, error in figures["errors"].items())
    return f"{errors}, {figures['measured']['step_seconds']:.3f} s a step"


# ---- The program ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is left, append a row each, print the table; return 1 if nothing could be run."""
    options = _options()
    every = ordered_cases(tiny=options.tiny)
    cases = [case for case in every if fnmatch(case.name.lower(), options.only.lower())]
    if not cases:
        names = ", ".join(case.name for case in every)
        print(f"only={options.only!r} matches no case; expected a pattern such as '*bf16*' for one of {names}")
        return 1
    machine, stderr, failure = run_child(["--probe"], 180, options.device)
    if machine is None or failure is not None:
        print(f"device={options.device!r} cannot be used here; expected a CUDA GPU, or --device cpu --tiny.\n{stderr}")
        return 1
    name = machine.pop("machine")
    out = options.out or results_file.RESULTS / f"{name}.jsonl"
    common = {**machine, "device": options.device, "commit": results_file.commit()}
    left = cases if options.again else undone(cases, read_rows([out]), common)
    print(f"{common['gpu']}: {len(cases)} cases, {len(cases) - len(left)} of them done, {len(left)} to run", flush=True)
    run_all(left, common, options, out)
    wanted = {case.name for case in cases}
    rows = [row for row in latest(read_rows([out])) if row["figures"]["name"] in wanted]
    print(errors_table([row for row in rows if row["figures"]["gpu"] == common["gpu"]]))
    return int(not any(row["figures"]["status"] in (MEASURED, OOM) for row in rows))


def run_all(cases: list[Case], common: Figures, options: argparse.Namespace, out: Path) -> None:
    """Run the cases and append a row for each."""
    for number, case in enumerate(cases, start=1):
        figures = run_case(case, common, options)
        results_file.append(CASE, figures, path=out)
        took = f"{figures['wall_seconds']:.0f} s"
        print(f"[{number:>2}/{len(cases)}] {case.name}: {line_of(figures)}; {took}", flush=True)
    print(f"rows in {out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes of the same architectures")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name, such as 'BERT-large*'")
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one case")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="append the rows to another file")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs tiny shapes only. Call with --device cpu --tiny.")
    return options


if __name__ == "__main__":
    sys.exit(main())
