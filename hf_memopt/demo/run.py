"""The main job: one small BERT trained three times by the stock ``Trainer``, on real text that every Python ships with.

(a) naive, (b) stock at its best, (c) hf_memopt; each in a child process, so that the memory of one run and the global
state of its libraries do not reach the next. Then one table, and the model of (c) saved, reloaded and asked.

Interrupted at any moment it ends its children and leaves no unfinished folder behind. ``demo_arms`` holds what the
children do, ``demo_output`` what becomes of the files, ``docstrings`` the data.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.demo.output import (
    DemoError,
    check_disk,
    check_json_file,
    check_output,
    publish,
    work_folder,
    write_figures,
)
from hf_memopt.units import format_bytes
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_memopt.demo.docstring_task import DocstringTask

__all__ = ["prepare", "run_child", "run_demo"]

TITLES = {"baseline": "(a) naive", "stock_best": "(b) best stock", "memopt": "(c) hf_memopt"}
BESIDE_WEIGHTS_BYTES = 16 * 2**20  # tokenizer, texts and figures: under 2 MiB, and some air
VERSIONS_OF = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "hf-memopt")


def run_demo(
    output: Path,
    *,
    json_file: Path | None = None,
    epochs: int = 1,
    seed: int = 0,
    max_train: int | None = None,
    model: Mapping[str, int] | None = None,
) -> int:
    """Run the demo and return the exit code: 0; 1 after an error, which was printed; 130 after an interruption.

    Args:
        output: the folder for model (c), its tokenizer and ``demo.json``; new, or written by an earlier demo.
        json_file: where the figures go as JSON.
        epochs: passes over the training texts, for each of the three.
        seed: of weights, order and dropout.
        max_train: train with fewer texts than there are.
        model: fields of ``BertConfig`` that replace the size that suits the machine.
    """
    from rich.console import Console

    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    output = Path(os.path.abspath(output))
    try:
        with _stoppable():
            _check_numbers(epochs=epochs, max_train=max_train)
            check_output(output)
            if json_file is not None:
                check_json_file(json_file, output)
            _run(output, json_file, epochs=epochs, seed=seed, max_train=max_train, sizes=dict(model or {}))
    except KeyboardInterrupt:
        errors.print("Interrupted; nothing unfinished was left behind.")
        return 130
    except DemoError as error:
        errors.print(f"Error: {error}")
        return 1
    return 0


def _run(
    output: Path, json_file: Path | None, *, epochs: int, seed: int, max_train: int | None, sizes: dict[str, int]
) -> None:
    from rich.console import Console

    progress, results = Console(stderr=True, highlight=False), Console(highlight=False)
    with work_folder(output) as work:
        task = prepare(work, output, max_train=max_train, sizes=sizes, console=progress)
        progress.print(
            f"{len(task.train_texts)} training and {len(task.test_texts)} test docstrings of {len(task.labels)} "
            f"modules; each set-up trains {epochs} epoch{'s' if epochs > 1 else ''} in a process of its own"
        )
        figures = {}
        for arm, title in TITLES.items():
            progress.rule(title, align="left")
            figures[arm] = run_child(work, arm, seed=seed, epochs=epochs, sizes=sizes)
        results.print(figures_table(figures))
        results.print(ratios(figures), soft_wrap=True)
        report = {**figures, "versions": versions()}
        marker = {"made_by": "hf-memopt demo", "labels": task.labels, "figures": report}
        check_output(output)  # minutes have passed
        publish(work / "model", output, marker)
    if json_file is not None:
        write_figures(json_file, report)
        results.print(f"Figures: {json_file}", soft_wrap=True)
    _ask_reloaded(output, task, results)


def _check_numbers(*, epochs: int, max_train: int | None) -> None:
    for name, number in (("epochs", epochs), ("max_train", max_train)):
        if number is not None and number < 1:
            raise DemoError(f"{name}={number!r} trains nothing; expected 1 or more. Call: hf-memopt demo")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn the first signal that asks to stop into KeyboardInterrupt; more of them do not disturb the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]  # no SIGHUP on Windows

    def stop(*_: Any) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- Data and children ----------------------------------------------------------------------------------------------


def prepare(
    work: Path, output: Path, *, max_train: int | None, sizes: Mapping[str, int], console: Console
) -> DocstringTask:
    """Read the docstrings, train the tokenizer and write both into ``work`` for the children; return the task.

    Raises:
        DemoError: this Python lacks the sources of its standard library, or the disk lacks room for the output.
    """
    from dataclasses import asdict, replace

    from rich.progress import Progress

    from hf_memopt.demo.docstring_task import (
        MissingSourcesError,
        docstring_task,
        read_docstrings,
        source_files,
        train_tokenizer,
    )

    try:
        files = source_files()
        with Progress(console=console, transient=True) as progress:
            reading = progress.add_task("Reading the standard library", total=len(files))
            module_of = read_docstrings(files, on_file=lambda: progress.advance(reading))
        task = docstring_task(module_of)
    except MissingSourcesError as error:
        raise DemoError(str(error)) from None
    with console.status("Training the tokenizer"):
        tokenizer = train_tokenizer(task.train_texts)
    task = replace(task, train_texts=task.train_texts[:max_train], train_labels=task.train_labels[:max_train])
    try:
        weight_bytes = _weight_bytes(len(tokenizer), task, dict(sizes))
    except Exception as error:  # transformers has several kinds of its own for sizes that do not fit
        raise DemoError(
            f"model={dict(sizes)!r} gives no BERT ({error}); expected fields of BertConfig that fit together. "
            "Call: run_demo(output, model={'hidden_size': 64, 'num_attention_heads': 2})"
        ) from error
    check_disk(output, weight_bytes + BESIDE_WEIGHTS_BYTES)
    tokenizer.save_pretrained(work / "tokenizer")
    write_whole(work / "task.json", json.dumps(asdict(task)))
    return task


def _weight_bytes(vocabulary_tokens: int, task: DocstringTask, sizes: dict[str, int]) -> int:
    import torch

    from hf_memopt.demo.setups import build_model, model_config

    with torch.device("meta"):
        model = build_model(model_config(vocabulary_tokens, task.labels, sizes), seed=0)
    return sum(parameter.nbytes for parameter in model.parameters())


def run_child(work: Path, arm: str, *, seed: int, epochs: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Train one arm in a child process and return its figures. The child ends with this process, however it ends.

    Raises:
        DemoError: the child failed or was killed.
    """
    from hf_memopt.demo.setups import ArmSpec

    spec = ArmSpec(arm=arm, folder=str(work), seed=seed, epochs=epochs, model=dict(sizes))
    spec.result_file.unlink(missing_ok=True)
    spec_file = work / f"{arm}.json"
    write_whole(spec_file, spec.to_json())
    child = _start_child([sys.executable, "-m", "hf_memopt.demo.run", str(spec_file)])
    try:
        exit_code = child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise
    finally:
        if child.stdin is not None:
            child.stdin.close()
    try:
        result: dict[str, Any] = json.loads(spec.result_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        result = {}
    if exit_code != 0:
        result.setdefault("error", f"its process ended with exit code {exit_code}")
    if "error" in result:
        raise DemoError(f"{TITLES[arm]} failed: {result['error']}")
    return result


def _start_child(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a child whose standard input closes with this process, and which Ctrl-C in a terminal does not reach.

    What it prints goes where its progress bars go, so that standard output holds the results alone.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits it, from its first moment on
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- Results --------------------------------------------------------------------------------------------------------


def figures_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the figures of the three runs side by side."""
    from rich.table import Table

    table = Table(title="Three set-ups of the stock Trainer, same weights, examples and seed", title_justify="left")
    table.add_column("")
    for arm in figures:
        table.add_column(TITLES[arm], justify="right")

    def row(name: str, cell: Any) -> None:
        table.add_row(name, *(cell(figures[arm]) for arm in figures))

    row("training, seconds", lambda f: f"{f['seconds']:.1f}")
    row("  of it the optimizer step", lambda f: f"{f['optimizer_seconds']:.1f}")
    row("examples/s", lambda f: f"{f['examples_per_second']:,.1f}")
    row("real tokens/s", lambda f: f"{f['real_tokens_per_second']:,.0f}")
    row("padding efficiency", lambda f: f"{f['padding_efficiency']:.3f}")
    row("optimizer state", lambda f: format_bytes(f["optimizer_state_bytes"]))
    for dtype in sorted({dtype for f in figures.values() for dtype in f["optimizer_state_bytes_by_dtype"]}):
        row(f"  in {dtype}", lambda f, dtype=dtype: format_bytes(f["optimizer_state_bytes_by_dtype"].get(dtype, 0)))
    if any(f["peak_reserved_bytes"] is not None for f in figures.values()):
        row("peak allocated", lambda f: _bytes_or_unknown(f["peak_bytes"]))
        row("peak reserved", lambda f: _bytes_or_unknown(f["peak_reserved_bytes"]))
    else:
        row("process peak above imports", lambda f: _bytes_or_unknown(f["peak_bytes"]))
    row(f"accuracy, {figures['baseline']['test_texts']} unseen texts", lambda f: f"{f['accuracy']:.3f}")
    return table


def _bytes_or_unknown(size_bytes: int | None) -> str:
    return "not told here" if size_bytes is None else format_bytes(size_bytes)


def ratios(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what the table says about (c), and a note where there is no accelerator."""
    naive, stock, ours = figures["baseline"], figures["stock_best"], figures["memopt"]

    def without_step(f: Mapping[str, Any]) -> float:
        return float((f["seconds"] - f["optimizer_seconds"]) / f["examples"])

    rest = without_step(stock) / without_step(ours)
    faster = ours["examples_per_second"] / naive["examples_per_second"]
    state = ours["optimizer_state_bytes"] / naive["optimizer_state_bytes"]
    text = (
        f"(c) is {faster:.1f}x as fast per example as (a), and {rest:.2f}x as fast as (b) "
        f"without the optimizer step; its optimizer state is {state:.2f}x that of (a)."
    )
    if ours["peak_reserved_bytes"] is None:
        text += "\nOn a CPU the 8-bit step of bitsandbytes costs far more than the fused one: it is written for cards."
    return text


def versions() -> dict[str, str]:
    """Return the versions that the figures belong to, and the device."""
    from hf_memopt.devices.memory_reading import read_memory

    found = {name: importlib.metadata.version(name) for name in VERSIONS_OF}
    return {"python": platform.python_version(), **found, "device": read_memory().device_name}


def _ask_reloaded(output: Path, task: DocstringTask, console: Console) -> None:
    """Load the saved model as any user would, and let it name the modules of three texts that it never saw."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hf_memopt.demo.setups import predict_labels

    model = AutoModelForSequenceClassification.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    texts = task.test_texts[:3]
    console.print(f"Model (c) saved in {output}, reloaded and asked which module these unseen docstrings are from:")
    for text, label, true in zip(texts, predict_labels(model, tokenizer, texts), task.test_labels, strict=False):
        start = " ".join(text.split())[:60]
        console.print(
            f"  {start!r}: {model.config.id2label[label]} (true: {task.labels[true]})", markup=False, soft_wrap=True
        )


def _end_with_parent() -> None:
    """End this process when its standard input closes: the parent holds the other end, and even a kill closes it."""
    os.read(0, 1)  # not sys.stdin: its lock would be held when this process ends by itself
    os._exit(1)


if __name__ == "__main__":  # a child of run_child
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it was not blocked; the parent ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from hf_memopt.demo.setups import main

    sys.exit(main(sys.argv[1]))
