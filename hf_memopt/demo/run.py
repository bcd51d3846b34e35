"""``hf-memopt demo``: train a small BERT on text that Python ships with, on a CPU that pretends to be a GPU too small.

Stock runs out of memory; stock with ``auto_find_batch_size`` trains something else; with ``MicrobatchCallback`` every
loss and weight is that of a run without a limit; then what ``plan`` chooses, and a model larger than the GPU. Each in a
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
from collections.abc import Mapping, Sequence
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
    "unlimited": "no limit",
    "stock": "(a) stock",
    "auto_find_batch_size": "(b) autobatch",
    "memopt": "(c) attach",
    "planned": "(d) plan",
    "streamed": "(e) streamed",
}
SUMMARIES = {
    "unlimited": "the stock Trainer where memory does not end, for comparison",
    "stock": "the same on the small GPU",
    "auto_find_batch_size": "stock with auto_find_batch_size=True",
    "memopt": "stock and attach(trainer, MicrobatchCallback())",
    "planned": "what plan() chooses for this GPU",
    "streamed": "a model larger than the GPU, its layers in host memory",
}
LIMIT_BYTES = 128 * 2**20
TEXTS = 2560
TABLE_COLUMNS = 60  # what the table needs

Figures = Mapping[str, Mapping[str, Any]]


def run_demo(
    output: Path,
    *,
    json_file: Path | None = None,
    epochs: int = 1,
    seed: int = 0,
    max_train: int = TEXTS,
    limit_bytes: int = LIMIT_BYTES,
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> None:
    """Train the set-ups, print their figures and save the model of (c).

    Args:
        output: the folder for model (c), its tokenizer and ``demo.json``; new, empty, or written by an earlier demo.
        json_file: where the figures also go as JSON.
        epochs: passes over the training texts, for each set-up but the streamed one.
        seed: of weights and order.
        max_train: how many texts to train with.
        limit_bytes: of the pretended GPU.
        sizes: fields of ``BertConfig``, of the model and of the one that is larger than the GPU.

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
    options = {"limit_bytes": limit_bytes, "seed": seed, "epochs": epochs, **({"sizes": sizes} if sizes else {})}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        task = prepare(work, max_train=max_train, console=progress)
        progress.print(
            f"This CPU pretends to be a GPU with {_mebibytes(limit_bytes)} MiB: beyond that torch allocates nothing. A "
            f"small BERT learns which of {len(task.labels)} modules a docstring is from: {len(task.train_texts)} to "
            f"train with, {len(task.test_texts)} to test. Six runs, each in a process of its own; with all defaults "
            "they take 2 to 15 minutes by the CPU"
        )
        figures: dict[str, Any] = {}
        for setup, title in TITLES.items():
            progress.rule(f"{title}: {SUMMARIES[setup]}", align="left")
            figures[setup] = run_child(work, setup, **options)
            progress.print(sentence(setup, figures))
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


def run_child(work: Path, setup: str, **options: Any) -> dict[str, Any]:
    """Train one set-up in a child process and return its figures.

    Raises:
        ChildProcessError: the child failed or was killed.
    """
    arguments = json.dumps({"setup": setup, **options})
    # What the child prints goes where its progress bars go, so that standard output holds the results alone.
    code = subprocess.call(
        [sys.executable, "-m", "hf_memopt.demo.run", str(work), arguments],
        stdout=2,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # a GPU that is there is not the one that is pretended
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
    found = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": platform.python_version(), **found, "device": platform.machine()}


def print_results(figures: Figures, console: Console) -> None:
    """Print the table and what it says; only the text wraps in a narrow terminal."""
    limit = _mebibytes(figures["stock"]["limit_bytes"])
    console.print(f"A GPU with {limit} MiB, pretended by a limit on what torch allocates on this CPU\n")
    console.print(figures_table(figures), width=max(TABLE_COLUMNS, console.width))
    for setup in TITLES:
        console.print(f"\n{TITLES[setup]}: {sentence(setup, figures)}")
    texts, accuracy = figures["unlimited"]["test_texts"], figures["unlimited"]["accuracy"]
    error = (accuracy * (1 - accuracy) / texts) ** 0.5
    console.print(
        "\nPeaks are allocated MiB; predicted is the peak of the set-up as given, with its longest texts. OOM: how "
        "often memory ran out. (e) is another model, with fewer steps and shorter texts. The standard error of an "
        f"accuracy is {error:.3f} ({texts} unseen texts), and this is one seed."
    )


def figures_table(figures: Figures) -> Table:
    """Return a row for each set-up, at most 60 columns wide; bytes in MiB."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in ("", "steps", "OOM", "peak", "predicted", "ex/s", "accuracy"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, title in TITLES.items():
        one = figures[name]
        accuracy, speed = one["accuracy"], one["examples_per_second"]
        table.add_row(
            title,
            f"{one['steps']}/{one['planned_steps']}",
            str(one["times_out_of_memory"]),
            _mebibytes(one["peak_bytes"]),
            _mebibytes(one["predicted_peak_bytes"]),
            f"{speed:,.0f}" if one["steps"] else "-",
            "-" if accuracy is None else f"{accuracy:.3f}",
        )
    return table


def sentence(setup: str, figures: Figures) -> str:
    """Return what came of a set-up, beside those that ran before it."""
    one = figures[setup]
    limit = f"{_mebibytes(figures.get('stock', one)['limit_bytes'] or 0)} MiB"
    if "message" in one:
        return (
            f"ended in step {one['steps'] + 1} of {one['planned_steps']}, for which "
            f"{_mebibytes(one['predicted_peak_bytes'])} MiB are predicted: {one['message']}"
        )
    if setup == "unlimited":
        return (
            f"{one['planned_steps']} steps of {one['batch_size']} texts; a peak of {_mebibytes(one['peak_bytes'])} MiB"
        )
    if setup == "stock":
        return f"{limit} were enough"
    if setup == "auto_find_batch_size":
        whole = figures["unlimited"]
        return (
            f"{one['times_out_of_memory']} new beginnings with smaller batches, then {one['planned_steps']} steps of "
            f"{one['batch_size']} texts in place of {whole['planned_steps']} of {whole['batch_size']}: another training"
        )
    if setup == "memopt":
        return (
            f"{one['steps']} of {one['planned_steps']} steps, memory {_ran_out(one)}; "
            f"against the run without a limit every loss differs by at most {one['loss_difference']:.0e} of it, every "
            f"weight by {one['weight_difference']:.0e} (but for biases of keys, which change nothing)"
        )
    if setup == "planned":
        speed, naive = one["examples_per_second"], figures["unlimited"]["naive_examples_per_second"]
        return (
            f"{one['plan']} ({one['settings']}), texts of similar length together: memory {_ran_out(one)}, "
            f"{speed / figures['memopt']['examples_per_second']:.1f}x the "
            f"examples per second of (c), {speed / naive:.1f}x those of padding every text to the maximum"
        )
    equal = "equal" if one["is_equal_to_whole"] else "not equal"
    return (
        f"{one['parameters'] / 1e6:.0f} M parameters, {_mebibytes(one['layer_bytes'])} MiB of layers on a GPU with "
        f"{limit}: {one['steps']} of {one['planned_steps']} steps, every loss and weight {equal} to the bit to those "
        f"of stock with checkpointing where memory does not end, which needs {_mebibytes(one['whole_peak_bytes'])} MiB"
    )


def _ran_out(one: Mapping[str, Any]) -> str:
    count = one["times_out_of_memory"]
    return ("never ran out", "ran out once", "ran out twice")[count] if count < 3 else f"ran out {count} times"


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f}"


if __name__ == "__main__":  # a child of run_child
    _train_in_child(Path(sys.argv[1]), **json.loads(sys.argv[2]))
