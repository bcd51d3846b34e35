"""What ``hf-memopt lengths`` does, and the length that ``estimate`` and ``plan`` take from the rows of ``--data``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_memopt.cli.command import wrapped
from hf_memopt.prediction.memory.models import name_on_hub
from hf_memopt.terminal import Console
from hf_memopt.training.batching import file_lengths, padding_report, print_report
from hf_memopt.training.rows import TASKS, fitting_format

if TYPE_CHECKING:
    from hf_memopt.cli.options import LengthsOptions
    from hf_memopt.prediction.recipes.planning.script import RowsFile

OF_LABELS = ("sequence-classification", "token-classification", "question-answering")  # any body takes their heads
PER_TOKEN = ("labels", "tags")  # the parts that are a list of a number for each token
MULTIPLE = 8  # tensor cores want it, and collators pad to it
PREFIX_TOKENS = 8  # room for what T5 is told to do before each text, as in train.py; its own prefixes have 2 to 6


def run(options: LengthsOptions, context: Any) -> None:
    """Print what padding wastes on a data file, or draw it."""
    found = file_lengths(options.path, column=options.column, tokenizer=options.tokenizer, field=options.field)
    sizes = {name: getattr(options, name) for name in ("batch_size", "max_tokens", "max_length")}
    report = padding_report(found.lengths, unit=found.unit, **sizes)
    if options.plot is not None:
        report.plot(options.plot)
    console = Console()
    if options.json_output:
        figures = {"path": str(options.path), **found.as_dict(), **report.as_dict()}
        console.out(json.dumps(figures, indent=2), highlight=False)
        return
    console.out(wrapped(found.heading(options.path), console), highlight=False)
    print_report(report, console)
    if options.plot is not None:
        console.out(f"Picture: {options.plot}", highlight=False)


def task_of_data(model: str, rows: RowsFile, task: str | None) -> tuple[str | None, str]:
    """Return the task of the head, and a sentence on it where rows and model or ``--task`` do not agree; else "".

    Labels in the rows decide where no ``--task`` is given and the model's own task would leave them out. A causal LM is
    trained on the text beside a number that may describe it ("score", "stars"); "label" and "labels" decide there too.
    """
    from hf_memopt.prediction.memory.models import load_model
    from hf_memopt.training.binding.model import HEADS, task_of

    file, built, name = rows.read(), load_model(model).model, Path(rows.path).name
    own = task_of(built)
    chosen, why = (task, "as --task says") if task else (own, "the model's own")
    found = fitting_format(file.columns, chosen, {part: one for part, one in file.parts.items() if one == rows.column})
    read = {} if found is None else found[1]
    learned = [column for part, column in read.items() if part not in PER_TOKEN or column not in file.values]
    left = ", ".join(column for column in file.parts.values() if column not in learned)
    labels, meant = file.parts.get("label", "label"), str(file.task)
    has_head = meant in OF_LABELS and getattr(built.config, "model_type", "") in HEADS[meant].types
    if not left or chosen not in TASKS or (read and not has_head):
        return chosen, ""
    if not has_head:
        return chosen, f"Task: {chosen}, {why}; {name} has no column for it beside {left}."
    if task or (own == "causal-lm" and labels not in ("label", "labels")):
        return chosen, f"Task: {chosen}, {why}; {left} of {name} is not learned (--task {meant} learns it)."
    columns = ", ".join(file.parts.values())
    return meant, f"Task: {meant}, by the columns {columns} of {name}; the model's own is {own} (--task {own})."


def length_of_data(model: str, rows: RowsFile, task: str | None) -> tuple[int, str]:
    """Return the 99th percentile of the lengths, rounded up to a multiple of 8, and a note that says so.

    Where the model takes fewer tokens, they are the length. The model's tokenizer counts where none is given.
    """
    seq_len, lengths = lengths_of_data(model, rows, task)
    p99 = _percentile_99(lengths)
    limit = ", all that the model takes" if seq_len < p99 else ""
    longer = int((lengths > seq_len).sum())
    rest = f"; {longer:,} longer rows have to be truncated" if longer else ""
    note = (
        f"seq_len={seq_len} from {len(lengths):,} rows of {Path(rows.path).name}: p99 {p99:,}, longest "
        f"{int(lengths.max()):,} tokens{limit}{rest}"
    )
    return seq_len, note


def lengths_of_data(model: str, rows: RowsFile, task: str | None) -> tuple[int, NDArray[np.int32]]:
    """Return the length as ``length_of_data`` does, and the tokens of each row, shape (rows,), of T5 with a prefix."""
    from hf_memopt.prediction.memory.models import load_model, most_tokens
    from hf_memopt.training.binding.model import task_of

    file = rows.read(task)
    built = load_model(model, task=task).model
    task = task_of(built)
    lengths = _counted_by_model(model, rows, task) if rows.tokenizer is None and file.is_text else _counted(rows, task)
    if file.is_text and task == "seq2seq" and getattr(built.config, "model_type", "") == "t5":
        lengths = lengths + PREFIX_TOKENS
    seq_len = -(-_percentile_99(lengths) // MULTIPLE) * MULTIPLE
    return min(seq_len, most_tokens(built) or seq_len), lengths


def _percentile_99(lengths: NDArray[np.int32]) -> int:
    return int(np.percentile(lengths, 99, method="inverted_cdf"))


def _counted(rows: RowsFile, task: str | None) -> NDArray[np.int32]:
    how: dict[str, Any] = {"column": rows.column, "tokenizer": rows.tokenizer, "field": rows.field}
    return file_lengths(Path(rows.path), task=task, **how).lengths


def _counted_by_model(model: str, rows: RowsFile, task: str | None) -> NDArray[np.int32]:
    name = name_on_hub(model)
    try:
        return _counted(replace(rows, tokenizer=name), task)
    except ValueError as error:
        lacks_template = "has no chat template" in str(error)
        if not lacks_template and not str(error).startswith(f"tokenizer={name!r}"):
            raise
        cause = str(error.__cause__ or "").strip().partition("\n")[0]  # gated, offline, no such repository
        problem = "has no chat template for them" if lacks_template else f"cannot be loaded here ({cause})"
        raise ValueError(
            f"path={str(rows.path)!r} holds texts, and the tokenizer of {model!r} {problem}; expected token ids or a "
            "tokenizer that counts them. Pass --tokenizer FOLDER, or leave --data out and pass --seq-len 512"
        ) from error
