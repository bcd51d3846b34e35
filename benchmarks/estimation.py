"""How long an estimate takes, with what host memory: python benchmarks/estimation.py

Each case in a fresh process, five estimates of which none finds anything in the cache; then one that does, for another
optimizer. The imports are not timed. Host memory is the peak of the process above what it held after the imports and,
where a module with weights is given, after that was built.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from fresh_process import in_fresh_process
from results_file import MACHINE, markdown, show

BERT: dict[str, Any] = {"model": "bert-large-uncased", "batch_size": 32, "seq_len": 128}
CASES: dict[str, dict[str, Any]] = {
    "BERT-large 32 x 128": BERT,
    "BERT-large 32 x 128, checkpointing": {**BERT, "checkpointing": True},
    "BERT-large 32 x 128, a module with weights": {**BERT, "weights": True},
    "Llama-3.2-3B 2 x 512, checkpointing": {
        "model": "Llama-3.2-3B",
        "batch_size": 2,
        "seq_len": 512,
        "checkpointing": True,
    },
    "Llama-3.1-8B 2 x 512": {"model": "Llama-3.1-8B", "batch_size": 2, "seq_len": 512},
}
REPEATS = 5


def measure(model: Any, weights: bool = False, **settings: Any) -> dict[str, Any]:
    """Time the estimates of one case in this process."""
    from hf_memopt.prediction.memory import estimate
    from hf_memopt.prediction.memory.models import load_model
    from hf_memopt.prediction.memory.recording.sessions import Session
    from hf_memopt.training.devices.readings import read_process

    load_model("bert-base-uncased")  # transformers imports a model's code when it is first built
    type_of = load_model(model).model
    given = type(type_of)(type_of.config) if weights else model
    del type_of
    before = read_process()[0]
    settings = {"gpu": "RTX 3060 12GB", "precision": "bf16", **settings}
    seconds = []
    for _ in range(REPEATS):
        Session.traces.clear()
        started = time.perf_counter()
        estimate(given, **settings)
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    estimate(given, **settings, optim="adamw_8bit")
    again = time.perf_counter() - started
    peak = read_process()[1] or read_process()[0]
    return {"seconds": statistics.median(seconds), "again_seconds": again, "host_bytes": max(peak - before, 0)}


def table(figures: dict[str, Any]) -> str:
    """Return the time and host memory of estimates."""
    rows = [
        (name, *(f"{found[key]:.2f} s" for key in ("seconds", "again_seconds")), _mib(found["host_bytes"]) + " MiB")
        for name, found in figures.items()
    ]
    note = f"On {MACHINE}, after the imports (`python benchmarks/estimation.py`)."
    return markdown("| estimate | median of 5 | again, another optimizer | host memory |", rows, note)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f}"


def main() -> None:
    """Run the cases, print the tables, append the rows."""
    figures = {name: in_fresh_process(measure, **case) for name, case in CASES.items()}
    show("estimation", figures, table(figures))


if __name__ == "__main__":
    main()
