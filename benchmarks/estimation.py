"""How long an estimate takes, with what host memory, and the set-ups compared in docs/: python benchmarks/estimation.py

Each case in a fresh process, five estimates of which none finds anything in the cache; then one that does, for another
optimizer. The time of the imports is apart. Host memory is the peak of the process above what it held after the imports
and, where a module with weights is given, after that was built.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "BERT-large 32 x 128": {"model": "bert-large-uncased", "batch_size": 32, "seq_len": 128},
    "BERT-large 32 x 128, checkpointing": {
        "model": "bert-large-uncased",
        "batch_size": 32,
        "seq_len": 128,
        "checkpointing": True,
    },
    "BERT-large 32 x 128, a module with weights": {
        "model": "bert-large-uncased",
        "batch_size": 32,
        "seq_len": 128,
        "weights": True,
    },
    "Llama-3.2-3B 2 x 512, checkpointing": {
        "model": "Llama-3.2-3B",
        "batch_size": 2,
        "seq_len": 512,
        "checkpointing": True,
    },
    "Llama-3.1-8B 2 x 512": {"model": "Llama-3.1-8B", "batch_size": 2, "seq_len": 512},
}
REPEATS = 5
COMPARISON: dict[str, Any] = {"model": "chinese-macbert-large", "examples": 32, "seq_len": 128, "gpu": "RTX 3050 4GB"}


def measure(model: Any, weights: bool = False, **settings: Any) -> dict[str, Any]:
    """Time the estimates of one case in this process."""
    started = time.perf_counter()
    from hf_memopt.devices.memory_reading import read_process
    from hf_memopt.memory.estimation import estimate
    from hf_memopt.memory.models.loading import load_model
    from hf_memopt.memory.recording.session import forget_traces

    load_model("bert-base-uncased")  # transformers imports a model's code when it is first built
    type_of = load_model(model).model
    imports = time.perf_counter() - started
    given = type(type_of)(type_of.config) if weights else model
    del type_of
    before = read_process()[0]
    settings = {"gpu": "RTX 3060 12GB", "precision": "bf16", **settings}
    seconds = []
    for _ in range(REPEATS):
        forget_traces()
        started = time.perf_counter()
        found = estimate(given, **settings)
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    estimate(given, **settings, optim="adamw_8bit")
    again = time.perf_counter() - started
    peak = read_process()[1] or read_process()[0]
    return {
        "seconds": statistics.median(seconds),
        "slowest_seconds": max(seconds),
        "again_seconds": again,
        "imports_seconds": imports,
        "host_bytes": max(peak - before, 0),
        "events": len(found.timeline.reserved),
    }


def compared_figures() -> dict[str, Any]:
    """Estimate the set-ups of ``hf-memopt estimate --compare`` for docs/ in this process."""
    from hf_memopt.cli.compared_set_ups import compare
    from hf_memopt.devices.gpus import find_gpu

    gpu = find_gpu(COMPARISON["gpu"])
    started = time.perf_counter()
    rows = [row.as_dict() for row in compare(**{**COMPARISON, "gpu": gpu})]
    seconds = time.perf_counter() - started
    kept = ("components", "peak_allocated_bytes", "peak_reserved_bytes", "total_bytes", "fits")
    for row in rows:
        row["estimate"] = row["estimate"] and {name: row["estimate"][name] for name in kept}
    return {
        **COMPARISON,
        "usable_bytes": gpu.usable_bytes,
        "context_bytes": gpu.context_bytes,
        "seconds": seconds,
        "rows": rows,
    }


def main() -> int:
    """Run the cases, print a table, append the figures to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="one case in this process, as JSON on standard output")
    case = parser.parse_args().case
    if case is not None:
        print(json.dumps(compared_figures() if case == "comparison" else measure(**CASES[case])))
        return 0
    from results_file import append

    from hf_memopt.units import format_bytes

    figures = {}
    print(f"{'case':<46}{'median of 5':>12}{'slowest':>10}{'again':>10}{'host memory':>14}")
    for name in CASES:
        figures[name] = found = _in_a_fresh_process(name)
        times = f"{found['seconds']:>10.2f} s{found['slowest_seconds']:>8.2f} s{found['again_seconds']:>8.2f} s"
        print(f"{name:<46}{times}{format_bytes(found['host_bytes']):>14}", flush=True)
    append("estimation", figures)
    compared = _in_a_fresh_process("comparison")
    print(f"{len(compared['rows'])} set-ups of {COMPARISON['model']} compared in {compared['seconds']:.2f} s")
    append("estimation_comparison", compared)
    return 0


def _in_a_fresh_process(case: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--case", case], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    raise SystemExit(main())
