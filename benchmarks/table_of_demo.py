"""The parts of README.md and docs/ about the demo, and about the training that a notebook rescues.

python benchmarks/table_of_demo.py  # runs the demo, and stores its figures
"""

from __future__ import annotations

import io
import json
import tempfile
from typing import Any

import demo_task  # the path of the demo
import results_file
from results_file import MACHINE

FILE = "demo-cpu-2core.json"


def demo_results() -> str:
    """Return what the demo printed, with what it ran on."""
    from outcomes import print_results
    from rich.console import Console

    printed = io.StringIO()
    print_results(_figures(), Console(file=printed, width=100, record=False))
    lines = ["```text", *(line.rstrip() for line in printed.getvalue().splitlines()), "```"]
    return "\n".join([*lines, "", f"On {MACHINE}; {_versions()}."])


def _figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results_file.RESULTS / FILE).read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Run the demo and store its figures."""
    from outcomes import run_demo

    with tempfile.TemporaryDirectory() as folder:
        figures = {**run_demo(folder), "versions": demo_task.versions()}
    (results_file.RESULTS / FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in _figures()["versions"].items() if name != "device")


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


if __name__ == "__main__":
    main()
