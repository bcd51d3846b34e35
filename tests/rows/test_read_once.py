"""The lengths that ``lengths`` and ``plan --data`` count are those of the rows that ``read_rows`` makes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from tables import tables
from templates import CHATML, TOOLS, byte_tokenizer

from hf_memopt import read_rows
from hf_memopt.training.batching import data_file, file_lengths

ROWS = [tuple(row) for row in tables(__file__)["rows"]]


def grown(value: Any, times: int) -> Any:
    """Return a row with texts of another length, its labels and spans the same."""
    if isinstance(value, str) and value not in ("user", "assistant", "yes", "one two three", "two"):
        return value + " and more" * times
    if isinstance(value, dict):
        return {name: grown(part, times) for name, part in value.items()}
    return [grown(part, times) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("format_name", "task", "row"), ROWS)
def test_lengths_are_those_of_the_rows_that_are_trained(tmp_path: Any, format_name: str, task: str, row: Any) -> None:
    tokenizer = byte_tokenizer("</s>", CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [grown(row, at % 4) for at in range(8)]
    if format_name != "tokens":
        rows.append(dict.fromkeys(rows[0]))  # a row without anything
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = None if format_name == "tokens" else str(tmp_path / "tokenizer")
    counted = file_lengths(path, tokenizer=name, task=task)
    found = read_rows(datasets.Dataset.from_list(rows), tokenizer, task)
    sides = ("input_ids", "labels") if task == "seq2seq" else ("input_ids",)
    read = [max(len(row[name]) for name in sides) for part in (found.train, found.evaluation) for row in part]
    assert sorted(counted.lengths.tolist()) == sorted(read)
    assert (counted.file.format, found.format, counted.null_rows) == (format_name, format_name, len(rows) - 8)
    file = data_file(path, has_tokenizer=name is not None, task=task)
    assert (file.format, file.is_text) == (format_name, format_name != "tokens")
    again = read_rows(datasets.Dataset.from_list(rows), tokenizer, task, columns=file.parts)
    assert again.train[:] == found.train[:]


HEADINGS = {
    "prompt and completion": "columns 'prompt', 'completion' of rows as prompt and completion",
    "conversation": "column 'messages' of rows as conversation",
    "text and label": "column 'text'",
}


@pytest.mark.parametrize("format_name", HEADINGS)
def test_without_a_tokenizer_words_of_what_is_read_are_counted(tmp_path: Any, format_name: str) -> None:
    row = next(row for name, _, row in ROWS if name == format_name)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    counted = file_lengths(path)
    words = {"prompt and completion": 3, "conversation": 6, "text and label": 2}
    assert counted.lengths.tolist() == [words[format_name]]
    assert counted.heading("rows.jsonl") == (
        f"rows.jsonl: 1 file, json, {HEADINGS[format_name]}, split at white space into words (for tokens pass "
        "--tokenizer NAME)"
    )


def test_the_page_has_every_format_and_column() -> None:
    top = Path(__file__).parents[2]
    page = top.joinpath("docs", "cut-padding.md").read_text(encoding="utf-8")
    rows = {row.split(" | ")[0].strip("| "): row for row in page.splitlines() if row.startswith("| ")}
    with top.joinpath("hf_memopt", "training", "rows", "formats.csv").open(encoding="utf-8", newline="") as file:
        formats = list(csv.DictReader(file))
    for one in formats:
        row = rows[one["format"]]
        parts = [part.partition("=") for part in f"{one['columns']} {one['optional']}".split()]
        names = {name for part, _, usual in parts if part != "label" for name in (usual or part).split("/")}
        if one["format"] == "tokens":  # masks and types of tokens are kept as they are
            names &= {"input_ids", "labels", "start_positions", "end_positions"}
            row += one["tasks"]
        assert {f"`{name}`" for name in names} <= set(re.findall(r"`\w+`", row)), one
        assert all(task in row for task in one["tasks"].split())


def test_questions_are_counted_where_no_task_is_named(tmp_path: Any) -> None:
    tokenizer = byte_tokenizer("</s>", CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    row = {"question": "who", "context": "it is me", "answers": {"text": ["me"], "answer_start": [6]}}
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row) + "\n") * 3)
    lengths = file_lengths(path, tokenizer=str(tmp_path / "tokenizer")).lengths
    assert lengths.tolist() == [len(tokenizer("who", "it is me")["input_ids"])] * 3


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older datasets refuse the file")
def test_arguments_and_defaults_of_several_types_are_counted_as_they_are_trained(tmp_path: Path) -> None:
    lines = []
    for value in ("a", 3, [1], {"b": None}):
        calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": value}}}]
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
        turns += [{"role": "tool", "content": {"answer": 1}}, {"role": "assistant", "content": "yes"}]
        tool = {"name": "f", "parameters": {"properties": {"x": {"default": value}}}}
        lines.append(json.dumps({"messages": turns, "tools": [{"type": "function", "function": tool}]}))
    path, folder = tmp_path / "rows.jsonl", tmp_path / "tokenizer"
    lines.append(json.dumps({"messages": [], "tools": []}))  # is left out
    path.write_text("\n".join(lines))
    tokenizer = byte_tokenizer("<|im_end|>", TOOLS)
    tokenizer.save_pretrained(folder)
    loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))
    rows = read_rows(loaded, tokenizer, "causal-lm")
    trained = [len(row["input_ids"]) for row in (*rows.train, *rows.evaluation)]
    counted = file_lengths(path, tokenizer=str(folder), task="causal-lm").lengths
    assert sorted(trained) == sorted(counted.tolist())
