"""``hf-memopt demo``: train one small BERT with four set-ups of the stock ``Trainer`` on text that Python ships with.

(a) naive, (b) stock at its best, (c) what ``recipe("auto")`` chooses, (d) the preset for the smallest GPUs; each in a
child process, so that no set-up starts with the libraries' state or the warm memory of another. Then one table, and
the model of (c) saved, reloaded and asked.

Everything is written in a hidden folder beside the output, on the same disk, which then takes the output's place by
renaming: the output is complete or absent, also after Ctrl-C. Limitations: a signal other than Ctrl-C leaves the
hidden folder. ``docstring_task`` has the data, ``setups`` the set-ups, ``measurement`` what a child does, ``results``
the text.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.demo.results import TITLES, print_results
from hf_memopt.plain_data import Count, check_value, checked_path, parse_object
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from hf_memopt.demo.docstring_task import DocstringTask

__all__ = ["prepare", "run_child", "run_demo"]

MARKER = "demo.json"  # lists the files of a finished demo, so that the next one may replace them
VERSIONS_OF = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "hf-memopt")


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
        ValueError: an invalid number; an output or a file that cannot be written there; a Python without the sources of
            its standard library.
        ChildProcessError: a set-up failed.
    """
    from rich.console import Console

    check_value("epochs", epochs, Count, 1)
    check_value("max_train", max_train, Count | None, None)
    output = checked_path("output", os.path.abspath(output))
    check_output(output)
    if json_file is not None:
        check_json_file(checked_path("json_file", json_file), output)
    progress, results = Console(stderr=True, highlight=False), Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
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
        check_output(output)  # again: what somebody put there while the set-ups trained is not removed
        publish(work / "model", output, {"labels": task.labels, "figures": figures})
    if json_file is not None:
        write_whole(json_file, json.dumps(figures, indent=2) + "\n")
        results.print(f"Figures: {json_file}", soft_wrap=True)
    _ask_reloaded(output, task, results)


# ---- The output: whole or absent ------------------------------------------------------------------------------------


def check_output(output: Path) -> None:
    """Raise ValueError unless ``output`` can be made, is empty, or holds only what an earlier demo wrote."""
    rule = "expected a new folder or that of an earlier demo. Call: hf-memopt demo --output another-folder"
    if not output.parent.is_dir():
        raise ValueError(f"output={str(output)!r} lies in a folder that does not exist; {rule}")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ValueError(f"output={str(output)!r} is not a folder; {rule}")
    try:
        written = {MARKER, *parse_object((output / MARKER).read_bytes())["files"]}
    except (OSError, ValueError, TypeError, KeyError):  # no marker, or one that the demo did not write
        written = set()
    others = sorted(entry.name for entry in output.iterdir() if entry.name not in written) if output.exists() else []
    if others:
        raise ValueError(f"output={str(output)!r} holds {others[0]!r}, which no demo wrote; {rule}")


def check_json_file(json_file: Path, output: Path) -> None:
    """Raise ValueError if the figures cannot be written to this file, or if it would go with the output."""
    folder = Path(os.path.abspath(json_file)).parent
    if json_file.is_dir() or not folder.is_dir() or folder.is_relative_to(output):
        raise ValueError(
            f"json_file={str(json_file)!r} cannot be written; expected a file in an existing folder outside the "
            "output. Call: hf-memopt demo --json figures.json"
        )


def publish(finished: Path, output: Path, marker: Mapping[str, Any]) -> None:
    """Add the marker to a finished folder and rename it to ``output``.

    What an earlier demo left there is moved beside ``finished``, to be removed with the temporary folder.
    """
    files = sorted(entry.name for entry in finished.iterdir())
    write_whole(finished / MARKER, json.dumps({**marker, "files": files}, indent=2) + "\n")
    if output.exists():
        output.rename(finished.with_name("replaced"))
    finished.rename(output)


# ---- Data and children ----------------------------------------------------------------------------------------------


def prepare(work: Path, *, max_train: int | None, console: Console) -> DocstringTask:
    """Read the docstrings, train the tokenizer and write both into ``work`` for the children; return the task.

    Raises:
        MissingSourcesError: this Python lacks the sources of its standard library.
    """
    from dataclasses import asdict, replace

    from rich.progress import Progress

    from hf_memopt.demo.docstring_task import docstring_task, read_docstrings, source_files, train_tokenizer

    files = source_files()
    with Progress(console=console, transient=True) as progress:
        reading = progress.add_task("Reading the standard library", total=len(files))
        task = docstring_task(read_docstrings(files, on_file=lambda: progress.advance(reading)))
    with console.status("Training the tokenizer"):
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
    command = [sys.executable, "-m", "hf_memopt.demo.run", str(work), arguments]
    try:
        # What the child prints goes where its progress bars go, so that standard output holds the results alone.
        # KINETO_LOG_LEVEL silences the lines with which torch's profiler announces itself.
        subprocess.run(command, stdout=2, check=True, env={**os.environ, "KINETO_LOG_LEVEL": "99"})
    except subprocess.CalledProcessError as error:
        raise ChildProcessError(
            f"{TITLES[setup]} failed with exit code {error.returncode}; its error is printed above"
        ) from None
    figures: dict[str, Any] = json.loads((work / f"{setup}.json").read_bytes())
    return figures


def _train_in_child(folder: str, arguments: str) -> None:
    """Train one set-up and write its figures into the folder; what a child of ``run_child`` does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in a terminal reaches the child too; the parent reports it
    _silence_bitsandbytes()
    from hf_memopt.demo.measurement import run_setup

    options = json.loads(arguments)
    figures = run_setup(Path(folder), **options)
    write_whole(Path(folder) / f"{options['setup']}.json", json.dumps(figures))


def _silence_bitsandbytes() -> None:
    """Leave out its warning at import, which is about a 4-bit kernel that the demo does not use."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # seen in bitsandbytes 0.50.2


# ---- Results --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that the figures belong to, and the device."""
    from hf_memopt.devices.memory_reading import read_memory

    found = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": platform.python_version(), **found, "device": read_memory().device_name}


def _ask_reloaded(output: Path, task: DocstringTask, console: Console) -> None:
    """Load the saved model as any user would, and let it name the modules of three texts that it never saw."""
    _silence_bitsandbytes()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hf_memopt.demo.measurement import predict_labels

    model = AutoModelForSequenceClassification.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    texts = task.test_texts[:3]
    console.print(f"Model (c) saved in {output}, reloaded and asked which module these unseen docstrings are from:")
    for text, label, true in zip(texts, predict_labels(model, tokenizer, texts), task.test_labels, strict=False):
        start = " ".join(text.split())[: max(20, console.width - 40)]
        console.print(
            f"  {start!r}: {model.config.id2label[label]} (true: {task.labels[true]})", markup=False, soft_wrap=True
        )


if __name__ == "__main__":  # a child of run_child
    _train_in_child(*sys.argv[1:])
