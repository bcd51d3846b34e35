"""What ``hf-memopt lengths`` does, and the length that ``estimate`` and ``plan`` take from the rows of ``--data``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_memopt.batching import data_file, file_lengths, padding_report, print_report
from hf_memopt.cli.command import wrapped
from hf_memopt.memory.models import name_on_hub
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import LengthsOptions

MULTIPLE = 8  # tensor cores want it, and collators pad to it
PREFIX_TOKENS = 8  # room for what T5 is told to do before each text, as in train.py; its own prefixes have 2 to 6


def run(options: LengthsOptions, context: Any) -> None:
    """Print what padding wastes on a data file, or draw it."""
    found = file_lengths(options.path, column=options.column, tokenizer=options.tokenizer)
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


def length_of_data(
    model: str, path: Path, column: str | None, tokenizer: str | None, task: str | None
) -> tuple[int, str]:
    """Return the 99th percentile of the lengths, rounded up to a multiple of 8, and a note that says so.

    Where the model takes fewer tokens, they are the length.

    Args:
        model: whose tokenizer counts the tokens of texts.
        path: as for ``file_lengths``, like ``column``.
        column: None for the likely one.
        tokenizer: None for the model's own; a column of token ids needs none.
        task: of the model's head.

    Raises:
        ValueError: as ``file_lengths``; texts for which the model has no tokenizer here.
    """
    seq_len, lengths = lengths_of_data(model, path, column, tokenizer, task)
    p99 = _percentile_99(lengths)
    limit = ", all that the model takes" if seq_len < p99 else ""
    longer = int((lengths > seq_len).sum())
    rest = f"; {longer:,} longer rows have to be truncated" if longer else ""
    note = (
        f"seq_len={seq_len} from {len(lengths):,} rows of {path.name}: p99 {p99:,}, longest "
        f"{int(lengths.max()):,} tokens{limit}{rest}"
    )
    return seq_len, note


def lengths_of_data(
    model: str, path: Path, column: str | None, tokenizer: str | None, task: str | None
) -> tuple[int, NDArray[np.int32]]:
    """Return the length as ``length_of_data`` does, and the tokens of each row, shape (rows,), of T5 with a prefix."""
    from hf_memopt.binding.model import task_of
    from hf_memopt.memory.models import load_model, most_tokens

    file = data_file(path, column=column, has_tokenizer=tokenizer is not None, task=task)
    built = load_model(model, task=task).model
    task = task_of(built)
    if tokenizer is None and file.is_text:
        lengths = _counted_by_model(model, path, column, task)
    else:
        lengths = file_lengths(path, column=column, tokenizer=tokenizer, task=task).lengths
    if file.is_text and task == "seq2seq" and getattr(built.config, "model_type", "") == "t5":
        lengths = lengths + PREFIX_TOKENS
    seq_len = -(-_percentile_99(lengths) // MULTIPLE) * MULTIPLE
    return min(seq_len, most_tokens(built) or seq_len), lengths


def _percentile_99(lengths: NDArray[np.int32]) -> int:
    return int(np.percentile(lengths, 99, method="inverted_cdf"))


def _counted_by_model(model: str, path: Path, column: str | None, task: str | None) -> NDArray[np.int32]:
    name = name_on_hub(model)
    try:
        return file_lengths(path, column=column, tokenizer=name, task=task).lengths
    except ValueError as error:
        lacks_template = "has no chat template" in str(error)
        if not lacks_template and not str(error).startswith(f"tokenizer={name!r}"):
            raise
        cause = str(error.__cause__ or "").strip().partition("\n")[0]  # gated, offline, no such repository
        problem = "has no chat template for them" if lacks_template else f"cannot be loaded here ({cause})"
        raise ValueError(
            f"path={str(path)!r} holds texts, and the tokenizer of {model!r} {problem}; expected token ids or a "
            "tokenizer that counts them. Pass --tokenizer FOLDER, or leave --data out and pass --seq-len 512"
        ) from error
