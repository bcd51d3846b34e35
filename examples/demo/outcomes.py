"""The six set-ups one after the other, and what the demo prints: one table, and a sentence for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from docstring_task import docstring_task, read_docstrings, source_files, train_tokenizer
from rich import box
from rich.console import Console
from rich.table import Table
from set_ups import LIMIT_BYTES, Demo, run_setup

TEXTS, TEST_TEXTS = 1536, 400
TITLES = {
    "unlimited": "no limit",
    "stock": "(a) stock",
    "auto_find_batch_size": "(b) autobatch",
    "memopt": "(c) attach",
    "planned": "(d) plan",
    "streamed": "(e) streamed",
}
SENTENCES = {
    "unlimited": "{planned_steps} steps of {batch_size} texts by the stock Trainer, with enough memory",
    "stock": "{limit} MiB were enough",
    "auto_find_batch_size": (
        "{times_out_of_memory} restarts with smaller batches, then {planned_steps} steps of {batch_size} texts instead "
        "of {whole[planned_steps]} of {whole[batch_size]}. That is another training; it was cut off after {steps} steps"
    ),
    "memopt": (
        "{steps} of {planned_steps} steps, memory {ran_out}. Against the run without a limit every loss differs by at "
        "most {loss_difference:.0e} of it, every weight by {weight_difference:.0e} (except biases of keys, which "
        "change nothing)"
    ),
    "planned": "{plan}, texts of similar length together: memory {ran_out}",
    "streamed": (
        "{layers} MiB of layers on a GPU with {limit} MiB: {steps} of {planned_steps} steps. Every loss and weight is "
        "{equal} to the bit to those of plain checkpointing without a limit, which needs {needed} MiB"
    ),
    "failed": "ended in step {failed_step} of {planned_steps}, for which {predicted} MiB are predicted: {message}",
}
NOTE = (
    "Peaks are allocated MiB. Predicted is the peak of the set-up as given, with its longest texts. OOM counts how "
    "often memory ran out. (e) is another model, with fewer steps and shorter texts. Accuracy is of one seed on 400 "
    "unseen texts, with a standard error of 0.02."
)
TABLE_COLUMNS = 60  # what the table needs

Figures = Mapping[str, Mapping[str, Any]]


def run_demo(folder: str, *, texts: int = TEXTS, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
    """Train the set-ups one after the other, print what came of them, and return their figures."""
    progress, figures = Console(stderr=True, highlight=False), {}
    progress.print(
        f"This CPU pretends to be a GPU with {mebibytes(limit_bytes)} MiB: beyond that torch allocates nothing. A BERT "
        "learns which module of Python a docstring is from. Two to four minutes on two idle cores"
    )
    task = docstring_task(read_docstrings(source_files()))
    tokenizer, test = train_tokenizer(task.train_texts), TEST_TEXTS
    parts = {"train_texts": texts, "train_labels": texts, "test_texts": test, "test_labels": test}
    kept = replace(task, **{name: getattr(task, name)[:most] for name, most in parts.items()})
    demo = Demo(kept, tokenizer, folder, limit_bytes)
    for number, (name, title) in enumerate(TITLES.items(), start=1):
        progress.rule(f"{number} of {len(TITLES)}: {title}", align="left")
        figures[name] = run_setup(demo, name)
        progress.print(sentence(name, figures))
    print_results(figures, Console(highlight=False))
    return figures


def print_results(figures: Figures, console: Console) -> None:
    """Print the table and what it says; only the text wraps in a narrow terminal."""
    limit = mebibytes(figures["stock"]["limit_bytes"])
    console.print(f"A GPU with {limit} MiB, pretended by a limit on what torch allocates on this CPU\n")
    console.print(figures_table(figures), width=max(TABLE_COLUMNS, console.width))
    for name, title in TITLES.items():
        console.print(f"\n{title}: {sentence(name, figures)}")
    console.print(f"\n{NOTE}")


def figures_table(figures: Figures) -> Table:
    """Return a row for each set-up, at most 60 columns wide; bytes in MiB."""
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in ("", "steps", "OOM", "peak", "predicted", "ex/s", "accuracy"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, title in TITLES.items():
        own = figures[name]
        peaks = mebibytes(own["peak_bytes"]), mebibytes(own["predicted_peak_bytes"])
        speed = f"{own['examples_per_second']:,.0f}" if own["steps"] == own["planned_steps"] else "-"
        accuracy = "-" if own["accuracy"] is None else f"{own['accuracy']:.3f}"
        steps = f"{own['steps']}/{own['planned_steps']}"
        table.add_row(title, steps, str(own["times_out_of_memory"]), *peaks, speed, accuracy)
    return table


def sentence(name: str, figures: Figures) -> str:
    """Return what came of a set-up, beside those that ran before it."""
    own = figures[name]
    count = own["times_out_of_memory"]
    return SENTENCES["failed" if "message" in own else name].format(
        **own,
        whole=figures["unlimited"],
        failed_step=own["steps"] + 1,
        limit=mebibytes(own["limit_bytes"] or 0),
        predicted=mebibytes(own["predicted_peak_bytes"]),
        layers=mebibytes(own.get("layer_bytes", 0)),
        needed=mebibytes(own.get("whole_peak_bytes", 0)),
        equal="equal" if own.get("is_equal_to_whole") else "not equal",
        ran_out=("never ran out", "ran out once", "ran out twice")[count] if count < 3 else f"ran out {count} times",
    )


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f}"
