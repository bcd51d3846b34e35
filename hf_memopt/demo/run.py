"""``hf-memopt demo``: train one small BERT with four set-ups of the stock ``Trainer`` on text that Python ships with.

(a) naive, (b) stock at its best, (c) what ``recipe("auto")`` chooses, (d) the preset for the smallest GPUs; each in a
child process, so that no set-up starts with the libraries' state or the warm memory of another. Then one table; the
model of (c) is saved.

The output is written when all set-ups have trained. ``docstring_task`` has the data, ``training`` what a child does.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.plain_data import checked_path
from hf_memopt.whole_files import check_target, write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_memopt.demo.docstring_task import DocstringTask

MARKER = "demo.json"  # in the output of a finished demo, so that the next one may write there too
VERSIONS_OF = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "hf-memopt")
TITLES = {
    "baseline": "(a) naive",
    "stock_best": "(b) stock at its best",
    "memopt": "(c) hf_memopt",
    "memory_saver": "(d) memory saver",
}
SUMMARIES = {
    "baseline": "every text padded to 256 tokens",
    "stock_best": "group_by_length, padded to the longest row",
    "memopt": 'recipe("auto"), bucketed',
    "memory_saver": 'recipe("4gb-gpu"), bucketed',
}
HEADINGS = ("(a)\nnaive", "(b)\nstock", "(c)\nmemopt", "(d)\nsaver")
TABLE_COLUMNS = 60  # what the widest table needs

Figures = Mapping[str, Mapping[str, Any]]


def run_demo(
    output: Path,
    *,
    json_file: Path | None = None,
    epochs: int = 1,
    seed: int = 0,
    max_train: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Train the four set-ups, print their figures and save the model of (c).

    Args:
        output: the folder for model (c), its tokenizer and ``demo.json``; new, empty, or written by an earlier demo.
        json_file: where the figures also go as JSON.
        epochs: passes over the training texts, for each set-up.
        seed: of weights and order.
        max_train: train with fewer texts than there are.
        sizes: fields of ``BertConfig`` that replace the size chosen for the machine.

    Raises:
        ValueError: an output or a file that cannot be written there; a Python without the sources of
            its standard library.
        ChildProcessError: a set-up failed.
    """
    from hf_memopt.terminal import Console

    output = checked_path("output", os.path.abspath(output))
    check_output(output)
    if json_file is not None:
        check_target("json_file", json_file)
    progress, results = Console(stderr=True, highlight=False), Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        task = prepare(work, max_train=max_train, console=progress)
        progress.print(
            f"{len(task.train_texts)} training and {len(task.test_texts)} test docstrings of {len(task.labels)} "
            f"modules; each set-up trains {epochs} epoch{'s' if epochs > 1 else ''} in a process of its own. One "
            "epoch of all texts takes the four 3 to 4 minutes on 2 CPU cores"
        )
        figures: dict[str, Any] = {}
        for setup, title in TITLES.items():
            progress.rule(title, align="left")
            figures[setup] = run_child(work, setup, seed=seed, epochs=epochs, sizes=sizes or {})
        print_results(figures, results)
        figures["versions"] = versions()
        shutil.copytree(work / "model", output, dirs_exist_ok=True)
        marker = {"labels": task.labels, "figures": figures}
        write_whole(output / MARKER, json.dumps(marker, indent=2) + "\n")
    results.print(f"\nModel (c): {output}", soft_wrap=True)
    if json_file is not None:
        write_whole(json_file, json.dumps(figures, indent=2) + "\n")
        results.print(f"Figures: {json_file}", soft_wrap=True)


def check_output(output: Path) -> None:
    """Raise ValueError unless ``output`` can be made, is empty, or that of an earlier demo."""
    problem = ""
    if not output.parent.is_dir():
        problem = "lies in a folder that does not exist"
    elif output.exists() and not output.is_dir():
        problem = "is not a folder"
    elif output.exists() and any(output.iterdir()) and not (output / MARKER).is_file():
        problem = "holds what no demo wrote"
    if problem:
        raise ValueError(
            f"output={str(output)!r} {problem}; expected a new folder or that of an earlier demo. Call: hf-memopt demo "
            "--output another-folder"
        )


# ---- Data and children ----------------------------------------------------------------------------------------------


def prepare(work: Path, *, max_train: int | None, console: Console) -> DocstringTask:
    """Read the docstrings, train the tokenizer and write both into ``work`` for the children; return the task."""
    from hf_memopt.demo.docstring_task import docstring_task, read_docstrings, source_files, train_tokenizer

    with console.status("Reading the standard library and training the tokenizer"):
        task = docstring_task(read_docstrings(source_files()))
        train_tokenizer(task.train_texts).save_pretrained(work / "tokenizer")
    task = replace(task, train_texts=task.train_texts[:max_train], train_labels=task.train_labels[:max_train])
    write_whole(work / "task.json", json.dumps(asdict(task)))
    return task


def run_child(work: Path, setup: str, *, seed: int, epochs: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Train one set-up in a child process and return its figures.

    Raises:
        ChildProcessError: the child failed or was killed.
    """
    arguments = json.dumps({"setup": setup, "seed": seed, "epochs": epochs, "sizes": dict(sizes)})
    # What the child prints goes where its progress bars go, so that standard output holds the results alone.
    # KINETO_LOG_LEVEL silences the lines with which torch's profiler announces itself.
    code = subprocess.call(
        [sys.executable, "-m", "hf_memopt.demo.run", str(work), arguments],
        stdout=2,
        env={**os.environ, "KINETO_LOG_LEVEL": "99"},
    )
    if code:
        raise ChildProcessError(f"{TITLES[setup]} failed with exit code {code}; its error is printed above")
    figures: dict[str, Any] = json.loads((work / f"{setup}.json").read_bytes())
    return figures


def _train_in_child(work: Path, *, setup: str, **options: Any) -> None:
    """Train one set-up and write its figures into the folder."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in a terminal reaches the child too; the parent reports it
    # its warning at import is about a 4-bit kernel that the demo does not use; seen in bitsandbytes 0.50.2
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from hf_memopt.demo.training import run_setup

    write_whole(work / f"{setup}.json", json.dumps(run_setup(work, setup, **options)))


# ---- Results --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that the figures belong to, and the device."""
    from hf_memopt.devices.readings import read_memory

    found = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": platform.python_version(), **found, "device": read_memory().device_name}


def print_results(figures: Figures, console: Console) -> None:
    """Print what each set-up is, the table and the conclusions; only the text wraps in a narrow terminal."""
    console.print(setups_text(figures))
    console.print()
    console.print(figures_table(figures), width=max(TABLE_COLUMNS, console.width))
    for line in conclusions(figures):
        console.print(f"\n{line}")


def setups_text(figures: Figures) -> str:
    """Return a line for each set-up: how it batches, and its settings as the Trainer had them."""
    return "\n".join(f"{TITLES[name]}: {SUMMARIES[name]}; {figures[name]['settings']}" for name in TITLES)


def figures_table(figures: Figures) -> Table:
    """Return the figures of the set-ups side by side, at most 60 columns wide; bytes in MiB."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in ("", *HEADINGS):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def row(label: str, key: str, form: Callable[[Any], str] = _number) -> None:
        table.add_row(label, *("-" if (value := figures[name][key]) is None else form(value) for name in TITLES))

    row("training, seconds", "seconds")
    row("examples/s", SPEED)
    row("real tokens/s", "real_tokens_per_second", "{:,.0f}".format)
    row("padding efficiency", "padding_efficiency", "{:.3f}".format)
    row("optimizer state, MiB", STATE, _mebibytes)
    by_dtype = "optimizer_state_bytes_by_dtype"
    for dtype in sorted({dtype for f in figures.values() for dtype in f[by_dtype]}):
        row(f"  {dtype}", by_dtype, lambda sizes, dtype=dtype: _mebibytes(sizes.get(dtype, 0)))  # type: ignore[misc]
    row("peak predicted, MiB", "predicted_peak_bytes", _mebibytes)
    row("peak measured, MiB", PEAK, _mebibytes)
    if not _on_cpu(figures):
        row("reserved predicted, MiB", "predicted_reserved_bytes", _mebibytes)
        row("reserved measured, MiB", "measured_reserved_bytes", _mebibytes)
    row("accuracy", "accuracy", "{:.3f}".format)
    return table


def conclusions(figures: Figures) -> list[str]:
    """Return what the table says: (c) against stock at its best, then against naive, then (d), then the limits."""
    naive, stock, ours, saver = (figures[name] for name in TITLES)
    texts = ours["test_texts"]
    error = (ours["accuracy"] * (1 - ours["accuracy"]) / texts) ** 0.5
    lines = [
        _comparison("(c)", ours, "(b), stock at its best", stock),
        _comparison("(c)", ours, "(a), naive", naive),
        f"{_comparison('(d)', saver, '(b)', stock)} Its optimizer state is {_ratio(saver, stock, STATE)} that of (b).",
        f"The price of group_by_length in (b): it sorts up to 50 batches at a time from long to short texts, accuracy "
        f"{stock['accuracy']:.3f}. (c) and (d) also batch texts of similar length, but take the batches in random "
        f"order, accuracy {ours['accuracy']:.3f} and {saver['accuracy']:.3f}. The standard error of an accuracy is "
        f"{error:.3f} ({texts} unseen texts), and this is one seed.",
    ]
    return lines + ([*NOTES_ON_A_CPU] if _on_cpu(figures) else [])


NOTES_ON_A_CPU = (
    "Peaks: weights, gradients, optimizer state and activations of a step with 256 tokens per text, measured in "
    "torch's allocator apart from the timed run. The prediction is made for a GPU; its matrix workspaces are "
    "subtracted, its reduction buffers are not.",
    "On a CPU the 8-bit optimizer step of bitsandbytes is much slower than the fused one; it is written for GPUs.",
)
STATE, PEAK, SPEED = "optimizer_state_bytes", "measured_peak_bytes", "examples_per_second"


def _mebibytes(size_bytes: int) -> str:
    return _number(size_bytes / 2**20)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _comparison(name: str, one: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> str:
    memory = f", {_ratio(one, other, PEAK)} the peak memory" if one[PEAK] and other[PEAK] else ""
    return (
        f"{name} against {other_name}: {_ratio(one, other, SPEED)} the examples per second{memory}, accuracy "
        f"{one['accuracy']:.3f} against {other['accuracy']:.3f}."
    )


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    return f"{one[key] / other[key]:.2f}x"


def _on_cpu(figures: Figures) -> bool:
    return all(f["predicted_reserved_bytes"] is None for f in figures.values())


if __name__ == "__main__":  # a child of run_child
    _train_in_child(Path(sys.argv[1]), **json.loads(sys.argv[2]))
