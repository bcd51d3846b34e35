"""The part of a training script that reads the data: tokenizer, rows, and what is known of them.

What a causal or masked language model and a text classifier need is known from the data file. Of other tasks it is
not: there the script has a function, ``encode``, whose columns the user names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING

from hf_memopt.recipes.planning.script.code import COLUMNS, Argument, call, commented, quoted

if TYPE_CHECKING:
    from hf_memopt.batching.padding_costs.data_files import DataFile

__all__ = ["FILL_IN", "KNOWN", "Rows", "rows_of"]

FILL_IN = "FILL IN"
"""Marks what the user completes."""
KNOWN = ("causal-lm", "masked-lm", "sequence-classification")
"""The tasks whose rows follow from the data file."""
WITHOUT_VIEWS = ("image-classification", "speech-seq2seq")
"""The tasks whose inputs have one size, so that there is nothing to sort by length."""
BY_ROW = ("token-classification", "speech-seq2seq")
"""The tasks whose rows are encoded one by one."""
SPLIT = ("train_test_split", ["0.02", "seed=0"])
EVALUATION = "2% for evaluation"
EACH_COLUMN = "{name: ids[:LENGTH] for name, ids in row.items()}"


@dataclass(frozen=True)
class Rows:
    """The lines that make ``data``, and what the rest of the script has to know of them.

    Attributes:
        lines: of the script.
        processor: the variable that turns texts, images or sound into tensors.
        labels: an expression of the number of classes; "" where there are none.
        to_fill_in: what the user has to complete; "" for nothing.
    """

    lines: list[str]
    processor: str = "tokenizer"
    labels: str = ""
    to_fill_in: str = ""
    sorted: bool = field(default=True)


def rows_of(task: str, file: DataFile | None, tokenizer: str | None) -> Rows:
    """Return how the rows of a task are read.

    Args:
        task: of the model's head.
        file: the data; None where none was given.
        tokenizer: a folder or name; None for the model's own.
    """
    auto = {"image-classification": "AutoImageProcessor", "speech-seq2seq": "AutoProcessor"}.get(task, "AutoTokenizer")
    variable = "tokenizer" if auto == "AutoTokenizer" else "processor"
    name = "NAME" if tokenizer is None else quoted(tokenizer)
    lines = [f"{variable} = transformers.{auto}.from_pretrained({name})"]
    if task in ("causal-lm", "sequence-classification", "token-classification"):
        pad = "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token"
        lines += commented(pad, "many decoders have none")
    make = _known_rows if task in KNOWN else _encoded_rows
    found = make(task, file)
    return Rows([*lines, *found.lines], variable, found.labels, found.to_fill_in, task not in WITHOUT_VIEWS)


def _steps(*calls: tuple[str, list[str]], reason: str = "") -> list[str]:
    """Return methods of ``data`` that are called one after the other: in one line where it fits, else in a line each.

    Args:
        calls: names of methods and their arguments.
        reason: a comment on the last one.
    """
    line = "data = data" + "".join(f".{name}({', '.join(arguments)})" for name, arguments in calls)
    if len(line) <= COLUMNS:
        return commented(line, reason)
    *before, (name, arguments) = calls
    first = [line for one in before for line in _steps(one)] if before else []
    return [*first, *call(f"data = data.{name}", map(Argument, arguments), reason)]


def _load(file: DataFile | None) -> list[str]:
    if file is not None and file.is_saved:
        return call("data = datasets.load_from_disk", [Argument(quoted(file.path))])
    kind, path = ("json", "train.jsonl") if file is None else (file.kind, file.path)
    where = "data_dir" if file is not None and file.is_folder else "data_files"
    arguments = [quoted(kind), f"{where}={quoted(path)}", 'split="train"']
    return call("data = datasets.load_dataset", map(Argument, arguments))


# ---- Known rows


def _known_rows(task: str, file: DataFile | None) -> Rows:
    classified = task == "sequence-classification"
    columns = () if file is None else file.columns
    label = next((name for name in ("label", "labels") if name in columns), "label")
    missing = ""
    if file is None:
        missing = "the data file and the names of its columns"
    elif classified and label not in columns:
        missing = "the name of the column of classes"
    column = quoted("text" if file is None else file.column)
    is_text = file is None or file.is_text
    per_token = not is_text and not classified and "labels" in columns  # a label for each token
    kept = [column, *([quoted(label)] if classified else ['"labels"'] if per_token else [])]
    chosen = column if len(kept) == 1 else f"[{', '.join(kept)}]"
    lines = [*([f"# {FILL_IN}: {missing}"] if missing else []), *_load(file)]
    full = ("filter", ["bool", f"input_columns={column}"])
    lines += _steps(("select_columns", [chosen]), full, reason="without empty rows")
    if classified:
        lines += _steps(("class_encode_column", [quoted(label)]))
    if is_text:
        lines += _steps(("map", ["tokenizer", "batched=True", f"input_columns={column}", "fn_kwargs=CUT"]))
        lines += _steps(("remove_columns", [column]), SPLIT, reason=EVALUATION)
    else:
        renamed = [] if column == '"input_ids"' else [("rename_column", [column, '"input_ids"'])]
        of_row = '{"input_ids": row["input_ids"][:LENGTH]}' if classified else EACH_COLUMN
        lines += [*_steps(*renamed, ("map", [f"lambda row: {of_row}"])), *_steps(SPLIT, reason=EVALUATION)]
    labels = f'data["train"].features[{quoted(label)}].num_classes' if classified else ""
    return Rows(lines, labels=labels, to_fill_in=missing)


# ---- Rows that the user describes

ENCODERS = {
    "seq2seq": (
        "the columns of the texts to read and to write",
        """
        return tokenizer(rows[{column}], text_target=rows["target"], **CUT)
        """,
    ),
    "token-classification": (
        "the columns of the words and of their classes, and LABELS",
        """
        found = tokenizer(row["tokens"], is_split_into_words=True, **CUT)
        words, tags = found.word_ids(), row["tags"]  # None for special tokens
        return {{**found, "labels": [-100 if word is None else tags[word] for word in words]}}
        """,
    ),
    "question-answering": (
        "the columns, and the tokens where an answer starts and ends",
        """
        found = tokenizer(rows["question"], rows["context"], **CUT)
        return {{**found, "start_positions": rows["start"], "end_positions": rows["end"]}}
        """,
    ),
    "image-classification": (
        "the folder of images, with a subfolder for each class",
        """
        images = [image.convert("RGB") for image in rows["image"]]
        found = processor(images, return_tensors="pt")
        return {{"pixel_values": found["pixel_values"], "labels": rows["label"]}}
        """,
    ),
    "speech-seq2seq": (
        "the folder of sounds, and the column of what is said in them",
        """
        found = processor.feature_extractor(row["audio"]["array"], sampling_rate=RATE)
        labels = processor.tokenizer(row["text"], **CUT)["input_ids"]
        return {{"input_features": found["input_features"][0], "labels": labels}}
        """,
    ),
}
"""What the user has to complete, and the body of ``encode`` to begin with, by task."""


def _encoded_rows(task: str, file: DataFile | None) -> Rows:
    what, body = ENCODERS[task]
    column = quoted("text" if file is None or not file.is_text else file.column)
    inner = dedent(body.format(column=column)).strip().splitlines()
    before, labels, load = [], "", _load(file)
    mapped = ["data = data.map(encode, batched=True, remove_columns=data.column_names)"]
    if task == "token-classification":
        before, labels = [f"LABELS = 2  # {FILL_IN}: the number of classes"], "LABELS"
    elif task == "image-classification":
        labels = 'data["train"].features["label"].num_classes'
        load = ['data = datasets.load_dataset("imagefolder", data_dir="images", split="train")']
        mapped = ["data = data.with_transform(encode)"]
    elif task == "speech-seq2seq":
        before = ["RATE = processor.feature_extractor.sampling_rate"]
        load = ['data = datasets.load_dataset("audiofolder", data_dir="sounds", split="train")']
        load += ['data = data.cast_column("audio", datasets.Audio(RATE))']
    row = "row" if task in BY_ROW else "rows"
    if task in BY_ROW:
        mapped = ["data = data.map(encode, remove_columns=data.column_names)"]
    encode = ["", "", f"# {FILL_IN}: {what}", f"def encode({row}):", *(f"    {line}" for line in inner), "", ""]
    lines = [*before, *encode, *load, *mapped, *_steps(SPLIT, reason=EVALUATION)]
    return Rows(lines, labels=labels, to_fill_in=f"encode(): {what}")
