"""Count the lengths of the examples in data files, for ``hf-memopt lengths`` and ``--data``: token ids, or texts.

The columns are read by ``file_readers``. Texts are counted in tokens where a tokenizer is given, as ``read_rows``
encodes rows of their format, else in words.

Limitations: local files only; transforms that a dataset would apply are not applied.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hf_memopt.batching import is_list
from hf_memopt.batching.padding_costs.file_readers import first_line, likely_type, open_source, reading
from hf_memopt.errors import did_you_mean
from hf_memopt.hub import hub_answers
from hf_memopt.rows import FORMATS, OPTIONAL, READ, TEXTS, Encoder, Format, fitting_format, words_of

KINDS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
}
COMPRESSED = (".gz", ".bz2", ".zst")  # JSON Lines and CSV only; pyarrow decompresses them by this ending
ENDINGS = f"one of {', '.join(KINDS)}, or a folder of them"
IDS = ("input_ids", "labels")  # the parts that are lists of integers
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class DataFile:
    """What a data file holds, by its schema."""

    path: str  # as it was given
    kind: str  # "parquet", "arrow", "json" or "csv", as `datasets` calls its readers
    is_folder: bool  # whether `path` is a folder of such files
    is_saved: bool  # whether `Dataset.save_to_disk` wrote it
    column: str  # the one of texts or token ids
    is_text: bool  # whether that holds texts
    columns: tuple[str, ...]  # all of them
    format: str = ""  # of the rows, as `read_rows` calls it; "" where none fits
    parts: Mapping[str, str] = field(default_factory=dict)  # the column of each part, as `read_rows` takes them
    task: str | None = None  # the first one whose rows are written so, where none was given
    sources: Sequence[Path] = ()  # the files, or folders of saved datasets
    unread: tuple[str, ...] = ()  # columns of texts that are no part
    values: tuple[str, ...] = ()  # columns of one number, one truth or one text a row


@dataclass(frozen=True)
class FileLengths:
    """The result of ``file_lengths``."""

    lengths: NDArray[np.int32]  # (examples,), without null and empty rows, which a bucketed view refuses
    unit: Literal["tokens", "words"]  # words where texts were split at white space
    columns: tuple[str, ...]  # what was counted
    file: DataFile
    null_rows: int  # without a value in a column that they need
    empty_rows: int  # of length 0, or with nothing to learn

    @property
    def column(self) -> str:
        """The column that was counted, or several with commas."""
        return ", ".join(self.columns)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the lengths for JSON."""
        of_file = {"kind": self.file.kind, "files": len(self.file.sources), "format": self.file.format}
        return of_file | {name: getattr(self, name) for name in ("column", "unit", "null_rows", "empty_rows")}

    def heading(self, path: str | Path) -> str:
        """Return lines of text that say what was read and counted."""
        count = len(self.file.sources)
        files = "1 file" if count == 1 else f"{count} files"
        how = ", split at white space into words (for tokens pass --tokenizer NAME)" if self.unit == "words" else ""
        form = self.file.format
        rows = f" of rows as {form}" if len(self.columns) > 1 or form == "conversation" else ""
        columns = f"column{'s' * (len(self.columns) > 1)} {', '.join(map(repr, self.columns))}"
        lines = [f"{path}: {files}, {self.file.kind}, {columns}{rows}{how}"]
        if self.null_rows or self.empty_rows:
            full = " and ".join(f"row[{column!r}]" for column in self.columns)
            lines.append(
                f"Skipped: {self.null_rows:,} null and {self.empty_rows:,} empty rows; remove them before training:\n"
                f"    dataset.filter(lambda row: {full})"
            )
        return "\n".join(lines)


def file_lengths(
    path: str | Path, *, column: str | None = None, tokenizer: str | None = None, task: str | None = None
) -> FileLengths:
    """Return the length of every example in a file, or in a folder of files of one kind.

    A folder is searched with its subfolders; hidden files and other kinds of files are skipped. A folder that
    ``Dataset.save_to_disk`` wrote is read as that dataset. With a tokenizer the lengths are those of ``read_rows``,
    else words are counted. To train an encoder-decoder, a row is as long as the longer of its source and its target.

    Args:
        path: the file or folder.
        column: lists of token ids or texts; by default the columns of the first format that fits, else the only column
            of texts (with a tokenizer texts are preferred to ``input_ids``).
        tokenizer: a folder or a name on the Hub for ``AutoTokenizer``.
        task: of the model's head, which decides where several formats fit; None for any.

    Raises:
        ValueError: a path, a column, rows or a tokenizer that cannot be read.
    """
    from tqdm.auto import tqdm

    file = data_file(path, column=column, has_tokenizer=tokenizer is not None, task=task)
    if tokenizer is not None and not file.is_text:
        raise ValueError(
            f"tokenizer={tokenizer!r} has no text to split: column {file.column!r} holds token ids already; expected a "
            "column of texts. Leave the tokenizer out, or name another column: --column NAME"
        )
    parts = file.parts or {"text" if file.is_text else "input_ids": file.column}
    if task is None or tokenizer is None:  # whoever trains decides what the labels are
        wanted = (*READ, "tools", *(IDS if task == "seq2seq" else ()))
        parts = {part: name for part, name in parts.items() if part in wanted}
    count = _counter(parts, file, tokenizer, task)
    needed = [name for part, name in parts.items() if part not in OPTIONAL]
    lengths, null_rows, rows = [], 0, 0
    with tqdm(unit=" rows", desc="Reading lengths", delay=1.0, leave=False) as progress:
        for batch in _batches(file, parts):
            is_null = np.any([batch[name].is_null() for name in needed], axis=0)
            null_rows, rows = null_rows + int(is_null.sum()), rows + len(is_null)
            progress.update(len(is_null))
            lengths.append(count(batch.filter(pa.array(~is_null))))
    counted = np.concatenate([np.empty(0, dtype=np.int32), *lengths])
    full = counted[counted > 0]
    empty_rows = rows - null_rows - len(full)
    columns = tuple(name for part, name in parts.items() if part in READ)
    if len(full) == 0:
        where = f"column{'s' * (len(columns) > 1)} {', '.join(map(repr, columns))}"
        found = f"{null_rows} null and {empty_rows} empty rows in {where}, and no other"
        raise ValueError(f"path={str(path)!r} holds {found}; expected at least one example. Check what wrote it")
    unit: Literal["tokens", "words"] = "words" if file.is_text and tokenizer is None else "tokens"
    return FileLengths(full, unit, columns, file, null_rows, empty_rows)


def _batches(file: DataFile, parts: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    for source in file.sources:
        with reading(source, file.kind):
            schema, read = open_source(source, file.kind)
            _check_parts(schema, parts, source, file.sources[0])
            yield from read(list(dict.fromkeys(parts.values())))


def data_file(
    path: str | os.PathLike[str], *, column: str | None = None, has_tokenizer: bool = False, task: str | None = None
) -> DataFile:
    """Return what a data file holds, without reading its rows; the columns are chosen as ``file_lengths`` does.

    With ``has_tokenizer`` texts are preferred to token ids. The errors too are those of ``file_lengths``.
    """
    try:
        kind, sources = _find(Path(path))
    except OSError as error:  # no permission, a name that is too long, a circle of links
        raise ValueError(
            f"path={str(path)!r} cannot be searched ({first_line(error)}); expected a file or folder that may be "
            "read. Call: hf-memopt lengths FILE"
        ) from error
    with reading(sources[0], kind):
        schema, _ = open_source(sources[0], kind)
    found, column, is_text = _format_of(schema, sources[0], column, task, has_tokenizer=has_tokenizer)
    is_saved = sources[0].is_dir()
    form, parts = found or (None, {})
    unread = [one.name for one in schema if _is_text(one.type) and one.name not in (column, *parts.values())]
    file = DataFile(
        *(os.fspath(path), kind, Path(path).is_dir(), is_saved, column, is_text, tuple(schema.names)),
        parts=parts,
        sources=sources,
        unread=tuple(unread),
        values=tuple(one.name for one in schema if not pa.types.is_nested(one.type)),
    )
    return file if form is None else replace(file, format=form.name, task=task or form.tasks[0])


def _format_of(
    schema: pa.Schema, source: Path, column: str | None, task: str | None, *, has_tokenizer: bool
) -> tuple[tuple[Format, dict[str, str]] | None, str, bool]:
    """Return the format and the columns of its parts, the main column, and whether that holds texts."""
    if column is None:
        names = [name for name in schema.names if not has_tokenizer or name != "input_ids"]
        found = fitting_format(names, task, {})
        if found is not None:
            part, name = next(iter(found[1].items()))
            texts = [likely_type(schema.field(one).type) for own, one in found[1].items() if own in TEXTS]
            if all(map(_is_text, texts)) and (part not in IDS or not _check_column(schema, name, source)):
                return found, name, part not in IDS
        column = _choose_column(schema, source, task, has_tokenizer=has_tokenizer)
    is_chat = column in schema.names and "struct" in str(schema.field(column).type)
    is_text = is_chat or _check_column(schema, column, source)
    likely = ("messages",) if is_chat else ("text", "source") if is_text else ("input_ids",)
    each = (fitting_format(schema.names, task, {part: column}) for part in likely)
    return next((one for one in each if one is not None), None), column, is_text


# ---- Which files -----------------------------------------------------------------------------------------------------


def _find(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files and their paths; a saved dataset's folder counts as one file."""
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        action = "Check the path"
        if re.fullmatch(r"[\w-]+(/[\w.-]+)?", str(path)):  # could be the name of a dataset on the hub
            name, file = str(path), f"{path.name}.parquet"
            action = f"Save a dataset of the hub first: load_dataset({name!r}, split='train').to_parquet({file!r})"
        raise ValueError(
            f"path={str(path)!r} does not exist; expected a file or a folder.{did_you_mean(path.name, siblings)} "
            f"{action}"
        )
    if not path.is_dir():
        kind = _kind(path)
        if kind is None:
            raise ValueError(f"path={str(path)!r} is not a known kind of file; expected {ENDINGS}. Convert it first")
        return kind, [path]
    found = [(_kind(source) or "arrow", source) for source in _sources(path, {os.path.realpath(path)})]
    if not found:
        raise ValueError(f"path={str(path)!r} holds no data files; expected {ENDINGS}. Name another folder")
    kinds = Counter(kind for kind, _ in found)
    if len(kinds) > 1:
        mixture = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ValueError(
            f"path={str(path)!r} mixes files of several kinds, {mixture}; expected one kind. "
            f"Pass path={str(found[0][1])!r}"
        )
    return found[0][0], [source for _, source in found]


def _sources(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield the data files below a folder, each once even if several links lead to it."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "_")))
    names = {entry.name for entry in entries}
    if "dataset_dict.json" in names:
        splits = [entry.name for entry in entries if entry.is_dir()]
        raise ValueError(
            f"path={str(folder)!r} holds the splits {', '.join(splits)}; expected one dataset. "
            f"Pass path={str(folder / splits[0] if splits else folder)!r}"
        )
    if {"state.json", "dataset_info.json"} <= names:
        yield folder
        return
    for entry in entries:
        real = os.path.realpath(entry)
        if real in seen or not (entry.is_dir() or (_kind(entry) is not None and entry.name not in METADATA)):
            continue
        seen.add(real)
        if entry.is_dir():
            yield from _sources(entry, seen)
        else:
            yield entry


def _kind(file: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED and KINDS.get("".join(suffixes[-2:-1])) in ("json", "csv"):
        suffixes.pop()
    return KINDS.get(suffixes[-1]) if suffixes else None


# ---- Which column, and what it holds --------------------------------------------------------------------------------


def _choose_column(schema: pa.Schema, source: Path, task: str | None, *, has_tokenizer: bool) -> str:
    texts = [field.name for field in schema if _is_text(field.type)]
    only = texts if len(texts) == 1 else []
    likely = [*only, "text", "input_ids"] if has_tokenizer else ["input_ids", "text", *only]
    found = next((name for name in likely if name in schema.names), None)
    if found is not None:
        return str(found)
    found_as, expected, how = "no column of texts", f"one of {sorted(schema.names)} by name", "Pass --column NAME"
    if texts:
        found_as = f"{len(texts)} columns of texts, {', '.join(texts)}"
        expected = f"columns of a format, such as prompt and completion, or {expected}"
        how = "Rename them in the data, or pass --column NAME to read that one alone"
    found_as = f"neither 'input_ids' nor 'text', and {found_as}"
    other, its_own = (fitting_format(schema.names, one, {}) for one in (None, task))
    if other is not None and its_own is None and "text" not in other[1]:
        tasks = " or ".join(other[0].tasks)
        found_as = f"{', '.join(other[1].values())}, rows of {other[0].name}, which are for {tasks}"
        own = [", ".join(names[0] for names in one.columns.values()) for one in FORMATS if task in one.tasks]
        expected = f"columns for {task}: {' or '.join(dict.fromkeys(own))}"
        is_head = tasks in ("sequence-classification", "token-classification", "question-answering")
        how = f"Pass --task {tasks}" if is_head else f"Take a model of {tasks}, or rename them in the data"
    raise ValueError(f"path={str(source)!r} has {found_as}; expected {expected}. {how}")


def _check_column(schema: pa.Schema, column: str, source: Path) -> bool:
    """Return whether a column holds texts; raise unless they are texts or lists of token ids."""
    if column not in schema.names:
        raise ValueError(
            f"column={column!r} is not in {str(source)!r}; expected one of {sorted(schema.names)}."
            f"{did_you_mean(column, schema.names)} Pass --column NAME"
        )
    kind = likely_type(schema.field(column).type)
    if _is_text(kind):
        return True
    if not is_list(kind) or not pa.types.is_integer(kind.value_type):
        raise ValueError(
            f"column={column!r} of {str(source)!r} holds values of type {kind}; expected texts or one flat list of "
            "integers per row. Pass another, --column NAME, or leave --column out"
        )
    return False


def _check_parts(schema: pa.Schema, parts: Mapping[str, str], source: Path, first: Path) -> None:
    """Raise unless a file has the columns of the first one, texts where that has texts."""
    for part, column in parts.items():
        is_flat = part in (*TEXTS, *IDS) or column not in schema.names
        if is_flat and _check_column(schema, column, source) == (part in IDS):
            raise ValueError(
                f"column={column!r} holds texts in one and token ids in the other of {str(first)!r} and "
                f"{str(source)!r}; expected the same in all files. Pass --column NAME, or one file"
            )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# ---- How long -------------------------------------------------------------------------------------------------------


def _counter(
    parts: Mapping[str, str], file: DataFile, tokenizer: str | None, task: str | None
) -> Callable[[pa.RecordBatch], NDArray[np.int32]]:
    """Return what counts the lengths of rows, by their columns."""
    if not file.is_text:  # from the offsets
        return lambda rows: np.max([pc.list_value_length(one) for one in rows.columns], axis=0).astype(np.int32)
    own_task = file.task if file.parts and file.task is not None else "masked-lm"
    encode = None if tokenizer is None else Encoder(own_task, parts, _loaded(tokenizer))

    def count(rows: pa.RecordBatch) -> NDArray[np.int32]:
        batch = rows.to_pydict()
        if encode is not None:
            made = encode(batch)
            sides = [made[name] for name in IDS if name in made and (name == "input_ids" or task == "seq2seq")]
            return np.array([max(map(len, row)) for row in zip(*sides, strict=True)], dtype=np.int32)
        texts = batch[parts["text"]][:20] if "text" in parts else []  # one alone may be a text such as "[1]"
        if texts and all(re.fullmatch(r"\[\s*\d[\d\s,]*\]", text) for text in texts):
            raise ValueError(
                f"column={file.column!r} holds lists written as text, like {texts[0][:20]!r}; expected texts, or real "
                "lists of token ids. Write a format that has lists: dataset.to_parquet(...)"
            )
        return np.array(words_of({part: batch[name] for part, name in parts.items()}), dtype=np.int32)

    return count


def _loaded(name: str) -> Any:
    try:
        from transformers import AutoTokenizer

        offline = not Path(name).exists() and not hub_answers()  # its client would try ten times, for a minute
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=offline)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    # a missing file, a broken one, no network, a missing package: each raises its own, and where the Rust of tokenizers
    # panics, what it raises is no Exception
    except BaseException as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"tokenizer={name!r} needs Python code of its own, and no such code is run; expected a class of "
                "transformers. Count with it yourself: padding_report([len(tokenizer.encode(text)) for text in texts])"
            ) from error
        raise ValueError(
            f"tokenizer={name!r} cannot be loaded ({first_line(error)}); expected a folder or a name on the Hub. "
            "Leave it out to count words"
        ) from error
    # of a folder that holds a config.json alone transformers 5 makes a tokenizer without a vocabulary
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"tokenizer={name!r} has no vocabulary; expected one that save_pretrained has written. "
            f"Call: tokenizer.save_pretrained({name!r})"
        )
    return tokenizer
