"""Read columns of a data file as pyarrow arrays: Parquet, Arrow, JSON Lines, CSV and datasets saved to disk.

Files are read batch by batch, and of Parquet, Arrow and CSV, which ``pyarrow.dataset`` reads, only the columns in
question. JSON is parsed by Python: a row may have other fields than the first ones, and deep nesting is an error. Of
JSON a row above 64 MiB is refused and of CSV one above 16 MiB, which a few kilobytes of a compressed file can hold. So
memory stays bounded whatever the size of such a file. Of Parquet 8192 values are held at once, however long.

``datasets.load_dataset(..., streaming=True)`` is not used (seen in 5.2): each call asks a server and writes to the
cache, names are patterns, JSON Lines with another field or type in a later block are refused, deeply nested ones end
the process, and missing values at the end of a CSV row become nulls without a warning. Nor is ``load_from_disk``,
which follows names out of the dataset's folder and checks no offsets.
"""

from __future__ import annotations

import io
import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_memopt.plain_data import parse_object, shown
from hf_memopt.units import format_bytes

ROWS_AT_ONCE, JSON_ROWS_AT_ONCE = 8192, 512  # Python objects of a row take up to ten times the memory of its table
MOST_OF_CAUSE = 300  # characters: it may quote the file
MOST_ROW = {"csv": 16 * 2**20, "json": 64 * 2**20}  # bytes, of JSON characters; a million token ids are 7 MiB
TOO_LONG = "a row is too long"
JSON_CHARACTERS = 2**20  # read at once
BLANK, COMMA = re.compile(r"\s*").match, re.compile(r"\s*,\s*").match
CUT_OFF = 16  # characters before its end at which a text that is cut off may be wrong

Batches = Iterator[pa.RecordBatch]
Read = Callable[[Sequence[str]], Batches]
"""Takes the names of columns and yields their values."""


@contextmanager
def reading(source: Path, kind: str) -> Iterator[None]:
    """Raise what the readers raise on a broken file as a ValueError of one line that names the file."""
    try:
        yield
    except MemoryError:  # one of pyarrow is an ArrowException too
        raise
    except (pa.ArrowException, OSError, EOFError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        cause, action = first_line(error), "a complete file. Write it again"
        if "straddling object" in cause:  # of pyarrow's CSV reader
            cause = TOO_LONG
        if cause.endswith(TOO_LONG):
            most = format_bytes(MOST_ROW[kind])
            action = f"rows of at most {most}. Cut its texts, or close the quotation mark or bracket left open"
        elif cause.endswith("no comma"):
            read = f"pandas.read_csv(file, sep={cause.split(chr(39))[1]!r}, keep_default_na=False)"
            action = f"columns separated by commas. Call: {read}.to_csv('commas.csv', index=False)"
        elif cause.startswith("line "):
            action = f"complete JSON. Correct {cause.partition(':')[0]}, or write the file again"
        elif cause.startswith(("row ", "rows ")):
            action = f"one type in each column and field. Correct {cause.partition(':')[0]}"
        raise ValueError(f"path={str(source)!r} cannot be read as {kind} ({cause}); expected {action}") from error


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; the message alone if it names a line or rows."""
    lines = str(error).strip().splitlines() or ["no cause given"]
    text = lines[0].rsplit("Invalid: ", 1)[-1].rstrip(".")  # pyarrow nests its errors
    text = text if len(text) <= MOST_OF_CAUSE else f"{text[: MOST_OF_CAUSE - 3]}..."
    return text if text.startswith(("line ", "row ", "rows ")) else f"{type(error).__name__}: {text}"


def open_source(source: Path, kind: str) -> tuple[pa.Schema, Read]:
    """Return the schema of a file or saved dataset, and the function that reads some of its columns."""
    if source.is_dir():
        return _open_saved(source)
    if source.stat().st_size == 0:
        raise EOFError("the file is empty")
    if kind in ("csv", "json"):
        with pa.input_stream(str(source), compression="detect") as stream:
            start = stream.read(2**16)
        encoding = json.detect_encoding(start[:4])  # it looks at zero bytes, which works for CSV too
        if not encoding.startswith("utf-8"):
            raise UnicodeError(f"its encoding is {encoding}, not utf-8")
        if kind == "csv":
            _check_separator(start)
    openers = {"json": _open_json, "arrow": _open_arrow}
    schema, read = openers[kind](source) if kind in openers else _open_table(source, kind)
    doubled = [name for name, count in Counter(schema.names).items() if count > 1]
    if doubled:
        raise pa.ArrowInvalid(f"several columns are named {doubled[0]!r}")
    return schema, read


def _check_separator(start: bytes) -> None:
    """Raise if the first two lines of a CSV file, without what is quoted, have another separator than a comma."""
    header, *rows = [re.sub(rb'"[^"]*"', b"", line) for line in start.splitlines()[:2]] or [b""]
    for separator in (b";", b"\t"):
        if separator in header and b"," not in header and all(separator in row for row in rows):
            raise pa.ArrowInvalid(f"its header has '{separator.decode()}' between names of columns, and no comma")


def _open_saved(folder: Path) -> tuple[pa.Schema, Read]:
    """Open the Arrow files that ``state.json`` names, as ``Dataset.save_to_disk`` wrote it."""
    try:
        names = [one["filename"] for one in parse_object((folder / "state.json").read_bytes())["_data_files"]]
    except ValueError as error:
        raise pa.ArrowInvalid(f"of state.json, {error}") from error
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise pa.ArrowInvalid(f"state.json has the file {shown(name)}, which is not one of its folder")
    if not names:
        raise EOFError("it holds no rows")

    def read(columns: Sequence[str]) -> Batches:
        for name in names:
            yield from _open_arrow(folder / name)[1](columns)

    return _open_arrow(folder / names[0])[0], read


def _open_arrow(file: Path) -> tuple[pa.Schema, Read]:
    """Open the file format or, as datasets writes it, the stream format."""
    mapped = pa.memory_map(str(file))
    try:
        reader = pa.ipc.open_file(mapped)
        schema, batches = reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    except pa.ArrowInvalid:
        mapped.seek(0)
        batches = pa.ipc.open_stream(mapped)
        schema = batches.schema

    def read(columns: Sequence[str]) -> Batches:
        for batch in batches:
            chosen = batch.select(columns)
            chosen.validate(full=True)  # wrong offsets of a broken file would crash the process
            for start in range(0, len(chosen), ROWS_AT_ONCE):
                yield chosen.slice(start, ROWS_AT_ONCE)

    return schema, read


def _open_table(file: Path, kind: str) -> tuple[pa.Schema, Read]:
    import pyarrow.dataset as ds
    from pyarrow import csv, fs

    if kind == "parquet":
        options = ds.ParquetFragmentScanOptions(pre_buffer=False)  # otherwise whole row groups are read ahead
        form = ds.ParquetFileFormat(default_fragment_scan_options=options)
    else:
        reading = csv.ReadOptions(block_size=MOST_ROW["csv"])  # a row must fit into one block
        form = ds.CsvFileFormat(csv.ParseOptions(newlines_in_values=True), read_options=reading)
    fragment = form.make_fragment(str(file), fs.LocalFileSystem())
    schema = fragment.physical_schema
    if kind == "csv":  # a column without values, or without UTF-8, in its first block is read as text
        unknown = (pa.null(), pa.binary())
        schema = pa.schema([field.with_type(pa.string()) if field.type in unknown else field for field in schema])

    def read(columns: Sequence[str]) -> Batches:
        options = {"batch_size": ROWS_AT_ONCE, "batch_readahead": 1, "fragment_readahead": 0, "use_threads": False}
        yield from fragment.to_batches(schema=schema, columns=list(columns), **options)

    return schema, read


def _open_json(file: Path) -> tuple[pa.Schema, Read]:
    """Open JSON Lines, one array of objects, or one object; the first value of a column gives its type."""
    rows = _json_rows(file)
    first = _block(rows)
    if not first:
        raise EOFError("it holds no rows")
    values: dict[str, Any] = {}
    for row in first:
        values |= {name: value for name, value in row.items() if values.get(name) in (None, [])}
    schema = pa.schema([(name, _json_type(value)) for name, value in values.items()])

    def read(columns: Sequence[str]) -> Batches:
        kinds, block, before = {name: likely_type(schema.field(name).type) for name in columns}, first, 0
        while block:
            made = {name: _cells_of(name, [row.get(name) for row in block], kinds[name], before) for name in columns}
            yield pa.record_batch(made)
            before, block = before + len(block), _block(rows)

    return schema, read


def _cells_of(name: str, values: list[Any], kind: pa.DataType, before: int) -> pa.Array:
    """Return the values of a column; raise naming the row, by the number of those ``before``, with another type."""
    try:
        return _cells(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        for number, one in enumerate(values, before + 1):
            try:
                _cells([one], kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                wrong = "has values of several types" if "struct" in str(kind) else f"is no {kind} as in the first row"
                raise pa.ArrowInvalid(f"row {number}: {name}={one!r:.60} {wrong}") from error
        where = f"rows {before + 1} to {before + len(values)}"
        raise pa.ArrowInvalid(f"{where}: a field in {name!r} has values of several types") from error


def _cells(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the values of a column; where they hold objects, a message's parts of text as the one text they are.

    The fields of an object are those of all rows of a block. Where two rows have values of two types in one, as the
    arguments of calls and the defaults of tools do, these are JSON, which ``read_rows`` takes too.
    """
    if "struct" not in str(kind):
        return pa.array(values, kind)
    values = [_joined(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        is_talk = any(map(_is_conversation, values))  # of which another row may be empty
        return pa.array([_json_within(value) if is_talk else _as_json(value) for value in values])


def _is_conversation(value: Any) -> bool:
    rows = value if isinstance(value, list) else []
    return bool(rows) and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in rows)


def _as_json(value: Any) -> Any:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _json_within(value: Any) -> Any:
    """Return messages with the arguments of their calls, and contents that are objects, as JSON."""
    if isinstance(value, list):
        return [_json_within(one) for one in value]
    if not isinstance(value, dict):
        return value
    given = value.get("arguments")
    said = {} if given is None or isinstance(given, str) else {"arguments": json.dumps(given, ensure_ascii=False)}
    if isinstance(value.get("content"), dict):  # what a tool answers
        said["content"] = json.dumps(value["content"], ensure_ascii=False)
    return {name: _json_within(one) for name, one in value.items()} | said


def _joined(value: Any) -> Any:
    if isinstance(value, list):
        return [_joined(one) for one in value]
    parts = value.get("content") if isinstance(value, dict) else None
    if not isinstance(parts, list):
        return value
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"content={parts!r:.80} has an item without a text; expected a text, or a list of items with a text each. "
            "Remove pictures and sounds from the messages"
        )
    return {**value, "content": "".join(texts)}


def _block(rows: Iterator[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    """Return the next rows, few where they are long; none at the end."""
    block: list[dict[str, Any]] = []
    size = 0
    while len(block) < JSON_ROWS_AT_ONCE and size <= MOST_ROW["json"] and (found := next(rows, None)):
        block.append(found[0])
        size += found[1]
    return block


def _json_type(value: Any) -> pa.DataType:
    """Return the Arrow type of a value; a later value of another type is an error when it is read."""
    if isinstance(value, list):
        item = next((item for item in value if item is not None), None)
        return pa.list_(pa.list_(pa.null()) if isinstance(item, list) else _json_type(item))
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string(), dict: pa.struct([])}
    return kinds.get(type(value), pa.null())


def _json_rows(file: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the objects of a file and their characters: one per line, or those of an array or object of many lines."""
    with io.TextIOWrapper(pa.input_stream(str(file), compression="detect"), encoding="utf-8-sig") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_ROW["json"] + 1), ""), 1):
            if line.strip() == "{":
                line += lines.read(MOST_ROW["json"])
            if line.lstrip().startswith("["):
                found = _elements(lines, line, number)
            elif len(line) > MOST_ROW["json"]:
                raise pa.ArrowInvalid(f"line {number}: {TOO_LONG}")
            else:
                found = iter([(_parse_json(line, number), len(line))] if line.strip() else [])
            for row, characters in found:
                if not isinstance(row, dict):
                    raise pa.ArrowInvalid(f"line {number}: {reprlib.repr(row)} is not an object")
                yield row, characters


def _elements(lines: io.TextIOWrapper, text: str, line: int) -> Iterator[tuple[Any, int]]:
    """Yield the elements of the array that begins in ``text``, and their characters, without reading it as a whole."""
    decode, at, before = json.JSONDecoder().raw_decode, text.index("[") + 1, "["
    gap = BLANK(text, at)
    while True:
        cut = len(text)
        try:
            while gap is not None:
                row, end = decode(text, gap.end())
                yield row, end - at
                at, before = end, "[0"  # in which what follows is as right or wrong as after the element
                gap = COMMA(text, at)
        except (ValueError, RecursionError) as error:
            cut = len(text) if str(error).startswith("Unterminated") else getattr(error, "pos", 0)
        is_cut_off = cut > len(text) - CUT_OFF
        line, text, at = line + text.count("\n", 0, at), text[at:], 0
        if is_cut_off and len(text) > MOST_ROW["json"]:
            raise pa.ArrowInvalid(f"line {line}: {TOO_LONG}")
        more = lines.read(max(JSON_CHARACTERS, len(text))) if is_cut_off else ""
        if not more:
            _parse_json(before + text, line)  # raises, unless it is the end of the array
            return
        text += more
        gap = (COMMA if before == "[0" else BLANK)(text)


def _parse_json(text: str, number: int) -> Any:
    try:
        return json.loads(text.rstrip())  # an object that is cut off ends on its own line
    except (ValueError, RecursionError) as error:  # not JSON or a number of thousands of digits; nested too deeply
        line = number + getattr(error, "lineno", 1) - 1
        raise pa.ArrowInvalid(f"line {line}: {getattr(error, 'msg', error)}") from error


def likely_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to expect of a column whose first block, from which its type was inferred, has no value."""
    if pa.types.is_null(kind):
        return pa.string()
    return pa.list_(pa.int64()) if pa.types.is_list(kind) and pa.types.is_null(kind.value_type) else kind
