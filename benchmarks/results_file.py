"""The rows of benchmarks: a run appends one to ``benchmarks/results/<machine>.jsonl`` (case, figures, versions, commit,
date), and README's tables are made of the last ones.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hf_memopt

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "datasets")
PEERS = ("lhotse", "trl", "peft")  # written only where they are installed
MACHINE = "2 CPU cores without an accelerator"  # of the rows that README shows


def machine() -> str:
    """Return the GPU's name as a file name, or ``cpu-<physical cores>core`` without an accelerator."""
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif torch.xpu.is_available():
        name = torch.xpu.get_device_name()
    elif torch.backends.mps.is_available():
        name = f"apple-{platform.machine()}-mps"
    else:
        import psutil  # not on every machine with a GPU

        name = f"cpu-{psutil.cpu_count(logical=False) or psutil.cpu_count()}core"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def row_of(case: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a run."""
    return {
        "case": case,
        "figures": figures,
        "versions": installed_versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def append(case: str, figures: dict[str, Any], *, path: Path | None = None) -> Path:
    """Append a row and return the file; ``path`` is another file than that of this machine."""
    target = path or RESULTS / f"{machine()}.jsonl"
    line = json.dumps(row_of(case, figures), allow_nan=False)
    with target.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return target


def show(case: str, figures: dict[str, Any], table: str) -> None:
    """Print the table of a run and append its row."""
    print(table)
    print(f"appended to {append(case, figures)}")


def last_row(case: str, *, program: str | None = None) -> dict[str, Any]:
    """Return the latest row of a case; ``program`` is the file that makes it, where its name is another one."""
    rows = [
        json.loads(line) for file in sorted(RESULTS.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()
    ]
    found = [row for row in rows if row["case"] == case]
    if not found:
        raise SystemExit(
            f"benchmarks/results has no row of the case {case!r}; run benchmarks/{program or case}.py first"
        )
    return max(found, key=lambda row: row["date"])


def versions_of(row: dict[str, Any], *packages: str) -> str:
    """Return the versions of packages, of those that the row has."""
    return ", ".join(f"{name} {row['versions'][name]}" for name in packages if name in row["versions"])


NUMBER = re.compile(r"[*`]*[-+<~]?\d[\d.,]*( ?(%|x|s|ms|[KMG]iB|[MB]|GB|tokens))?[*`]*|-|")


def markdown(head: str, rows: Iterable[Sequence[str] | str], *notes: str) -> str:
    """Return a table: its first line, rows as cells or whole lines, what stands below it; numbers to the right."""
    lines = [row if isinstance(row, str) else f"| {' | '.join(row)} |" for row in rows]
    columns = zip(*(line.strip().strip("|").split("|") for line in lines), strict=False)
    found = [all(NUMBER.fullmatch(cell.strip()) for cell in column) for column in columns] or [False]
    count = head.count("|") - 1
    marks = "".join("---:|" if place < len(found) and found[place] else "---|" for place in range(count))
    return "\n".join([head, f"|{marks}", *lines, *(line for note in notes for line in ("", note))])


def installed_versions() -> dict[str, str]:
    """Return the versions of what is installed, and that of the code of this package."""
    found = {"python": platform.python_version(), "hf-memopt": hf_memopt.__version__}
    for package in (*PACKAGES, *PEERS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit that was measured; None outside a repository.

    It ends in ``-dirty`` if the tree differs from it, but for the rows that benchmarks append.
    """
    git = ["git", "-C", str(RESULTS.parent.parent)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results"], check=False)
    return found.stdout.strip() + ("-dirty" if changed.returncode else "")
