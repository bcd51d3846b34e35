"""The estimate against torch's own CUDA allocator, on a GPU without silicon: python benchmarks/judge.py

The stock ``Trainer`` trains each set-up of ``judge_set_ups.json`` for three steps on the GPU of a rehearsal, where
torch's CUDA code allocates. Its peaks go to ``results/judge-<torch's version>.jsonl``, and a run goes on where it
stopped. Then all are estimated. It needs a CUDA build of torch, and no GPU.

python benchmarks/judge.py --stored                    # estimates alone, beside the stored peaks of the newest torch
python benchmarks/judge.py --row "BERT fp32"           # one row anew
python benchmarks/judge.py --row "BERT fp32" --events  # its allocations one by one, and the first that differ
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from judge_events import compare_events
from judge_rows import GPUS, SET_UPS, Row, estimate_row
from results_file import RESULTS, append, markdown, show

from hf_memopt.units import format_bytes, percent

BOUNDS = {"allocated_bytes": 0.001, "reserved_bytes": 0.005}
_APART = "name family model task batch_size seq_len labels_length weights_dtype tile_tokens precision lora adapters"
_APART += " prepare load_in eval_batch_size eval_batches max_grad_norm target_modules"  # of no group in the table


def rehearse(name: str, *events: Path) -> Row:
    """Run the real side of a row in another process, and return its figures or its error."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        gpu, real = GPUS[SET_UPS[name]["capability"]], Path(__file__).with_name("judge_real.py")
        stand_in = [sys.executable, "-m", "hf_memopt.prediction.rehearsal", "--gpu", gpu, "--"]
        command = [*stand_in, sys.executable, "-W", "ignore", real, name, result, *events]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if "tile_tokens" in SET_UPS[name]:
            environment["HF_MEMOPT_GPU_VALUES"] = str(25 * 2**19)  # bytes: tiles compare theirs with the whole at first
        done = subprocess.run(
            [*map(str, command)], env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        if not result.exists():
            return {"error": done.stderr[-2000:]}
        figures: Row = json.loads(result.read_text(encoding="utf-8"))
        return figures


def stored_peaks(torch_version: str = "*") -> dict[str, Row]:
    """Return the stored figures by row, the latest of each, of the newest torch unless one is given."""
    files = sorted(RESULTS.glob(f"judge-{torch_version}.jsonl"))
    rows = [json.loads(line) for file in files[-1:] for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["case"]: row["figures"] for row in rows}


def compared(name: str, real: Row) -> Row:
    """Return the peaks of both sides, of a row that ran."""
    found = None if "error" in real else estimate_row(SET_UPS[name])
    peaks = {} if found is None else {what: getattr(found, f"peak_{what}") for what in BOUNDS}
    return {"name": name, "real": real, "estimated": peaks}


def error_of(row: Row, what: str) -> float:
    """Return estimated / real - 1."""
    return float(row["estimated"][what] / row["real"][what] - 1)


def both_sides(rows: Sequence[Row]) -> str:
    """Return the peaks of all rows in MiB."""
    lines = []
    for row in rows:
        cells = [row["name"], row["real"].get("phase", "did not run")]
        for what in row["estimated"]:
            cells += [f"{row[side][what] / 2**20:,.2f}" for side in ("real", "estimated")]
            cells.append(f"{100 * error_of(row, what):+.3f}")
        lines.append(cells)
    return markdown("| set-up | peak in | allocated, MiB | estimated | % | reserved, MiB | estimated | % |", lines)


def settings_of(row: Row) -> Iterator[str]:
    """Yield what a row counts among in the table: its method, and what it sets."""
    method = "QLoRA" if "load_in" in row else "LoRA"
    by = {"peft": "PEFT", "ours": "hf_memopt"}
    yield f"{method} by {by[row['adapters']]}" if "lora" in row else f"full, {row['precision']}"
    for field, value in row.items():
        if field not in _APART.split():
            yield f"`{field}={value}`" if isinstance(value, str) or value is False else f"`{field}`"


def table(figures: Mapping[str, Any]) -> str:
    """Return the errors by family and by setting."""
    ran = [row for row in figures["rows"] if row["estimated"]]
    groups: dict[str, list[Row]] = {"all": ran}
    for names_of in (lambda row: [row["family"]], settings_of):
        for row in ran:
            for name in names_of(SET_UPS[row["name"]]):
                groups.setdefault(name, []).append(row)
    lines = []
    for group, rows in groups.items():
        errors = [[100 * abs(error_of(row, what)) for row in rows] for what in BOUNDS]
        lines.append((group, str(len(rows)), *(f"{f(one):.3f}" for one in errors for f in (max, statistics.median))))
    seconds, disk, host = ([row["real"][what] for row in ran] for what in ("seconds", "disk_bytes", "host_bytes"))
    note = (
        f"Errors without sign, in percent of torch's own peak. {len(ran)} of {len(figures['rows'])} set-ups ran, in "
        f"{sum(seconds) / 60:.0f} minutes, with at most {format_bytes(max(disk))} of disk and "
        f"{format_bytes(max(host))} of host memory."
    )
    return markdown("| family or setting | rows | allocated: worst | median | reserved: worst | median |", lines, note)


def worst_table(figures: Mapping[str, Any]) -> str:
    """Return the rows outside the bounds, the worst first, and the bounds of the others."""
    rows = figures["rows"]
    outside = sorted((row for row in rows if not is_inside(row)), key=lambda row: -_largest_error(row))
    lines = [(row["name"], *(percent(error_of(row, what), 2, signed=True) for what in BOUNDS)) for row in outside]
    bounds = " and ".join(f"{percent(bound, 1)} of {what.partition('_')[0]} bytes" for what, bound in BOUNDS.items())
    note = f"The other {len(rows) - len(outside)} of {len(rows)} set-ups are within {bounds} (`make test-cuda`)."
    return markdown("| the worst set-ups | allocated | reserved |", lines, note)


def _largest_error(row: Row) -> float:
    return max(abs(error_of(row, what)) for what in BOUNDS)


def is_inside(row: Row) -> bool:
    """Return whether both peaks of a row are within the bounds."""
    return all(abs(error_of(row, what)) <= bound for what, bound in BOUNDS.items())


def sentence(figures: Mapping[str, Any]) -> str:
    """Return in how many set-ups the estimate agrees, and the worst."""
    rows = figures["rows"]
    worst = percent(max(map(_largest_error, rows)), 1)
    return (
        f"The estimated peak equals that of PyTorch's own CUDA allocator in {sum(map(is_inside, rows))} of {len(rows)} "
        f"set-ups (`make test-cuda`, no GPU needed). The worst is off by {worst}; *equal* means within 0.1 % of "
        "allocated and 0.5 % of reserved bytes."
    )


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, compare, print the tables, append the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", action="append", choices=SET_UPS, metavar="NAME", help="only this row, anew")
    parser.add_argument("--stored", action="store_true", help="run no real side, compare with those that are stored")
    parser.add_argument("--events", action="store_true", help="with --row: compare both sides event by event")
    given = parser.parse_args(arguments)
    if given.events:
        for name in given.row or ():
            compare_events(name, rehearse)
        return
    names, torch_version = given.row or list(SET_UPS), version("torch").partition("+")[0]
    stored = {} if given.row and not given.stored else stored_peaks("*" if given.stored else torch_version)
    for name in () if given.stored else [name for name in names if name not in stored]:
        stored[name] = rehearse(name)
        append(name, stored[name], path=RESULTS / f"judge-{torch_version}.jsonl")
        print(name, stored[name].get("error", f"{stored[name].get('seconds')} s"), flush=True)
    rows = [compared(name, stored[name]) for name in names if name in stored]
    print(both_sides(rows), worst_table({"rows": rows}), sep="\n\n", end="\n\n")
    print(table({"rows": rows})) if given.row else show("judge", {"rows": rows}, table({"rows": rows}))


if __name__ == "__main__":
    main()
