"""The parts of README.md about estimates, plans and presets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import table_rows
from table_rows import MACHINE, last_row, versions_of

from hf_memopt.units import format_bytes


def status() -> str:
    """Return what is computed, and how far it is from what others measured, from the last published comparisons."""
    memory, steps = (last_row(case)["figures"]["summaries"] for case in ("published", "step_time"))
    today, every, timed = (
        memory["stock Trainer since 4.40, as is"],
        memory["all, matched"],
        steps["A100, dense, not fitted"],
    )
    return (
        "Status: memory and seconds are *computed*; this project has measured none on a GPU yet (`make bench-gpu` "
        "measures yours). Against what other people measured on GPUs, the memory of "
        f"{today['cases']} runs of today's stock `Trainer` is within {today['worst']:.1%}, that of all "
        f"{every['cases']} runs, with what older versions did otherwise put in place, within {every['worst']:.1%}, and "
        f"the seconds of {timed['rows']} steps to which nothing was fitted within {timed['worst']:.0%} "
        "([how exact](docs/estimator.md)). What runs on a CPU is measured, and every figure has its command "
        "([benchmarks](docs/benchmarks.md))."
    )


def presets() -> str:
    """Return the table of presets."""
    from hf_memopt.recipes.presets import PRESETS, preset_rows

    rows = preset_rows(PRESETS)
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows)])


def estimate_comparison() -> str:
    """Return the set-ups that ``--compare`` compares, from the last run of ``benchmarks/estimation.py``."""
    figures = last_row("estimation_comparison", program="estimation")["figures"]
    shown = ("weights", "gradients", "optimizer state", "activations")
    lines = [f"| set-up | rows x steps | {' | '.join(shown)} | rest | reserved | total | fits |", f"|---|{'---|' * 9}"]
    for row in figures["rows"]:
        found = row["estimate"]
        parts = [found["components"][name] for name in shown]
        sizes = [*parts, sum(found["components"].values()) - sum(parts)]
        sizes += [found["peak_reserved_bytes"], found["total_bytes"]]
        cells = " | ".join(f"{size / 2**20:,.0f}" for size in sizes)
        lines.append(f"| {row['set_up']} | {row['batch']} | {cells} | {'yes' if found['fits'] else 'no'} |")
    note = (
        f"{figures['model']}, {figures['examples']} texts of {figures['seq_len']} tokens per optimizer step, in MiB; "
        f"of the {figures['gpu']} {figures['usable_bytes'] / 2**20:,.0f} MiB are usable, and `total` includes a CUDA "
        f"context of {figures['context_bytes'] / 2**20:,.0f}. Components are those of the allocated peak. Each set-up "
        "has the most rows that fit; what has a `+` is added to the row above."
    )
    return "\n".join([*lines, "", note])


def estimate_speed() -> str:
    """Return the time and host memory of estimates, from the last run of ``benchmarks/estimation.py``."""
    figures = last_row("estimation")["figures"]
    lines = ["| estimate | median of 5 | again, another optimizer | host memory |", "|---|---|---|---|"]
    for name, found in figures.items():
        times = f"{found['seconds']:.2f} s | {found['again_seconds']:.2f} s"
        lines.append(f"| {name} | {times} | {found['host_bytes'] / 2**20:,.0f} MiB |")
    return "\n".join([*lines, "", f"On {MACHINE}, after the imports (`python benchmarks/estimation.py`)."])


def estimate_errors() -> str:
    """Return the errors of ``estimate`` against what GPUs measured, from the rows of ``benchmarks/gpu.py``."""
    from gpu_figures import latest, read_rows

    rows = [
        row
        for row in latest(read_rows(sorted(table_rows.RESULTS.glob("*.jsonl"))))
        if row["figures"]["device"] == "cuda"
    ]
    if not rows:
        return (
            "The figures of a GPU are still to come: no CUDA GPU was available when this was written. "
            "`make bench-gpu` measures them on yours."
        )
    lines = [
        "| GPU | measured | allocated: median | p95 | worst | worst under | reserved: median | p95 | total: median "
        "| worst | not measured |",
        f"|---|{'---|' * 10}",
    ]
    lines += [_errors_of_gpu(gpu, rows) for gpu in sorted({row["figures"]["gpu"] for row in rows})]
    versions = sorted({versions_of(row["figures"], "torch", "transformers", "cuda") for row in rows})
    note = (
        "Errors of the prediction in percent of what was measured; all but `worst under` without sign. `total` is what "
        "the GPU holds for the process, predicted as reserved bytes and the context measured after a first kernel. "
        f"With {'; '.join(versions)} (`make bench-gpu`)."
    )
    return "\n".join([*lines, "", note])


def published_errors() -> str:
    """Return the errors against published measurements, from the last run of ``benchmarks/published.py``."""
    from published_table import published_table

    return published_table(last_row("published")["figures"])


def _errors_of_gpu(gpu: str, rows: list[dict[str, Any]]) -> str:
    """Return a GPU's line of the table of errors."""
    from gpu_figures import MEASURED, spreads_of

    figures = [row["figures"] for row in rows if row["figures"]["gpu"] == gpu]
    spreads = spreads_of(figures)
    cells = [gpu, str(sum(row["status"] == MEASURED for row in figures))]
    for name, statistics in (
        ("allocated", ("median", "p95", "worst", "worst_under")),
        ("reserved", ("median", "p95")),
        ("total", ("median", "worst")),
    ):
        cells += [f"{getattr(spreads[name], key):.2f}" if name in spreads else "-" for key in statistics]
    others = Counter(row["status"] for row in figures if row["status"] != MEASURED)
    cells.append(", ".join(f"{count} {status}" for status, count in sorted(others.items())) or "0")
    return f"| {' | '.join(cells)} |"


def step_time() -> str:
    """Return how far predicted seconds are from published ones, from the last run of ``benchmarks/step_time.py``."""
    lines = ["| steps | rows | Spearman | median error | worst |", "|---|---|---|---|---|"]
    for name, found in last_row("step_time")["figures"]["summaries"].items():
        rank = "-" if found["spearman"] is None else f"{found['spearman']:.3f}"
        lines.append(f"| {name} | {found['rows']} | {rank} | {found['median']:.1%} | {found['worst']:.1%} |")
    note = "Seconds per step, errors without sign; the rows are other people's (`make bench-step-time`)."
    return "\n".join([*lines, "", note])


def large_models() -> str:
    """Return what full training of Llama-3 needs, from the last run of ``benchmarks/large_models.py``."""
    lines = ["| rows x tokens, GPU | set-up | in all | to spare | effective batch |", "|---|---|---|---|---|"]
    for row, steps in last_row("large_models")["figures"]["rows"].items():
        for name, found in steps.items():
            spare = found["to_spare_bytes"]
            left = format_bytes(spare) if spare >= 0 else f"-{format_bytes(-spare)}"
            cells = [row, name, format_bytes(found["total_bytes"]), left, str(found["effective_batch"])]
            lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Computed, not measured (`python benchmarks/large_models.py`); in all: reserved bytes and the CUDA context. "
        "Released gradients are neither accumulated nor clipped by their global norm."
    )
    return "\n".join([*lines, "", note])
