"""Lengths of the examples in data files: Parquet, Arrow, JSON Lines and CSV, with token ids or with text.

Files are read batch by batch, and of Parquet, Arrow and CSV, which ``pyarrow.dataset`` reads, only the column that
counts. JSON is parsed by Python: a row may have other fields than the first ones, and deep nesting is an error. So
memory stays bounded whatever the size of a file; only an array or object over several lines is read as a whole.

``datasets.load_dataset(..., streaming=True)`` is not used (seen in 5.2): each call asks a server and writes to the
cache, names are patterns, JSON Lines with another field or type in a later block are refused, deeply nested ones end
the process, and rows of CSV that are too short are filled up without a word.

Limitations: local files only; what a dataset's own transforms would do is not seen.
"""

from __future__ import annotations

import io
import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hf_memopt.errors import did_you_mean

__all__ = ["FileLengths", "file_lengths"]

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
COMPRESSED = (".gz", ".bz2", ".zst")  # of JSON Lines and CSV; pyarrow unpacks them by their ending
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
ROWS_AT_ONCE, JSON_ROWS_AT_ONCE = 8192, 512  # as objects of Python rows take up to ten times as much
CSV_BLOCK_BYTES = 16 * 2**20  # a single row must fit into one

Read = Callable[[str], Iterator[Any]]  # takes a column, gives pyarrow tables of that column


@dataclass(frozen=True)
class FileLengths:
    """What ``file_lengths`` found.

    ``lengths``: shape (examples,), without the ``null_rows``, which have no value in ``column``, and the
    ``empty_rows``, which have length 0: a bucketed view refuses both. ``unit``: ``"tokens"``, or ``"words"`` where
    texts were split at white space.
    """

    lengths: NDArray[np.int32]
    unit: Literal["tokens", "words"]
    column: str
    kind: str
    files: int
    null_rows: int
    empty_rows: int

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the lengths for JSON."""
        return {name: getattr(self, name) for name in ("kind", "files", "column", "unit", "null_rows", "empty_rows")}

    def heading(self, path: str | Path) -> str:
        """Return in lines what was read and counted."""
        files = "1 file" if self.files == 1 else f"{self.files} files"
        how = ", split at white space into words (for tokens pass --tokenizer NAME)" if self.unit == "words" else ""
        lines = [f"{path}: {files}, {self.kind}, column {self.column!r}{how}"]
        if self.null_rows or self.empty_rows:
            lines.append(
                f"Left out: {self.null_rows:,} null and {self.empty_rows:,} empty rows; remove them before training:\n"
                f"    dataset.filter(lambda row: row[{self.column!r}])"
            )
        return "\n".join(lines)


def file_lengths(path: str | Path, *, column: str | None = None, tokenizer: str | None = None) -> FileLengths:
    """Return the length of every example in a file, or in a folder of files of one kind.

    A folder is searched to its bottom; hidden files, and those of no known kind, are passed over. One that
    ``Dataset.save_to_disk`` wrote is read as that dataset.

    Args:
        path: the file or folder.
        column: lists of token ids or texts; without it ``input_ids``, else ``text``, else the only column of texts
            (with a tokenizer texts come first).
        tokenizer: what counts the tokens of texts: a folder or a name on the Hub for ``AutoTokenizer``; special tokens
            count. Without it words are counted.

    Raises:
        ValueError: no such path, a file of no known kind, files of several kinds, one that cannot be read, no such
            column or none that could be meant, no rows or only empty ones, or a tokenizer that cannot be loaded.
    """
    from tqdm.auto import tqdm

    try:
        kind, sources = _find(Path(path))
    except OSError as error:  # no permission, a name that is too long, links in a circle
        raise ValueError(
            f"path={str(path)!r} cannot be searched ({_first_line(error)}); expected a file or folder that may be "
            "read. Call: hf-memopt lengths FILE"
        ) from error
    with _reading(sources[0], kind):
        schema, read = _open(sources[0], kind)
    column = column or _choose_column(schema, sources[0], has_tokenizer=tokenizer is not None)
    is_text = _check_column(schema, column, sources[0])
    if tokenizer is not None and not is_text:
        raise ValueError(
            f"tokenizer={tokenizer!r} has no text to split: column {column!r} holds token ids already; expected a "
            "column of texts. Leave the tokenizer out, or name another column: --column NAME"
        )
    count = _count_ids if not is_text else _count_words if tokenizer is None else _token_counter(tokenizer)
    lengths, null_rows = [], 0
    with tqdm(unit=" rows", desc="Reading lengths", delay=1.0, leave=False) as progress:
        for source in sources:
            with _reading(source, kind):
                if source is not sources[0]:
                    schema, read = _open(source, kind)
                    if _check_column(schema, column, source) != is_text:
                        raise ValueError(
                            f"column={column!r} holds texts in one and token ids in the other of {str(sources[0])!r} "
                            f"and {str(source)!r}; expected the same in all files. Pass --column NAME, or one file"
                        )
                for table in read(column):
                    values = table.column(column).drop_null()
                    null_rows += table.num_rows - len(values)
                    progress.update(table.num_rows)
                    if len(values):
                        lengths.append(count(values, column))
    counted = np.concatenate([np.empty(0, dtype=np.int32), *lengths])
    full = counted[counted > 0]
    empty_rows = len(counted) - len(full)
    if len(full) == 0:
        found = f"{null_rows} null and {empty_rows} empty rows in column {column!r}, and no other"
        raise ValueError(f"path={str(path)!r} holds {found}; expected at least one example. Check what wrote it")
    unit: Literal["tokens", "words"] = "words" if is_text and tokenizer is None else "tokens"
    return FileLengths(full, unit, column, kind, len(sources), null_rows, empty_rows)


# ---- which files


def _find(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files and the files, a saved dataset's folder counting as one."""
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(
            f"path={str(path)!r} does not exist; expected a file or a folder.{did_you_mean(path.name, siblings)} "
            "Call: hf-memopt lengths FILE"
        )
    if not path.is_dir():
        kind = _kind(path)
        if kind is None:
            raise ValueError(f"path={str(path)!r} is of no known kind; expected {_endings()}. Convert it first")
        return kind, [path]
    found = [(_kind(source) or "arrow", source) for source in _sources(path, {os.path.realpath(path)})]
    if not found:
        raise ValueError(f"path={str(path)!r} holds no data files; expected {_endings()}. Name another folder")
    kinds = Counter(kind for kind, _ in found)
    if len(kinds) > 1:
        mixture = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ValueError(
            f"path={str(path)!r} mixes files of several kinds, {mixture}; expected one kind. "
            f"Name one file: hf-memopt lengths {found[0][1]}"
        )
    return found[0][0], [source for _, source in found]


def _sources(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield the data files below a folder, each real file or folder once, however many links lead to it."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "_")))
    names = {entry.name for entry in entries}
    if "dataset_dict.json" in names:
        splits = [entry.name for entry in entries if entry.is_dir()]
        raise ValueError(
            f"path={str(folder)!r} holds the splits {', '.join(splits)}; expected one dataset. "
            f"Name one of them: hf-memopt lengths {folder / splits[0] if splits else folder}"
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


def _endings() -> str:
    return f"one of {', '.join(KINDS)}, or a folder of them"


# ---- reading


@contextmanager
def _reading(source: Path, kind: str) -> Iterator[None]:
    """Turn what the readers raise on a broken file into one line that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        raise ValueError(
            f"path={str(source)!r} cannot be read as {kind} ({_first_line(error)}); expected a whole file. "
            "Write it again"
        ) from error


def _first_line(error: Exception) -> str:
    """Return type and first line of an error."""
    lines = str(error).strip().splitlines() or ["no cause given"]
    return f"{type(error).__name__}: {lines[0].rsplit('Invalid: ', 1)[-1].rstrip('.')}"  # pyarrow nests its errors


def _open(source: Path, kind: str) -> tuple[Any, Read]:
    """Return the pyarrow schema of a source and the function that reads one of its columns."""
    if source.is_dir():
        return _open_saved(source)
    if source.stat().st_size == 0:
        raise EOFError("the file is empty")
    if kind in ("csv", "json"):
        with pa.input_stream(str(source), compression="detect") as stream:
            encoding = json.detect_encoding(stream.read(4))  # by zero bytes, so for CSV too: its names begin in ASCII
        if not encoding.startswith("utf-8"):
            raise UnicodeError(f"its encoding is {encoding}, not utf-8")
    openers = {"json": _open_json, "arrow": _open_arrow}
    schema, read = openers[kind](source) if kind in openers else _open_table(source, kind)
    doubled = [name for name, count in Counter(schema.names).items() if count > 1]
    if doubled:
        raise pa.ArrowInvalid(f"several columns are named {doubled[0]!r}")
    return schema, read


def _open_saved(folder: Path) -> tuple[Any, Read]:
    from datasets import load_from_disk

    try:
        tables = load_from_disk(str(folder)).with_format("arrow")
    except json.JSONDecodeError as error:
        raise pa.ArrowInvalid(str(error)) from error
    return tables.features.arrow_schema, lambda column: tables.select_columns([column]).iter(ROWS_AT_ONCE)


def _open_arrow(file: Path) -> tuple[Any, Read]:
    """Open the file format or, as datasets writes it, the stream format."""
    mapped = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(mapped)
        schema, batches = reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    except pa.ArrowInvalid:
        mapped.seek(0)
        batches = pa.ipc.open_stream(mapped)
        schema = batches.schema

    def read(column: str) -> Iterator[Any]:
        for batch in batches:
            values = pa.Table.from_batches([batch.select([column])])
            values.validate(full=True)  # offsets of a broken file may point anywhere, and the process would end
            for start in range(0, len(values), ROWS_AT_ONCE):
                yield values.slice(start, ROWS_AT_ONCE)

    return schema, read


def _open_table(file: Path, kind: str) -> tuple[Any, Read]:
    import pyarrow.dataset as ds
    from pyarrow import csv, fs

    if kind == "parquet":
        options = ds.ParquetFragmentScanOptions(pre_buffer=False)  # whole row groups otherwise
        form = ds.ParquetFileFormat(default_fragment_scan_options=options)
    else:
        reading = csv.ReadOptions(block_size=CSV_BLOCK_BYTES)
        form = ds.CsvFileFormat(csv.ParseOptions(newlines_in_values=True), read_options=reading)
    fragment = form.make_fragment(str(file), fs.LocalFileSystem())
    schema = fragment.physical_schema
    if kind == "csv":  # no value, or none in UTF-8, in the first block: later ones are read, or refused, as text
        untold = (pa.null(), pa.binary())
        schema = pa.schema([field.with_type(pa.string()) if field.type in untold else field for field in schema])

    def read(column: str) -> Iterator[Any]:
        options = {"batch_size": ROWS_AT_ONCE, "batch_readahead": 1, "fragment_readahead": 0, "use_threads": False}
        for batch in fragment.to_batches(schema=schema, columns=[column], **options):
            yield pa.Table.from_batches([batch])

    return schema, read


def _open_json(file: Path) -> tuple[Any, Read]:
    """Open JSON Lines, one array of objects, or one object; the first value of a column tells what it holds."""
    rows = _json_rows(file)
    first = list(islice(rows, JSON_ROWS_AT_ONCE))
    if not first:
        raise EOFError("it holds no rows")
    values: dict[str, Any] = {}
    for row in first:
        values |= {name: value for name, value in row.items() if values.get(name) in (None, [])}
    schema = pa.schema([(name, _json_type(value)) for name, value in values.items()])

    def read(column: str) -> Iterator[Any]:
        kind, block = _likely_type(schema.field(column).type), first
        while block:
            yield pa.table({column: pa.array([row.get(column) for row in block], kind)})
            block = list(islice(rows, JSON_ROWS_AT_ONCE))

    return schema, read


def _json_type(value: Any) -> Any:
    """Return the Arrow type that a value suggests; whether all others have it shows when they are read."""
    if isinstance(value, list):
        item = next((item for item in value if item is not None), None)
        return pa.list_(pa.list_(pa.null()) if isinstance(item, list) else _json_type(item))
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string(), dict: pa.struct([])}
    return kinds.get(type(value), pa.null())


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file: one per line, or from a line that opens an array or object of several to its end."""
    with io.TextIOWrapper(pa.input_stream(str(file), compression="detect"), encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            opens = line.lstrip().startswith("[") or line.strip() == "{"
            found = _parse_json(line + lines.read() if opens else line, number) if line.strip() else []
            for row in found if isinstance(found, list) else [found]:
                if not isinstance(row, dict):
                    raise pa.ArrowInvalid(f"line {number}: {reprlib.repr(row)} is not an object")
                yield row


def _parse_json(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits; nested too deeply
        line = number + getattr(error, "lineno", 1) - 1
        raise pa.ArrowInvalid(f"line {line}: {getattr(error, 'msg', error)}") from error


def _likely_type(kind: Any) -> Any:
    """Return the type that a column has in later blocks, where the first one, of which readers infer, has no value."""
    if pa.types.is_null(kind):
        return pa.string()
    return pa.list_(pa.int64()) if pa.types.is_list(kind) and pa.types.is_null(kind.value_type) else kind


# ---- which column, and what it holds


def _choose_column(schema: Any, source: Path, *, has_tokenizer: bool) -> str:
    texts = [field.name for field in schema if _is_text(field.type)]
    likely = ["text", "input_ids"] if has_tokenizer else ["input_ids", "text"]
    if has_tokenizer and len(texts) == 1:
        return str(texts[0])
    for name in likely:
        if name in schema.names:
            return name
    if len(texts) == 1:
        return str(texts[0])
    many = f"{len(texts)} columns of texts, {', '.join(texts)}" if texts else "no column of texts"
    raise ValueError(
        f"path={str(source)!r} has neither 'input_ids' nor 'text', and {many}; expected to be told which of "
        f"{sorted(schema.names)} counts. Pass --column NAME"
    )


def _check_column(schema: Any, column: str, source: Path) -> bool:
    """Return whether a column holds texts; raise unless they are texts or lists of token ids."""
    if column not in schema.names:
        raise ValueError(
            f"column={column!r} is not in {str(source)!r}; expected one of {sorted(schema.names)}."
            f"{did_you_mean(column, schema.names)} Pass --column NAME"
        )
    kind = _likely_type(schema.field(column).type)
    if _is_text(kind):
        return True
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise ValueError(
            f"column={column!r} of {str(source)!r} holds values of type {kind}; expected texts or one flat list of "
            "integers per row. Pass --column NAME"
        )
    return False


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# ---- how long


def _count_ids(values: Any, column: str) -> NDArray[np.int32]:
    return np.asarray(pc.list_value_length(values), dtype=np.int32)  # from the offsets


def _count_words(values: Any, column: str) -> NDArray[np.int32]:
    texts = values.to_pylist()
    if all(re.fullmatch(r"\[\s*\d[\d\s,]*\]", text) for text in texts[:20]):  # one alone may be a footnote
        raise ValueError(
            f"column={column!r} holds lists written as text, like {texts[0][:20]!r}; expected texts, or real lists of "
            "token ids. Write a format that has lists: dataset.to_parquet(...)"
        )
    return np.fromiter((len(text.split()) for text in texts), dtype=np.int32, count=len(texts))


def _token_counter(name: str) -> Callable[[Any, str], NDArray[np.int32]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a missing file, a broken one, no network, a missing package: each raises its own
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"tokenizer={name!r} needs Python code of its own, and no such code is run; expected a class of "
                "transformers. Count with it yourself: padding_report([len(tokenizer.encode(text)) for text in texts])"
            ) from error
        raise ValueError(
            f"tokenizer={name!r} cannot be loaded ({_first_line(error)}); expected a folder or a name on the Hub. "
            "Leave it out to count words"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers 5 makes of a folder with a config alone
        raise ValueError(
            f"tokenizer={name!r} has no vocabulary; expected one that save_pretrained has written. "
            f"Call: tokenizer.save_pretrained({name!r})"
        )

    def count(values: Any, column: str) -> NDArray[np.int32]:
        rows = tokenizer(values.to_pylist(), return_attention_mask=False, verbose=False)["input_ids"]
        return np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))

    return count
