"""The part of a training script that reads the data: tokenizer, rows, and what is known of them.

What a causal or masked language model and a text classifier need is known from the data file. Of other tasks it is
not: there the script has one function, ``examples``, which the user completes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_memopt.recipes.planning.script.code import Argument, call, commented, quoted

if TYPE_CHECKING:
    from hf_memopt.batching.padding_costs.data_files import DataFile

__all__ = ["FILL_IN", "KNOWN", "Rows", "rows_of"]

FILL_IN = "FILL IN"
"""Marks what the user completes."""
KNOWN = ("causal-lm", "masked-lm", "sequence-classification")
"""The tasks whose rows follow from the data file."""
WITHOUT_VIEWS = ("image-classification", "speech-seq2seq")
"""The tasks whose inputs have one size, so that there is nothing to sort by length."""
EVALUATED = 0.02  # of the rows
CUT = (Argument("truncation=True"), Argument("max_length=LENGTH"))


@dataclass(frozen=True)
class Rows:
    """The lines that make ``data``, and what the rest of the script has to know of them.

    Attributes:
        lines: of the script.
        imports: names by the modules that they come from.
        processor: the variable that turns texts, images or sound into tensors.
        labels: an expression of the number of classes; "" where there are none.
        to_fill_in: what the user has to complete; "" for nothing.
    """

    lines: list[str]
    imports: Mapping[str, tuple[str, ...]]
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
    lines = [f"{variable} = {auto}.from_pretrained({name})"]
    if task in ("causal-lm", "sequence-classification", "token-classification"):
        pad = "tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token"
        lines += commented(pad, "decoders have none")
    make = _known_rows if task in KNOWN else _filled_in_rows
    found = make(task, file)
    split = commented(f"data = data.train_test_split({EVALUATED}, seed=0)", f"{EVALUATED:.0%} for evaluation")
    imports = {**found.imports, "transformers": (auto,)}
    return Rows(
        [*lines, *found.lines, *split], imports, variable, found.labels, found.to_fill_in, task not in WITHOUT_VIEWS
    )


# ---- Known rows


def _known_rows(task: str, file: DataFile | None) -> Rows:
    classified = task == "sequence-classification"
    columns = () if file is None else file.columns
    label = next((name for name in ("label", "labels") if name in columns), "label")
    missing = []
    if file is None:
        missing.append("the data file and the names of its columns")
    elif classified and label not in columns:
        missing.append("the name of the column of classes")
    marked = [f"# {FILL_IN}: {missing[0]}"] if missing else []
    column = "text" if file is None else file.column
    lines = ["", *marked, *_load(file)]
    lines += commented(f"data = data.filter(lambda row: row[{quoted(column)}])", "an empty row teaches nothing")
    if classified:
        lines += call("data = data.select_columns", [Argument(f"[{quoted(column)}, {quoted(label)}]")])
        lines += call("data = data.class_encode_column", [Argument(quoted(label))])
    lines += _tokenised(column, file is None or file.is_text, columns, classified)
    labels = f'data["train"].features[{quoted(label)}].num_classes' if classified else ""
    return Rows(lines, _datasets(file), labels=labels, to_fill_in="".join(missing))


def _tokenised(column: str, is_text: bool, columns: tuple[str, ...], classified: bool) -> list[str]:
    """Return the lines that make rows of token ids of at most LENGTH tokens."""
    if is_text:
        encode = call("return tokenizer", [Argument(f"rows[{quoted(column)}]"), *CUT], indent="    ")
        encode = ["def encode(rows):", *encode]
    else:
        ids = [Argument(f'"input_ids": row[{quoted(column)}][:LENGTH]')]
        if "labels" in columns and not classified:  # one label for each token
            ids.append(Argument('"labels": row["labels"][:LENGTH]'))
        encode = ["def encode(row):", f"    return {{{', '.join(one.code for one in ids)}}}"]
    removed = f"[{quoted(column)}]" if classified else "data.column_names"
    arguments = [Argument("encode"), *([Argument("batched=True")] if is_text else [])]
    lines = call("data = data.map", [*arguments, Argument(f"remove_columns={removed}")])
    return ["", "", *encode, "", "", *lines]


def _load(file: DataFile | None, indent: str = "") -> list[str]:
    if file is not None and file.is_saved:
        return call("data = load_from_disk", [Argument(quoted(file.path))], indent=indent)
    kind, path = ("json", "train.jsonl") if file is None else (file.kind, file.path)
    where = "data_dir" if file is not None and file.is_folder else "data_files"
    arguments = [quoted(kind), f"{where}={quoted(path)}", 'split="train"']
    return call("data = load_dataset", map(Argument, arguments), indent=indent)


def _datasets(file: DataFile | None) -> dict[str, tuple[str, ...]]:
    return {"datasets": ("load_from_disk" if file is not None and file.is_saved else "load_dataset",)}


# ---- Rows that the user describes

ENCODERS = {
    "seq2seq": (
        "the columns of the texts to read and to write",
        """
        cut = {{"truncation": True, "max_length": LENGTH}}
        found = tokenizer(rows[{column}], **cut)
        wanted = tokenizer(text_target=rows["target"], **cut)
        return {{**found, "labels": wanted["input_ids"]}}
        """,
    ),
    "token-classification": (
        "the columns of the words and of their classes, and LABELS",
        """
        cut = {{"truncation": True, "max_length": LENGTH}}
        found = tokenizer(rows["tokens"], is_split_into_words=True, **cut)
        found["labels"] = []
        for i, tags in enumerate(rows["tags"]):
            words = found.word_ids(i)  # None for special tokens
            labels = [-100 if word is None else tags[word] for word in words]
            found["labels"].append(labels)
        return found
        """,
    ),
    "question-answering": (
        "the columns, and the tokens where an answer starts and ends",
        """
        texts = rows["question"], rows["context"]
        found = tokenizer(*texts, truncation=True, max_length=LENGTH)
        found["start_positions"] = rows["start"]
        found["end_positions"] = rows["end"]
        return found
        """,
    ),
    "image-classification": (
        "the folder of images, one subfolder for each class, and LABELS",
        """
        images = [image.convert("RGB") for image in rows["image"]]
        found = processor(images, return_tensors="pt")
        return {{"pixel_values": found["pixel_values"], "labels": rows["label"]}}
        """,
    ),
    "speech-seq2seq": (
        "the folder of sounds, and the column of what is said in them",
        """
        sounds = [sound["array"] for sound in rows["audio"]]
        found = processor.feature_extractor(sounds, sampling_rate=RATE)
        wanted = processor.tokenizer(rows["text"], truncation=True, max_length=LENGTH)
        return {{**found, "labels": wanted["input_ids"]}}
        """,
    ),
}
"""What the user has to complete, and the body of ``encode`` to begin with, by task."""


def _filled_in_rows(task: str, file: DataFile | None) -> Rows:
    what, body = ENCODERS[task]
    column = quoted("text" if file is None or not file.is_text else file.column)
    inner = body.format(column=column).strip("\n").rstrip().splitlines()
    lines = ["", "", "def examples():", f'    """{FILL_IN}: {what}."""', "", "    def encode(rows):", *inner, ""]
    labels = "LABELS" if task in ("token-classification", "image-classification") else ""
    imports = _datasets(file)
    if task == "image-classification":
        imports = {"datasets": ("load_dataset",)}
        lines += ['    data = load_dataset("imagefolder", data_dir="images", split="train")']
        lines += ["    return data.with_transform(encode)"]
    elif task == "speech-seq2seq":
        imports = {"datasets": ("Audio", "load_dataset")}
        lines += ['    data = load_dataset("audiofolder", data_dir="sounds", split="train")']
        lines += ['    data = data.cast_column("audio", Audio(RATE))']
        lines += ["    return data.map(encode, batched=True, remove_columns=data.column_names)"]
    else:
        lines += _load(file, "    ")
        lines += ["    return data.map(encode, batched=True, remove_columns=data.column_names)"]
    if task == "speech-seq2seq":
        lines = ["RATE = processor.feature_extractor.sampling_rate", *lines]
    if labels:
        lines = [f"LABELS = 2  # {FILL_IN}: the number of classes", *lines]
    return Rows([*lines, "", "", "data = examples()"], imports, labels=labels, to_fill_in=f"examples(): {what}")
