"""Write the generated parts of README.md between their markers, from the code and from ``benchmarks/results``.

python benchmarks/table.py            # rewrite README.md
python benchmarks/table.py --check    # exit code 1 if it is not current
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_memopt.binding.conflicts import REFUSALS, RUN, SETTINGS, TECHNIQUES, Refusal, refusal_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEMO = RESULTS / "demo-cpu-2core.json"
MACHINE = "2 CPU cores without an accelerator"


def presets() -> str:
    """Return the table of presets."""
    from hf_memopt.recipes.presets import PRESETS, preset_rows

    rows = preset_rows(PRESETS)
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows)])


def demo_table() -> str:
    """Return the table that the demo printed, with what it ran on."""
    from rich.console import Console

    from hf_memopt.demo.results import print_results

    figures, versions_of = _demo()
    console = Console(file=io.StringIO(), width=100, record=False)
    print_results(figures, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
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


def accuracy() -> str:
    """Return the accuracies of the last run of benchmarks/accuracy.py."""
    return _last_row("accuracy")["figures"]["sentence"]


def memory_report() -> str:
    """Return the cost of the memory report in the last run of benchmarks/memory_report.py."""
    figures = _last_row("memory_report")["figures"]
    return (
        f"`MemoryReportCallback` costs {figures['callback_step_and_log_microseconds']:.0f} microseconds per step with "
        f"a log at every step: {figures['overhead_with_log_percent']:.2f} % of a "
        f"{figures['real_step_milliseconds']:.0f} ms step."
    )


def batching_table() -> str:
    """Return the samplers side by side, from the last run of ``benchmarks/batching.py``."""
    row = _last_row("batching_lengths", program="batching")
    sets = row["figures"]["figures"]
    lines = [
        "| | "
        + " | ".join(f"{name}<br>budget {of_set['budget']}" for name, of_set in sets.items())
        + " | over budget | lag-1 | straggler | µs/example | bytes/example |",
        f"|---|{'---|' * (len(sets) + 5)}",
    ]
    of_review = sets["review"]["arms"]
    for arm, review in of_review.items():
        cells = [_three(of_set["arms"][arm]) for of_set in sets.values()]
        over = sum(of_set["arms"][arm]["batches_over_budget"] for of_set in sets.values())
        held = "-" if review["bytes_per_example"] is None else f"{review['bytes_per_example']:.0f}"
        cells += [str(over), f"{review['lag_one']:+.2f}", f"{review['straggler_ratio']:.3f}"]
        cells += [f"{review['microseconds_per_example']:.2f}", held]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    note = (
        "A cell is padding efficiency / fill (padded tokens of a batch over the budget, mean) / number of shapes. "
        "`over budget` counts batches of all sets; the last four columns are of `review`. With a fixed batch size, "
        "`safe` is the largest that keeps to the budget and `mean` the one that uses it on average. TRL packs several "
        "texts into a row and so has another contract. "
        f"On {MACHINE}; {_versions_of(row, 'transformers', 'lhotse', 'trl')}."
    )
    return "\n".join([*lines, "", note])


def batching_collation() -> str:
    """Return the cost of fetching and collating a batch, from the last run of ``benchmarks/batching.py``."""
    cases = _last_row("batching_collation", program="batching")["figures"]["figures"]
    lines = [
        "| rows x tokens | Dataset + DataCollatorWithPadding | bucketed + BucketedCollator | ratio | whole step |",
        "|---|---|---|---|---|",
    ]
    for case, figures in cases.items():
        times = (f"{figures[key] / 1e3:.2f} ms" for key in ("stock_microseconds", "ours_microseconds"))
        ratios = f"{figures['ratio']:.0f}x | {figures['loader_ratio']:.0f}x"
        lines.append(f"| {case} | {' | '.join(times)} | {ratios} |")
    return "\n".join(lines)


def batching_end_to_end() -> str:
    """Return the demo's task with four ways of batching, from the last run of ``benchmarks/batching.py``."""
    from batching_end_to_end import TITLES

    row = _last_row("batching_end_to_end", program="batching")
    figures = row["figures"]["figures"]
    arms = figures["arms"]
    lines = [
        "| | seconds per epoch | to random + dynamic | to group_by_length | padding efficiency | accuracy |",
        "|---|---|---|---|---|---|",
    ]
    for arm, of_arm in arms.items():
        ratios = (f"{of_arm['seconds'] / arms[other]['seconds']:.2f}x" for other in ("random", "group_by_length"))
        cells = [
            f"{of_arm['seconds']:.1f}",
            *ratios,
            f"{of_arm['padding_efficiency']:.3f}",
            f"{of_arm['accuracy']:.3f}",
        ]
        lines.append(f"| {TITLES[arm]} | {' | '.join(cells)} |")
    note = f"{figures['examples']} texts, {figures['seeds']} seeds, on {MACHINE}; {_versions_of(row, 'transformers')}."
    return "\n".join([*lines, "", note])


def estimate_ladder() -> str:
    """Return the ladders of techniques, from the last run of ``benchmarks/estimation.py``."""
    figures = _last_row("estimation_ladder", program="estimation")["figures"]
    shown = ("weights", "gradients", "optimizer state", "activations")
    lines = [f"| added | {' | '.join(shown)} | rest | allocated | reserved | total | fits |", f"|---|{'---|' * 9}"]
    ladder = None
    for row in figures["rows"]:
        if row["ladder"] != ladder:
            ladder = row["ladder"]
            lines.append(f"| **{ladder}** |{' |' * 9}")
        found = row["estimate"]
        parts = [found["components"][name] for name in shown]
        sizes = [*parts, sum(found["components"].values()) - sum(parts)]
        sizes += [found["peak_allocated_bytes"], found["peak_reserved_bytes"], found["total_bytes"]]
        cells = " | ".join(f"{size / 2**20:,.0f}" for size in sizes)
        lines.append(f"| {row['added']} | {cells} | {'yes' if found['fits'] else 'no'} |")
    note = (
        f"{figures['model']}, {figures['batch_size']} texts of {figures['seq_len']} tokens per optimizer step, in MiB; "
        f"of the {figures['gpu']} {figures['usable_bytes'] / 2**20:,.0f} MiB are usable, and `total` includes a CUDA "
        f"context of {figures['context_bytes'] / 2**20:,.0f}. Components are those of the allocated peak."
    )
    return "\n".join([*lines, "", note])


def estimate_speed() -> str:
    """Return the time and host memory of estimates, from the last run of ``benchmarks/estimation.py``."""
    figures = _last_row("estimation")["figures"]
    lines = ["| estimate | median of 5 | again, another optimizer | host memory |", "|---|---|---|---|"]
    for name, found in figures.items():
        times = f"{found['seconds']:.2f} s | {found['again_seconds']:.2f} s"
        lines.append(f"| {name} | {times} | {found['host_bytes'] / 2**20:,.0f} MiB |")
    return "\n".join([*lines, "", f"On {MACHINE}, after the imports (`python benchmarks/estimation.py`)."])


def estimate_errors() -> str:
    """Return the errors of ``estimate`` against what GPUs measured, from the rows of ``benchmarks/gpu.py``."""
    from gpu_figures import latest, read_rows

    rows = [row for row in latest(read_rows(sorted(RESULTS.glob("*.jsonl")))) if row["figures"]["device"] == "cuda"]
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
    versions = sorted({_versions_of(row["figures"], "torch", "transformers", "cuda") for row in rows})
    note = (
        "Errors of the prediction in percent of what was measured; all but `worst under` without sign. `total` is what "
        "the GPU holds for the process, predicted as reserved bytes and the context measured after a first kernel. "
        f"With {'; '.join(versions)} (`make bench-gpu`)."
    )
    return "\n".join([*lines, "", note])


def published_errors() -> str:
    """Return the errors against published measurements, from the last run of ``benchmarks/published.py``."""
    from published_table import published_table

    return published_table(_last_row("published")["figures"])


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


def _three(figures: dict[str, Any]) -> str:
    return f"{figures['padding_efficiency']:.3f} / {figures['fill']:.3f} / {figures['shapes']}"


def _versions_of(row: dict[str, Any], *packages: str) -> str:
    return ", ".join(f"{name} {row['versions'][name]}" for name in packages if name in row["versions"])


def microbatch() -> str:
    """Return pieces against stock accumulation and the callback's cost, from ``benchmarks/microbatch.py``."""
    figures = _last_row("microbatch")["figures"]
    cost, arms = figures["overhead"], figures["mixed_lengths"]
    stock = next(iter(arms.values()))["seconds_per_step"]
    lines = ["| 32 docstrings a step, BERT-mini | seconds per step | padded tokens | speed |", "|---|---|---|---|"]
    for name, found in arms.items():
        seconds, tokens = found["seconds_per_step"], found["padded_tokens_per_step"]
        lines.append(f"| {name} | {seconds:.2f} | {tokens:,.0f} | {stock / seconds:.2f}x |")
    note = (
        f"With nothing to cut the callback costs {1e6 * cost['callback_seconds']:.0f} microseconds per step, "
        f"{cost['fraction']:.2%} of a {1e3 * cost['step_seconds']:.0f} ms step of BERT-tiny. On 2 CPU cores without an "
        "accelerator (`python benchmarks/microbatch.py`)."
    )
    return "\n".join([*lines, "", note])


def resume() -> str:
    """Return the host memory of a resume, from the last run of ``benchmarks/resume.py``."""
    from hf_memopt.units import format_bytes

    lines = ["| optimizer | its state | stock reads it with | lean |", "|---|---|---|---|"]
    for name, found in _last_row("resume")["figures"].items():
        sizes = found["state_bytes"], found["stock"]["host_bytes"], found["lean"]["host_bytes"]
        lines.append(f"| {name} | {' | '.join(format_bytes(size) for size in sizes)} |")
    note = "Host memory above the start, of a state that belongs on a GPU (`python benchmarks/resume.py`)."
    return "\n".join([*lines, "", note])


def checkpointing() -> str:
    """Return what each checkpointing policy saves, from the last run of ``benchmarks/checkpointing.py``."""
    from checkpointing import checkpointing_table

    return checkpointing_table(_last_row("checkpointing")["figures"])


def step_time() -> str:
    """Return how far predicted seconds are from published ones, from the last run of ``benchmarks/step_time.py``."""
    lines = ["| steps | rows | Spearman | median error | worst |", "|---|---|---|---|---|"]
    for name, found in _last_row("step_time")["figures"]["summaries"].items():
        rank = "-" if found["spearman"] is None else f"{found['spearman']:.3f}"
        lines.append(f"| {name} | {found['rows']} | {rank} | {found['median']:.1%} | {found['worst']:.1%} |")
    note = "Seconds per step, errors without sign; the rows are other people's (`make bench-step-time`)."
    return "\n".join([*lines, "", note])


def fused_cross_entropy() -> str:
    """Return the time of fused steps, from the last run of ``benchmarks/fused_cross_entropy.py``, and their logits."""
    from hf_memopt.units import format_bytes

    figures = _last_row("fused cross entropy", program="fused_cross_entropy")["figures"]
    lines = ["| training step | stock | fused | ratio |", "|---|---|---|---|"]
    for case, found in figures["steps"].items():
        lines.append(
            f"| {case} | {found['stock_seconds']:.1f} s | {found['fused_seconds']:.1f} s | {found['ratio']:.2f} |"
        )
    logits = _last_row("large_models")["figures"]["logits_and_loss"]["16-bit weights"]
    note = (
        f"CPU seconds on {MACHINE} (`python benchmarks/fused_cross_entropy.py`). Logits and loss of Llama-3.2-1B, "
        f"2 x 512 tokens, 16-bit weights: {format_bytes(logits['fused'])} instead of {format_bytes(logits['stock'])} "
        "(computed)."
    )
    return "\n".join([*lines, "", note])


def large_models() -> str:
    """Return what full training of Llama-3 needs, from the last run of ``benchmarks/large_models.py``."""
    from hf_memopt.units import format_bytes

    lines = ["| rows x tokens, GPU | set-up | in all | to spare | effective batch |", "|---|---|---|---|---|"]
    for row, steps in _last_row("large_models")["figures"]["rows"].items():
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


def sixteen_bit_weights() -> str:
    """Return quality and bytes of 16-bit weights, from the last runs of ``benchmarks/sixteen_bit_weights.py``."""
    lines = ["| task | weights | loss | against float32 weights | accuracy | against | bytes |", "|" + "---|" * 7]
    tasks = {"demo": "the demo's task", "causal-lm": "a small causal language model, continued"}
    for task, shown in tasks.items():
        figures = _last_row(f"16-bit weights, {task}", program="sixteen_bit_weights")["figures"]
        for way, found in figures.items():
            if not isinstance(found, dict):
                continue
            weight, state = found["weight_bytes"], found["state_bytes"]
            differences = [
                "{:+.4f} [{:+.4f}, {:+.4f}]".format(*found[key]) if key in found else ""
                for key in ("loss_difference", "accuracy_difference")
            ]
            cells = [shown, way, f"{found['loss']:.4f}", differences[0], f"{found['accuracy']:.4f}", differences[1]]
            lines.append(f"| {' | '.join(cells)} | {weight:.0f} + {weight:.0f} + {state:.2f} |")
    note = (
        f"Means of {figures['seeds']} seeds with 95 % intervals of the difference; bytes of a parameter: weight, "
        "gradient, 8-bit AdamW's state with embeddings in 32 bits (`python benchmarks/sixteen_bit_weights.py`)."
    )
    return "\n".join([*lines, "", note])


def compatibility() -> str:
    """Return which techniques and settings are compatible, from the table that ``attach`` enforces: technique by
    technique, technique by setting, and the reasons.
    """
    numbered = {name: str(number) for number, name in enumerate(TECHNIQUES, 1)}
    reasons = [f"{number}. {found.reason}" for number, found in enumerate(_distinct_refusals(), 1)]
    return "\n\n".join(
        [_compatibility_table(numbered), _compatibility_table({name: name for name in SETTINGS}), "\n".join(reasons)]
    )


def _compatibility_table(columns: Mapping[str, str]) -> str:
    """Return one table of all techniques by these columns, each with its head."""
    numbers = {found.reason: number for number, found in enumerate(_distinct_refusals(), 1)}
    lines = [f"| | {' | '.join(columns.values())} |", f"|---|{'---|' * len(columns)}"]
    for number, row in enumerate(TECHNIQUES, 1):
        cells = [_compatibility_cell(row, column, numbers) for column in columns]
        lines.append(f"| {number} {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _distinct_refusals() -> list[Refusal]:
    """Return one refusal for each reason."""
    return list({found.reason: found for found in reversed(REFUSALS)}.values())[::-1]


def _compatibility_cell(row: str, column: str, numbers: Mapping[str, int]) -> str:
    if row == column:
        return ""
    found = refusal_of(row, column)
    if found is not None:
        return f"no ({numbers[found.reason]})"
    return "yes" if column in TECHNIQUES or column in RUN else "?"


SECTIONS: dict[str, Callable[[], str]] = {
    "demo-sentence": demo_sentence,
    "demo-table": demo_table,
    "accuracy": accuracy,
    "estimate-ladder": estimate_ladder,
    "published-errors": published_errors,
    "estimate-errors": estimate_errors,
    "estimate-speed": estimate_speed,
    "batching-table": batching_table,
    "batching-collation": batching_collation,
    "batching-end-to-end": batching_end_to_end,
    "microbatch": microbatch,
    "checkpointing": checkpointing,
    "resume": resume,
    "step-time": step_time,
    "fused-cross-entropy": fused_cross_entropy,
    "large-models": large_models,
    "sixteen-bit-weights": sixteen_bit_weights,
    "compatibility": compatibility,
    "presets": presets,
    "memory-report": memory_report,
}


def rendered(text: str) -> str:
    """Return the page with every generated part made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"README.md lacks the markers {begin.strip()} and {end}")
        replacement = f"{begin}{make()}\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, new=replacement: new, text, flags=re.DOTALL)
    return text


def _demo() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of the set-ups and the versions they were taken with."""
    report = json.loads(DEMO.read_text(encoding="utf-8"))
    versions = report.pop("versions")
    return report, versions


def _last_row(case: str, *, program: str | None = None) -> dict[str, Any]:
    rows = [
        json.loads(line) for file in sorted(RESULTS.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()
    ]
    found = [row for row in rows if row["case"] == case]
    if not found:
        raise SystemExit(
            f"benchmarks/results has no row of the case {case!r}; run benchmarks/{program or case}.py first"
        )
    return max(found, key=lambda row: row["date"])


def main() -> int:
    """Rewrite or check README.md; return the exit code."""
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = rendered(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
