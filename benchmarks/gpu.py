"""Predicted against measured memory on a CUDA GPU: eight models in seven set-ups of the stock Trainer.

Each case runs in a process of its own (``gpu_case.py``): ``estimate`` on the meta device, then four real optimizer
steps of the very same configuration with random weights. A case that does not fit the GPU, crashes or hangs is a row
like any other. Cases are ordered so that the first few already cover models and set-ups; ``--minutes`` starts no case
that would not finish, and the next run goes on where this one stopped. Needs no installation of the package: torch,
transformers, accelerate and psutil are enough, and a case that needs more (bitsandbytes, peft) is skipped without it.

    python benchmarks/gpu.py [--minutes 8] [--only PATTERN] [--again] [--list] [--snapshot DIR] [--out FILE]
    python benchmarks/gpu.py ladder                     # the published ladders of ladders.py, on this GPU
    python benchmarks/gpu.py --device cpu --tiny        # the harness itself, on any machine; no figures of a GPU

Columns of the table: errors of the prediction in percent of what was measured, below zero for too little. "allocated"
and "reserved" are torch's peaks from the loading of the weights on; "total" is what the GPU holds for the process, its
context included; "forward" is by how much allocated bytes grow in a forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_figures import CASE, CRASH, MEASURED, OOM, SKIPPED, TIMEOUT, aims_of, latest, read_rows, spreads_of  # noqa: E402
from gpu_setups import Case, ladder_cases, ladder_row, missing_package, ordered_cases  # noqa: E402

from hf_memopt.units import format_bytes  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CASE_FILE = ROOT / "benchmarks" / "gpu_case.py"
STDERR_LINES = 6
QUANTITIES = ("allocated", "reserved", "total", "weights", "gradients", "optimizer state", "forward")

Figures = dict[str, Any]


# ---- What is left to do ---------------------------------------------------------------------------------------------


def source_hash() -> str:
    """Return a fingerprint of everything that a case's figures depend on here: unlike the commit it knows a changed
    tree from a clean one, and a changed README from a changed estimate.
    """
    from results_file import fingerprint

    files = sorted([*(ROOT / "hf_memopt").rglob("*.py"), *(ROOT / "benchmarks").glob("gpu_[cms]*.py")])
    return fingerprint(files, ROOT)


def key_of(figures: Figures) -> tuple[str, ...]:
    """Return what makes two rows the same measurement: case, GPU, source and versions."""
    versions = json.dumps(figures["versions"], sort_keys=True)
    return figures["name"], figures["gpu"], figures["source"], versions


def undone(cases: Iterable[Case], rows: Iterable[dict[str, Any]], common: Figures) -> list[Case]:
    """Return the cases without a row of this GPU, source and versions. One that was skipped is tried again."""
    done = {key_of(row["figures"]) for row in rows if row["figures"]["status"] != SKIPPED}
    return [case for case in cases if key_of({**common, "name": case.name}) not in done]


def expected_seconds(case: Case, rows: Iterable[dict[str, Any]], gpu: str) -> float:
    """Return how long a case will take: as long as on this GPU before, else start-up and a share by size."""
    known = [row["figures"] for row in rows if row["figures"]["gpu"] == gpu]
    seconds = [figures["wall_seconds"] for figures in known if figures["name"] == case.name]
    if seconds:
        return float(seconds[-1])
    if missing_package(case) is not None:
        return 5.0
    return 12.0 if case.tiny else 20.0 + 20.0 * case.shape.parameters / 1e9


@dataclass
class Clock:
    """The time that is left, and how the cases so far kept to what was expected of them."""

    minutes: float | None
    now: Callable[[], float] = time.monotonic
    ratios: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.now()

    @property
    def left_seconds(self) -> float:
        """Seconds until the end; infinite without one."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (self.now() - self.start)

    def corrected(self, expected: float) -> float:
        """Return the expected seconds, as this machine keeps them."""
        return expected * (median(self.ratios) if self.ratios else 1.0)

    def allows(self, expected: float) -> bool:
        """Tell whether a case would finish."""
        return self.corrected(expected) <= self.left_seconds


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


def run_case(case: Case, common: Figures, options: argparse.Namespace, timeout: float) -> Figures:
    """Return the row's figures of a case, whatever becomes of its process."""
    arguments = ["--case", json.dumps(case.as_dict()), "--machine", json.dumps(common)]
    if options.snapshot is not None:
        arguments += ["--snapshot", str(options.snapshot.resolve())]
    begin = time.monotonic()
    found, stderr, failure = run_child(arguments, timeout, options.device)
    figures: Figures = {**common, "name": case.name, **case.as_dict(), "status": CRASH, "predicted": None}
    figures |= {"measured": None, "errors": {}, **(found or {})}
    figures |= {"batch_size": case.batch_size, "seq_len": case.seq_len, "settings": vars(case.settings)}
    if failure == TIMEOUT:
        figures |= {"status": TIMEOUT, "reason": f"not done after {timeout:.0f} s"}
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
    parts = []
    for name in ("allocated", "reserved", "total"):
        if name in figures["errors"]:
            truth = figures["measured"]["device_bytes" if name == "total" else f"{name}_bytes"]
            parts.append(f"{name} {format_bytes(truth)} ({figures['errors'][name]:+.2f} %)")
    return ", ".join(parts)


# ---- Tables ---------------------------------------------------------------------------------------------------------


def print_tables(rows: list[Figures]) -> None:
    """Print errors by case, their statistics, and what was to be reached. Plain text: rich may be missing."""
    if not rows:
        return
    width = max(len(row["name"]) for row in rows)
    header = f"{'errors in %':<{width}}" + "".join(f"{name:>17}" for name in QUANTITIES) + f"{'s / step':>10}"
    print(f"\n{header}")
    for row in rows:
        if row["status"] != MEASURED or not row["predicted"]:
            print(f"{row['name']:<{width}}  {line_of(row)}")
            continue
        cells = [f"{row['errors'][name]:+.2f}" if name in row["errors"] else "-" for name in QUANTITIES]
        seconds = row["measured"]["step_seconds"]
        print(f"{row['name']:<{width}}" + "".join(f"{cell:>17}" for cell in cells) + f"{seconds:>10.3f}")
    spreads = spreads_of(rows)
    for title in ("median", "p95", "worst", "worst_under"):
        cells = [f"{getattr(spreads[name], title):.2f}" if name in spreads else "-" for name in QUANTITIES]
        print(f"{title.replace('_', ' '):<{width}}" + "".join(f"{cell:>17}" for cell in cells))
    _print_verdicts(rows)
    if any(row["gpu"] != "cpu" for row in rows):
        print()
        for aim in aims_of(rows):
            print(f"{'reached' if aim.reached else 'MISSED':<9}{aim.claim:<40}{aim.figure:>10}")


def print_ladder(cases: list[Case], rows: list[Figures]) -> None:
    """Print memory and time of ladders as published beside what this GPU measured, time against the first row."""
    by_name = {row["name"]: row for row in rows if row["status"] == MEASURED}
    print(f"\n{'':<40}{'GiB':>18}{'time, first row = 1':>22}\n{'':<40}" + 2 * f"{'published':>10}{'here':>10}")
    for case in cases:
        first = next(other for other in cases if other.model == case.model)
        published, row = ladder_row(case), by_name.get(case.name)
        cells = [f"{published.total_bytes / 2**30:.2f}", "-"]
        cells += [f"{published.seconds / ladder_row(first).seconds:.2f}", "-"]
        if row is not None:
            measured = row["measured"]
            cells[1] = f"{(measured['device_bytes'] or measured['allocated_bytes'] or 0) / 2**30:.2f}"
            if first.name in by_name:
                cells[3] = f"{measured['step_seconds'] / by_name[first.name]['measured']['step_seconds']:.2f}"
        print(f"{case.name:<40}" + "".join(f"{cell:>10}" for cell in cells))


def _print_verdicts(rows: list[Figures]) -> None:
    counts = {
        status: sum(row["status"] == status for row in rows) for status in (MEASURED, OOM, SKIPPED, CRASH, TIMEOUT)
    }
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
    foreseen = [row["predicted"]["fits"] is False for row in rows if row["status"] == OOM and row["predicted"]]
    if foreseen:
        print(f"out of memory, and the estimate said so: {sum(foreseen)} of {len(foreseen)}")


# ---- The program ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run what is left and fits the time, append a row each, print the table; return 1 if nothing could be run."""
    options = _options()
    every = ladder_cases(tiny=options.tiny) if options.what == "ladder" else ordered_cases(tiny=options.tiny)
    cases = [case for case in every if fnmatch(case.name.lower(), options.only.lower())]
    if not cases:
        print(f"only={options.only!r} matches no case; expected a pattern such as '*bf16*'. Call with --list.")
        return 1
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    machine, stderr, failure = run_child(["--probe"], 180, options.device)
    if machine is None or failure is not None:
        print(f"device={options.device!r} cannot be used here; expected a CUDA GPU, or --device cpu --tiny.\n{stderr}")
        return 1
    name = machine.pop("machine")
    out = options.out or RESULTS / f"{name}.jsonl"
    common = {**machine, "device": options.device, "source": source_hash()}
    rows = read_rows([out])
    left = cases if options.again else undone(cases, rows, common)
    print(f"{common['gpu']}: {len(cases)} cases, {len(cases) - len(left)} of them done, {len(left)} to run", flush=True)
    run_all(left, rows, common, options, out)
    wanted = {case.name for case in cases}
    table = [row["figures"] for row in latest(read_rows([out])) if row["figures"]["name"] in wanted]
    of_gpu = [figures for figures in table if figures["gpu"] == common["gpu"]]
    print_tables(of_gpu)
    if options.what == "ladder":
        print_ladder(cases, of_gpu)
    return int(not any(figures["status"] in (MEASURED, OOM) for figures in table))


def run_all(
    cases: list[Case], rows: list[dict[str, Any]], common: Figures, options: argparse.Namespace, out: Path
) -> None:
    """Run the cases that fit the time and append a row for each."""
    import results_file

    clock = Clock(options.minutes)
    seconds = {case: expected_seconds(case, rows, common["gpu"]) for case in cases}
    passed_over = 0
    for number, case in enumerate(cases, start=1):
        if not clock.allows(seconds[case]):
            passed_over += 1
            continue
        timeout = min(options.timeout, clock.left_seconds)
        figures = run_case(case, common, options, timeout)
        if figures["status"] == TIMEOUT and timeout < options.timeout:
            passed_over += 1
            print(f"[{number:>2}/{len(cases)}] {case.name}: cut off at the end of the minutes, no row", flush=True)
            continue
        results_file.append(CASE, figures, path=out)
        if figures["status"] != SKIPPED:
            clock.ratios.append(figures["wall_seconds"] / seconds[case])
        rest = clock.corrected(sum(seconds[other] for other in cases[number:]))
        took = f"{figures['wall_seconds']:.0f} s, about {rest / 60:.0f} min for the rest"
        print(f"[{number:>2}/{len(cases)}] {case.name}: {line_of(figures)}; {took}", flush=True)
    print(f"rows in {out}")
    if passed_over:
        print(f"{passed_over} cases did not fit into {options.minutes:g} minutes; call again to go on")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="?", choices=("models", "ladder"), default="models", help="the published ladders instead"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes of the same architectures")
    parser.add_argument("--minutes", type=float, default=None, metavar="N", help="start no case that would end later")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name, such as 'BERT-large*'")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, in their order")
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one case")
    parser.add_argument("--snapshot", type=Path, default=None, metavar="DIR", help="memory snapshots of missed aims")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="append the rows to another file")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs tiny shapes only. Call with --device cpu --tiny.")
    if options.device == "cpu" and options.snapshot:
        parser.error("--snapshot needs a CUDA GPU. Leave it out.")
    return options


if __name__ == "__main__":
    sys.exit(main())
