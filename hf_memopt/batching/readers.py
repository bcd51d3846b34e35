"""One column of a data file, batch by batch, with pyarrow's and datasets' own readers: Parquet, Arrow, JSON, CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["first_line", "likely_type", "open_source", "reading"]

ROWS_AT_ONCE = 8192
BLOCK_BYTES = 16 * 2**20  # of JSON and CSV; a single row must fit into one

Read = Callable[[str], Iterator[Any]]  # takes a column, gives pyarrow tables of that column


@contextmanager
def reading(source: Path, kind: str) -> Iterator[None]:
    """Turn what the readers raise on a broken file into one line that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"path={str(source)!r} cannot be read as {kind} ({first_line(error)}); expected a whole file. "
            "Write it again"
        ) from error


def first_line(error: Exception) -> str:
    """Return kind and first line of an error."""
    lines = str(error).strip().splitlines() or ["no cause given"]
    return f"{type(error).__name__}: {lines[0].rsplit('Invalid: ', 1)[-1].rstrip('.')}"  # pyarrow nests its errors


def open_source(source: Path, kind: str) -> tuple[Any, Read]:
    """Return the pyarrow schema of a source and the function that reads one of its columns."""
    if source.is_dir():
        return _open_saved(source)
    if source.stat().st_size == 0:
        raise EOFError("the file is empty")
    return {"parquet": _open_parquet, "arrow": _open_arrow, "json": _open_json, "csv": _open_csv}[kind](source)


def _open_saved(folder: Path) -> tuple[Any, Read]:
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(folder))
    if not isinstance(dataset, Dataset):
        raise OSError("it holds several splits")
    tables = dataset.with_format("arrow")
    return dataset.features.arrow_schema, lambda column: tables.select_columns([column]).iter(ROWS_AT_ONCE)


def _open_parquet(file: Path) -> tuple[Any, Read]:
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)

    def read(column: str) -> Iterator[Any]:
        with parquet:
            for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=[column]):
                yield pa.Table.from_batches([batch])

    return parquet.schema_arrow, read


def _open_arrow(file: Path) -> tuple[Any, Read]:
    """Open the file format or, as datasets writes it, the stream format."""
    mapped = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        reader = pa.ipc.open_stream(mapped)

    def read(column: str) -> Iterator[Any]:
        with mapped:
            is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    yield pa.Table.from_batches([batch.slice(start, ROWS_AT_ONCE)]).select([column])

    return reader.schema, read


def _open_json(file: Path) -> tuple[Any, Read]:
    import pyarrow.dataset as ds
    from pyarrow.json import ReadOptions

    with pa.input_stream(str(file), compression="detect") as stream:
        is_array = stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if is_array:
            with pa.input_stream(str(file), compression="detect") as whole:
                rows = json.loads(whole.read())
            if not all(isinstance(row, dict) for row in rows):
                raise pa.ArrowInvalid("an array of something else than objects")
            table = pa.Table.from_pylist(rows)
            return table.schema, lambda column: iter(
                table.select([column]).slice(start, ROWS_AT_ONCE) for start in range(0, len(table), ROWS_AT_ONCE)
            )
    form = ds.JsonFileFormat(read_options=ReadOptions(block_size=BLOCK_BYTES))
    schema = ds.dataset(file, format=form).schema

    def read(column: str) -> Iterator[Any]:
        typed = pa.schema([pa.field(column, likely_type(schema.field(column).type))])
        rows = ds.dataset(file, format=form, schema=typed)
        for batch in rows.to_batches(batch_size=ROWS_AT_ONCE, batch_readahead=2, fragment_readahead=1):
            yield pa.Table.from_batches([batch])

    return schema, read


def _open_csv(file: Path) -> tuple[Any, Read]:
    from pyarrow import csv

    reading = csv.ReadOptions(block_size=BLOCK_BYTES)
    parsing = csv.ParseOptions(newlines_in_values=True)
    with csv.open_csv(file, read_options=reading, parse_options=parsing) as first:
        schema = first.schema

    def read(column: str) -> Iterator[Any]:
        types = {column: likely_type(schema.field(column).type)}
        converting = csv.ConvertOptions(include_columns=[column], column_types=types)
        options = {"read_options": reading, "parse_options": parsing, "convert_options": converting}
        with csv.open_csv(file, **options) as batches:
            for batch in batches:
                yield pa.Table.from_batches([batch])

    return schema, read


def likely_type(kind: Any) -> Any:
    """Return the type that a column has in later blocks, where the first one, of which readers infer, has no value."""
    if pa.types.is_null(kind):
        return pa.string()
    return pa.list_(pa.int64()) if pa.types.is_list(kind) and pa.types.is_null(kind.value_type) else kind
