"""The parts of README.md about trainings that ran: the demo, batching, and what each technique costs."""

from __future__ import annotations

import io
import json
from typing import Any

import table_rows
from table_rows import MACHINE, last_row, versions_of

from hf_memopt.units import format_bytes


def demo_table() -> str:
    """Return the table that the demo printed, with what it ran on."""
    from rich.console import Console

    from hf_memopt.demo.run import print_results

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


def _demo() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of the set-ups and the versions they were taken with."""
    report = json.loads((table_rows.RESULTS / "demo-cpu-2core.json").read_text(encoding="utf-8"))
    versions = report.pop("versions")
    return report, versions


def rescue_log() -> str:
    """Return the notices of a rescued training, from the stored outputs of ``notebooks/from_oom_to_trained.ipynb``."""
    notebook = table_rows.RESULTS.parents[1] / "notebooks" / "from_oom_to_trained.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    rescued = [cell for cell in cells if "MicrobatchCallback()" in "".join(cell["source"])]
    printed = "".join("".join(shown.get("text", ())) for cell in rescued for shown in cell["outputs"])
    notices = [line for line in printed.splitlines() if line.startswith("[memopt] ")]
    if not notices:
        raise SystemExit(f"{notebook.name} shows no notice; run: python notebooks/execute.py {notebook.stem}")
    return "\n".join(["```text", *notices, "```"])


def accuracy() -> str:
    """Return the accuracies of the last run of benchmarks/accuracy.py."""
    return last_row("accuracy")["figures"]["sentence"]


def memory_report() -> str:
    """Return the cost of the memory report in the last run of benchmarks/memory_report.py."""
    figures = last_row("memory_report")["figures"]
    return (
        f"`MemoryReportCallback` costs {figures['callback_step_and_log_microseconds']:.0f} microseconds per step with "
        f"a log at every step: {figures['overhead_with_log_percent']:.2f} % of a "
        f"{figures['real_step_milliseconds']:.0f} ms step."
    )


def batching_table() -> str:
    """Return the samplers side by side, from the last run of ``benchmarks/batching.py``."""
    row = last_row("batching_lengths", program="batching")
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
        f"On {MACHINE}; {versions_of(row, 'transformers', 'lhotse', 'trl')}."
    )
    return "\n".join([*lines, "", note])


def padding_sentence() -> str:
    """Return one sentence on padding, from the last run of ``benchmarks/batching.py``."""
    review = last_row("batching_lengths", program="batching")["figures"]["figures"]["review"]
    ours, random = (review["arms"][arm] for arm in ("hf_memopt max_tokens", "random, safe"))
    return (
        f"On lengths as those of reviews, {ours['padding_efficiency']:.0%} of the tokens in a batch are real, where "
        f"random order has {random['padding_efficiency']:.0%}: {ours['microseconds_per_example']:.2f} µs per example."
    )


def _three(figures: dict[str, Any]) -> str:
    return f"{figures['padding_efficiency']:.3f} / {figures['fill']:.3f} / {figures['shapes']}"


def batching_collation() -> str:
    """Return the cost of fetching and collating a batch, from the last run of ``benchmarks/batching.py``."""
    cases = last_row("batching_collation", program="batching")["figures"]["figures"]
    lines = [
        "| rows x tokens | Dataset + DataCollatorWithPadding | bucketed + BucketedCollator | ratio | whole step |",
        "|---|---|---|---|---|",
    ]
    for case, figures in cases.items():
        times = (f"{figures[key] / 1e3:.2f} ms" for key in ("stock_microseconds", "ours_microseconds"))
        ratios = f"{figures['ratio']:.0f}x | {figures['loader_ratio']:.0f}x"
        lines.append(f"| {case} | {' | '.join(times)} | {ratios} |")
    return "\n".join(lines)


def stream_scale() -> str:
    """Return what a stream shared by many processes costs each, from the last run of ``benchmarks/stream_scale.py``."""
    figures = last_row("stream_scale")["figures"]
    lines = [
        f"| {figures['examples'] / 1e9:g} billion examples, {figures['ranks']} processes | fullest over mean | of the "
        "worst step | if each drew for itself | CPU seconds to the first batch | CPU ms of a batch |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_mode in figures["modes"].items():
        ratios = ("straggler_ratio", "straggler_ratio_worst", "straggler_ratio_of_independent_draws")
        cells = [*(f"{of_mode[key]:.3f}" for key in ratios), f"{of_mode['first_batch_seconds']:.2f}"]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {of_mode['milliseconds_per_batch']:.2f} |")
    held = {kind: size / 2**20 for kind, size in figures["held_bytes"].items()}
    resumed = ", ".join(f"{one['seconds']:.2f} s after {one['steps']:,} batches" for one in figures["resume"])
    note = (
        f"Padded tokens of the fullest process over the mean, {figures['steps']} steps. A process holds "
        f'{held["list"]:.0f} MiB of lists, or {held["numpy"]:.0f} MiB of numpy arrays (`.with_format("numpy")`). A '
        f"state has {max(one['state_bytes'] for one in figures['resume'])} bytes; to the next batch {resumed}, "
        f"part of which the generated source takes to skip to its place in a shard. On {MACHINE}."
    )
    return "\n".join([*lines, "", note])


def batching_end_to_end() -> str:
    """Return the demo's task with five ways of batching, from the last run of ``benchmarks/batching.py``."""
    from batching_end_to_end import TITLES

    row = last_row("batching_end_to_end", program="batching")
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
    note = f"{figures['examples']} texts, {figures['seeds']} seeds, on {MACHINE}; {versions_of(row, 'transformers')}."
    return "\n".join([*lines, "", note])


def microbatch() -> str:
    """Return pieces against stock accumulation and the callback's cost, from ``benchmarks/microbatch.py``."""
    figures = last_row("microbatch")["figures"]
    cost, arms = figures["overhead"], figures["mixed_lengths"]
    stock = next(iter(arms.values()))["seconds_per_step"]
    lines = ["| 32 docstrings a step, BERT-mini | seconds per step | padded tokens | speed |", "|---|---|---|---|"]
    for name, found in arms.items():
        seconds, tokens = found["seconds_per_step"], found["padded_tokens_per_step"]
        lines.append(f"| {name} | {seconds:.2f} | {tokens:,.0f} | {stock / seconds:.2f}x |")
    own = {name: found["cpu_seconds_per_step"] for name, found in figures["own_losses"].items()}
    (whole, attached, parts), (_, _, name) = own.values(), own
    note = (
        f"With nothing to cut the callback costs {1e6 * cost['callback_seconds']:.0f} microseconds per step, "
        f"{cost['fraction']:.2%} of a {1e3 * cost['step_seconds']:.0f} ms step of BERT-tiny. On 2 CPU cores without "
        "an accelerator (`python benchmarks/microbatch.py`).\n\n"
        f"A loss that is not known, 32 rows of BERT-mini: {name} take {parts / whole:.2f} times the CPU time of "
        f"stock's whole batch; with nothing to cut, {attached / whole:.2f} times."
    )
    return "\n".join([*lines, "", note])


def resume() -> str:
    """Return the host memory of a resume, from the last run of ``benchmarks/resume.py``."""
    lines = ["| optimizer | its state | stock reads it with | lean |", "|---|---|---|---|"]
    for name, found in last_row("resume")["figures"].items():
        sizes = found["state_bytes"], found["stock"]["host_bytes"], found["lean"]["host_bytes"]
        lines.append(f"| {name} | {' | '.join(format_bytes(size) for size in sizes)} |")
    note = "Host memory above the start, of a state that belongs on a GPU (`python benchmarks/resume.py`)."
    return "\n".join([*lines, "", note])


def checkpointing() -> str:
    """Return what each checkpointing policy saves, from the last run of ``benchmarks/checkpointing.py``."""
    from checkpointing import checkpointing_table

    return checkpointing_table(last_row("checkpointing")["figures"])


def fused_cross_entropy() -> str:
    """Return the time of fused steps, from the last run of ``benchmarks/fused_cross_entropy.py``, and their logits."""
    figures = last_row("fused cross entropy", program="fused_cross_entropy")["figures"]
    lines = ["| training step | stock | fused | ratio |", "|---|---|---|---|"]
    for case, found in figures["steps"].items():
        lines.append(
            f"| {case} | {found['stock_seconds']:.1f} s | {found['fused_seconds']:.1f} s | {found['ratio']:.2f} |"
        )
    logits = last_row("large_models")["figures"]["logits_and_loss"]["16-bit weights"]
    note = (
        f"CPU seconds on {MACHINE} (`python benchmarks/fused_cross_entropy.py`). Logits and loss of Llama-3.2-1B, "
        f"2 x 512 tokens, 16-bit weights: {format_bytes(logits['fused'])} instead of {format_bytes(logits['stock'])} "
        "(computed)."
    )
    return "\n".join([*lines, "", note])


def sixteen_bit_weights() -> str:
    """Return quality and bytes of 16-bit weights, from the last runs of ``benchmarks/sixteen_bit_weights.py``."""
    lines = ["| task | weights | loss | against float32 weights | accuracy | against | bytes |", "|" + "---|" * 7]
    tasks = {"demo": "the demo's task", "causal-lm": "a small causal language model, continued"}
    for task, shown in tasks.items():
        figures = last_row(f"16-bit weights, {task}", program="sixteen_bit_weights")["figures"]
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
