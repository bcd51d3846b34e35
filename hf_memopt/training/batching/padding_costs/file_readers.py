"""Read columns of a data file: Parquet, Arrow, CSV, TSV and saved data sets as pyarrow arrays, JSON as its values.

``pyarrow.dataset`` reads tables in batches and Python's ``json`` the rest: JSON Lines line by line, an array, or the
field of an object that holds the rows, at once. ``datasets.load_dataset`` asks a server and writes to the cache.
"""

from __future__ import annotations

import io
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import csv

from hf_memopt.notices import quoted
from hf_memopt.training.batching import is_list

ROWS_AT_ONCE, JSON_ROWS_AT_ONCE = 8192, 512  # Python objects of a row take up to ten times the memory of its table
MOST_OF_CAUSE = 300  # characters: it may quote the file
MOST_OF_CSV = 16 * 2**20  # bytes of a row, which must fit into one block
SEVERAL = "objects stand one after another on several lines"

Column: TypeAlias = Any  # an array of pyarrow; a list where that has no type for its objects, as for arguments of calls
Read = Callable[[Sequence[str]], Iterator[Mapping[str, Column]]]
"""Takes the names of columns and yields their values, batch by batch."""


@contextmanager
def reading(source: Path, kind: str) -> Iterator[None]:
    """Raise what the readers raise on a broken file as a ValueError of one line that names the file."""
    try:
        yield
    except MemoryError:  # one of pyarrow is an ArrowException too
        raise
    except (pa.ArrowException, OSError, EOFError, UnicodeError) as error:
        of_json = "complete JSON, with an object for each row. Correct it there"
        cause, action = first_line(error), of_json if kind == "json" else "a complete file. Write it again"
        if cause.endswith(SEVERAL):
            action = f"one object on each line. Call: jq -c . {quoted(str(source))} > rows.jsonl"
        raise ValueError(f"path={str(source)!r} cannot be read as {kind} ({cause}); expected {action}") from error


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    text = (str(error).strip().splitlines() or ["no cause given"])[0].rsplit("Invalid: ", 1)[-1]  # pyarrow nests errors
    return f"{type(error).__name__}: {text if len(text) <= MOST_OF_CAUSE else text[: MOST_OF_CAUSE - 3] + '...'}"


def open_source(source: Path, kind: str, field: str | None = None) -> tuple[dict[str, str], Read]:
    """Return the kind of each column of a file or saved data set, and the function that reads some of its columns."""
    if kind == "json":
        return _open_json(source, field)
    table = _table(source, kind)

    def read(columns: Sequence[str]) -> Iterator[Mapping[str, Column]]:
        if isinstance(table, pa.Table):
            chosen = table.select(columns)
            chosen.validate(full=True)  # wrong offsets of a broken file would end the process
            batches = chosen.to_batches(max_chunksize=ROWS_AT_ONCE)
        else:
            batches = table.to_batches(columns=columns, batch_size=ROWS_AT_ONCE, use_threads=False)
        for batch in batches:
            yield dict(zip(batch.schema.names, batch.columns, strict=True))

    return {column.name: kind_of(column.type) for column in table.schema}, read


def kind_of(values: Column | pa.DataType) -> str:
    """Return what a column holds, in words: "texts", "integers", "lists of texts", "objects", else Arrow's type."""
    if isinstance(values, list):
        return "lists of objects" if any(isinstance(value, list) for value in values) else "objects"
    kind = values.type if isinstance(values, pa.Array) else values
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_list(kind):
        return f"lists of {kind_of(kind.value_type)}"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "texts"
    return "integers" if pa.types.is_integer(kind) else "objects" if pa.types.is_struct(kind) else str(kind)


def _table(source: Path, kind: str) -> ds.Dataset | pa.Table:
    if source.is_dir():
        from datasets import load_from_disk

        try:
            return load_from_disk(str(source)).data.table
        except Exception as error:  # of a broken state.json any that datasets has
            raise pa.ArrowInvalid(first_line(error)) from error
    if kind == "arrow":
        mapped = pa.memory_map(str(source))
        try:
            return pa.ipc.open_file(mapped).read_all()
        except pa.ArrowInvalid:
            mapped.seek(0)
            return pa.ipc.open_stream(mapped).read_all()  # as datasets writes it
    form: Any = kind
    if kind in ("csv", "tsv"):
        parsed = csv.ParseOptions(delimiter="\t" if kind == "tsv" else ",", newlines_in_values=True)
        form = ds.CsvFileFormat(parsed, read_options=csv.ReadOptions(block_size=MOST_OF_CSV))
    table = ds.dataset(source, format=form)
    if form is kind:
        return table
    unknown = (pa.null(), pa.binary())  # of a column without values, or without UTF-8, in the first block
    return table.replace_schema(
        pa.schema([one.with_type(pa.string()) if one.type in unknown else one for one in table.schema])
    )


def _open_json(file: Path, field: str | None) -> tuple[dict[str, str], Read]:
    first = list(islice(json_rows(file, field), JSON_ROWS_AT_ONCE))
    if not any(first):
        raise EOFError("it holds no rows")

    def read(columns: Sequence[str]) -> Iterator[Mapping[str, Column]]:
        rows = json_rows(file, field)
        while block := list(islice(rows, JSON_ROWS_AT_ONCE)):
            yield {name: _values(name, [row.get(name) for row in block]) for name in columns}

    names = dict.fromkeys(name for row in first for name in row)
    return {name: kind_of(_values(name, [row.get(name) for row in first])) for name in names}, read


def _values(name: str, values: list[Any]) -> Column:
    """Return the values of a column as Arrow has them, objects with fields of several types as they are."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        if any(isinstance(value, dict) or (isinstance(value, list) and dict in map(type, value)) for value in values):
            return values
        kinds = [type(value) for value in values if value is not None]
        wrong = next((value for value in values if value is not None and type(value) is not kinds[0]), kinds[0])
        raise pa.ArrowInvalid(f"column {name!r} holds {reprlib.repr(wrong)} among values of another type") from error


def json_rows(file: Path, field: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file: one a line, those of an array, or of a field of the object that the file is."""
    with io.TextIOWrapper(pa.input_stream(str(file), compression="detect"), encoding="utf-8-sig") as text:
        lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
        number, line = next(lines, (1, "[]"))
        rows: Any
        if field is None and line.lstrip().startswith("{") and line.rstrip().endswith("}"):
            rows = (_parsed(one, at) for at, one in chain([(number, line)], lines))
        else:
            rows = _parsed(line + text.read(), number)
            if field is not None:
                rows = rows.get(field) if isinstance(rows, dict) else None
            if not isinstance(rows, dict | list):
                raise pa.ArrowInvalid(f"there is no object or list of rows in {field or 'it'}")
        for row in [rows] if isinstance(rows, dict) else rows:
            if not isinstance(row, dict):
                raise pa.ArrowInvalid(f"{reprlib.repr(row)} is no object with columns")
            yield row


def _parsed(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON or a number of thousands of digits; nested too deeply
        message, at = getattr(error, "msg", str(error)), getattr(error, "pos", 0)
        if message == "Extra data" and text[at:].lstrip().startswith("{"):
            raise pa.ArrowInvalid(SEVERAL) from error
        raise pa.ArrowInvalid(f"line {number + getattr(error, 'lineno', 1) - 1}: {message}") from error
