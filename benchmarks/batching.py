"""Samplers side by side: padding, use of the token budget, shapes, cost, randomness, balance over ranks.

Three synthetic length sets and the demo's docstrings go through the samplers of ``batching_peers.py``, each arm in a
process of its own. Then the cost of lengths and plans of large sets, of fetching and collating a batch, and the demo's
task trained end to end. The list at the end says what was to be shown and whether it was. Peers that are not installed
are named and left out.

    python benchmarks/batching.py [--quick] [--only lengths|scale|collation|end-to-end] [--seeds N] [--examples N]
                                  [--json FILE] [--out FILE]

``--quick`` takes 1e4 examples per set, a tenth of the large sets, and does not train; its figures miss what needs size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from batching_checks import CHECKS, Check, Report
from batching_figures import round_up
from batching_measure import measure
from batching_peers import ARMS, missing
from batching_processes import in_fresh_process
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

SECTIONS = ("lengths", "scale", "collation", "end-to-end")
BUDGETS = {"review": 8192, "glue": 8192, "heavy": 16384, "docstrings": 2048}

# Column title, key of the figure, how it is printed.
BATCH_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("padding\nefficiency", "padding_efficiency", ".4f"),
    ("fill", "fill", ".4f"),
    ("real tokens\n/ budget", "real_tokens_over_budget", ".4f"),
    ("shapes", "shapes", "d"),
    ("batches", "batches", "d"),
    ("over\nbudget", "batches_over_budget", "d"),
    ("largest\nbatch", "largest_batch_tokens", "d"),
)
ORDER_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("µs per\nexample", "microseconds_per_example", ".2f"),
    ("build\nms", "build_seconds", "ms"),
    ("bytes per\nexample", "bytes_per_example", ".1f"),
    ("lag-1", "lag_one", "+.3f"),
    ("mates\nagain", "repeat_rate", ".4f"),
    ("straggler\n8 ranks", "straggler_ratio", ".4f"),
    ("left\nout", "left_out_examples", "d"),
)


# ---- Length sets ----------------------------------------------------------------------------------------------------


def synthetic_lengths(name: str, examples: int) -> NDArray[np.int32]:
    """Return the lengths of the set ``review``, ``glue`` or ``heavy``."""
    random = np.random.default_rng(0)
    if name == "review":
        drawn = np.clip(np.exp(random.normal(np.log(60), 0.85, examples)), 4, 512)
    elif name == "glue":
        is_short = random.random(examples) < 0.55
        drawn = np.where(is_short, random.gamma(6, 2.2, examples) + 3, random.normal(58, 16, examples))
        drawn = np.clip(drawn, 4, 256)
    else:
        drawn = np.clip(np.exp(random.normal(np.log(250), 1.15, examples)), 8, 4096)
    return drawn.astype(np.int32)


def docstring_lengths() -> NDArray[np.int32]:
    """Return the tokens of the demo's training texts."""
    from hf_memopt.demo.docstring_task import docstring_task, read_docstrings, source_files, train_tokenizer

    texts = list(docstring_task(read_docstrings(source_files())).train_texts)
    ids = train_tokenizer(texts)(texts, truncation=True)["input_ids"]
    return np.array([len(row) for row in ids], dtype=np.int32)


def length_sets(examples: int) -> dict[str, tuple[NDArray[np.int32], int]]:
    """Return (lengths, budget) by name."""
    sets = {name: synthetic_lengths(name, examples) for name in ("review", "glue", "heavy")}
    sets["docstrings"] = in_fresh_process(docstring_lengths)
    return {name: (lengths, BUDGETS[name]) for name, lengths in sets.items()}


# ---- Sections -------------------------------------------------------------------------------------------------------


def run_lengths(examples: int, console: Console) -> Report:
    """Measure every arm on every length set; return the figures by set and arm, and print them."""
    sets = length_sets(examples)
    report: Report = {
        name: {
            "examples": len(lengths),
            "budget": budget,
            "mean_length": float(lengths.mean()),
            "ceiling": float(lengths.sum() / round_up(lengths).sum()),
            "arms": {},
        }
        for name, (lengths, budget) in sets.items()
    }
    for arm in ARMS:
        reason = missing(arm)
        if reason is not None:
            console.print(reason, soft_wrap=True, markup=False)
            continue
        console.print(f"measuring {arm}", highlight=False, markup=False)
        for name, figures in in_fresh_process(measure, arm, sets).items():
            report[name]["arms"][arm] = figures
    for name, of_set in report.items():
        console.print(
            f"{name}: {of_set['examples']:,} examples of {of_set['mean_length']:.1f} tokens, budget {of_set['budget']} "
            f"padded tokens; efficiency with every text padded to a multiple of 8: {of_set['ceiling']:.4f}",
            soft_wrap=True,
        )
        console.print(arms_table(of_set["arms"], BATCH_COLUMNS))
        console.print(arms_table(of_set["arms"], ORDER_COLUMNS))
    return report


def arms_table(arms: Report, columns: tuple[tuple[str, str, str], ...]) -> Table:
    """Return figures of a length set, an arm a row."""
    table = Table("")
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for arm, figures in arms.items():
        table.add_row(arm, *(_cell(figures[key], form) for _, key, form in columns))
    return table


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.1f}" if form == "ms" else format(value, form)


def run_scale(examples: int, reshuffled: int, console: Console) -> Report:
    """Measure plans of large sets; return the figures by length set, and print them."""
    from batching_scale import measure_scale

    report: Report = {}
    for name in ("review", "glue", "heavy"):
        lengths = synthetic_lengths(name, examples)
        report[name] = in_fresh_process(measure_scale, lengths, BUDGETS[name], reshuffled)
    keys = [key for key in report["review"] if key not in ("examples", "reshuffled_examples")]
    table = Table(
        "",
        *report,
        title=f"LengthBuckets(max_tokens=) on {examples:,} examples; the reshuffle on {reshuffled:,}",
        title_justify="left",
    )
    for key in keys:
        table.add_row(key.replace("_", " "), *(f"{figures[key]:.4f}" for figures in report.values()))
    console.print(table)
    return report


def run_collation(batches: int, repeats: int, console: Console) -> Report:
    """Measure fetching and collating; return the figures by case, and print them."""
    from batching_scale import measure_collation

    report: Report = in_fresh_process(measure_collation, batches, repeats)
    table = Table("rows x tokens", "stock µs", "hf_memopt µs", "ratio", "whole step", "same tensors")
    table.title = (
        "Fetch and collate a batch, DataLoader without workers: Dataset + DataCollatorWithPadding against bucketed"
    )
    for case, figures in report.items():
        times = (f"{figures[key]:,.0f}" for key in ("stock_microseconds", "ours_microseconds"))
        ratios = (f"{figures[key]:.0f}x" for key in ("ratio", "loader_ratio"))
        table.add_row(case, *times, *ratios, "yes" if figures["same_tensors"] else "NO")
    console.print(table)
    return report


def run_end_to_end(seeds: int, max_train: int | None, console: Console) -> Report:
    """Train the demo's task with five ways of batching; return the figures, and print them."""
    from batching_end_to_end import TITLES, measure_end_to_end

    report = measure_end_to_end(seeds, max_train, lambda text: console.print(text, highlight=False, markup=False))
    table = Table("", "seconds per epoch", "to random", "to group_by_length", "steps", "padding efficiency", "accuracy")
    table.title = f"The demo's task, {report['examples']} texts, {seeds} seeds: medians of the time, means of the rest"
    arms = report["arms"]
    for arm, figures in arms.items():
        table.add_row(
            TITLES[arm],
            f"{figures['seconds']:.1f}",
            *(f"{figures['seconds'] / arms[other]['seconds']:.2f}x" for other in ("random", "group_by_length")),
            str(figures["steps"]),
            f"{figures['padding_efficiency']:.3f}",
            f"{figures['accuracy']:.3f}",
        )
    console.print(table)
    return report


# ---- The program ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the sections, print tables and checks, append the rows; return 1 if a full run misses something."""
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 120)
    tenth = 10 if options.quick else 1
    runs: dict[str, Callable[[], Report]] = {
        "lengths": lambda: run_lengths(100_000 // tenth, console),
        "scale": lambda: run_scale(1_000_000 // tenth, 10_000_000 // tenth, console),
        "collation": lambda: run_collation(4 if options.quick else 16, 3 if options.quick else 9, console),
        "end-to-end": lambda: run_end_to_end(options.seeds, options.examples, console),
    }
    chosen = (
        [options.only] if options.only else [name for name in SECTIONS if not options.quick or name != "end-to-end"]
    )
    figures: Report = {}
    checks: list[Check] = []
    for name in chosen:
        report = runs[name]()
        found = CHECKS[name](report)
        checks += found
        figures[name] = {"figures": report, "checks": [vars(check) for check in found]}
        if options.out is not None or not options.quick:
            import results_file  # torch: not needed by the child processes, which import this file

            path = results_file.append(f"batching_{name.replace('-', '_')}", figures[name], path=options.out)
            console.print(f"appended to {path}", soft_wrap=True)
    console.print(checks_table(checks))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return int(not options.quick and not all(check.reached for check in checks))


def checks_table(checks: list[Check]) -> Table:
    """Return what must be shown, a line each."""
    table = Table("must show", "figures", "", title="What must be shown", title_justify="left")
    for check in checks:
        table.add_row(check.claim, check.figures, "reached" if check.reached else "NOT reached")
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sets, no training, no row appended")
    parser.add_argument("--only", choices=SECTIONS, default=None)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 11), metavar="N", help="of the trained task")
    parser.add_argument("--examples", type=int, default=None, metavar="N", help="texts of the trained task")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures here too")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="append the rows to another file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
