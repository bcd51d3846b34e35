"""The parts of README.md and docs/ about the demo, and about the training that a notebook rescues."""

from __future__ import annotations

import io
import json
from typing import Any

import results_file
from results_file import MACHINE


def demo_table() -> str:
    """Return the table that the demo printed, with what it ran on."""
    from rich.console import Console

    from hf_memopt.demo.run import print_results

    figures, versions_of = _demo()
    printed = io.StringIO()
    print_results(figures, Console(file=printed, width=100, record=False))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    versions = ", ".join(f"{name} {version}" for name, version in versions_of.items() if name != "device")
    return "\n".join(["```text", *lines, "```", "", f"On {MACHINE}; {versions}."])


def demo_sentence() -> str:
    """Return the one measured sentence."""
    figures, _ = _demo()
    naive, stock, ours, saver = (figures[name] for name in ("baseline", "stock_best", "memopt", "memory_saver"))
    speed, peak = "examples_per_second", "measured_peak_bytes"
    return (
        f'**Fine-tuning a small BERT on real text, `recipe("auto")` trains {ours[speed] / stock[speed]:.2f}x as fast '
        f"as the stock Hugging Face `Trainer` at its best (accuracy {ours['accuracy']:.3f} against "
        f"{stock['accuracy']:.3f}) and {ours[speed] / naive[speed]:.1f}x as fast as a naive set-up "
        f"({naive['accuracy']:.3f}); the 4 GB preset needs {saver[peak] / stock[peak]:.2f}x the peak memory of stock "
        f"at its best, on {MACHINE}** (`make demo`)."
    )


def _demo() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of the set-ups and the versions they were taken with."""
    report = json.loads((results_file.RESULTS / "demo-cpu-2core.json").read_text(encoding="utf-8"))
    versions = report.pop("versions")
    return report, versions


def rescue_log() -> str:
    """Return the notices of a rescued training, from the stored outputs of ``notebooks/from_oom_to_trained.ipynb``."""
    notebook = results_file.RESULTS.parents[1] / "notebooks" / "from_oom_to_trained.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    rescued = [cell for cell in cells if "MicrobatchCallback()" in "".join(cell["source"])]
    printed = "".join("".join(shown.get("text", ())) for cell in rescued for shown in cell["outputs"])
    notices = [line for line in printed.splitlines() if line.startswith("[memopt] ")]
    if not notices:
        raise SystemExit(f"{notebook.name} shows no notice; run: python notebooks/execute.py {notebook.stem}")
    return "\n".join(["```text", *notices, "```"])
