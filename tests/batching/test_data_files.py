"""Lengths from data files: every kind, folders, texts and ids, and every broken input with its whole message."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_memopt.batching import file_lengths
from hf_memopt.batching.padding_costs import data_files, file_readers
from hf_memopt.batching.padding_costs.data_files import KINDS
from tiny import bert_config, tokenizer

ENDINGS = f"expected one of {', '.join(KINDS)}, or a folder of them"
LENGTHS = np.random.default_rng(0).integers(1, 40, 300).tolist()
TEXTS = [" ".join(f"w{i % 9}" for i in range(n)) for n in LENGTHS]
ROWS = [{"input_ids": list(range(n + 2)), "text": text, "label": n % 2} for n, text in zip(LENGTHS, TEXTS, strict=True)]
TABLE = pa.Table.from_pylist(ROWS)


@pytest.fixture(autouse=True, scope="module")
def _quiet_progress() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write_arrow(new: Callable[..., Any], path: Path) -> None:
    with new(str(path), TABLE.schema) as sink:
        sink.write_table(TABLE, max_chunksize=100)


def write_lines(path: Path, rows: list[Any] = ROWS, opener: Callable[..., Any] = open) -> Path:
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def write_packed(path: Path, compression: str) -> None:
    with pa.CompressedOutputStream(str(path), compression) as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())


def write_csv(path: Path) -> None:
    pa_csv.write_csv(TABLE.drop_columns("input_ids"), path)


def write_gz_csv(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        pa_csv.write_csv(TABLE.drop_columns("input_ids"), file)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=70),
    "a.arrow": lambda path: write_arrow(pa.ipc.new_file, path),
    "stream.arrow": lambda path: write_arrow(pa.ipc.new_stream, path),
    "a.feather": lambda path: write_arrow(pa.ipc.new_file, path),
    "a.jsonl": write_lines,
    "a.ndjson": write_lines,
    "lines.json": write_lines,
    "array.json": lambda path: path.write_text(" \n" + json.dumps(ROWS, indent=1)),
    "a.jsonl.gz": lambda path: write_lines(path, opener=gzip.open),
    "a.jsonl.bz2": lambda path: write_packed(path, "bz2"),
    "a.json.zst": lambda path: write_packed(path, "zstd"),
    "a.csv": write_csv,
    "a.csv.gz": write_gz_csv,
    "saved": lambda path: Dataset(datasets.table.InMemoryTable(TABLE)).save_to_disk(path, num_shards=3),
}
WITH_IDS = [name for name in WRITERS if "csv" not in name]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """Make every file of these tests take several batches, and CSV several blocks."""
    monkeypatch.setitem(file_readers.MOST_ROW, "csv", 4096)
    monkeypatch.setattr(file_readers, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(file_readers, "JSON_ROWS_AT_ONCE", 64)


# ---- what can be read


@pytest.mark.parametrize("name", WITH_IDS)
def test_token_ids_of_every_kind(tmp_path, name):
    WRITERS[name](tmp_path / name)
    found = file_lengths(tmp_path / name)
    assert found.lengths.dtype == np.int32
    assert found.lengths.tolist() == [n + 2 for n in LENGTHS]
    assert found.as_dict() == {
        "kind": "arrow" if name == "saved" else KINDS["." + name.split(".")[1]],
        "files": 1,
        "format": "tokens",
        "column": "input_ids",
        "unit": "tokens",
        "null_rows": 0,
        "empty_rows": 0,
    }


@pytest.mark.parametrize("name", WRITERS)
def test_words_and_tokens_of_texts_of_every_kind(tmp_path, name):
    WRITERS[name](tmp_path / name)
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = file_lengths(tmp_path / name, column="text")
    assert (words.lengths.tolist(), words.unit) == (LENGTHS, "words")
    tokens = file_lengths(tmp_path / name, tokenizer=str(tmp_path / "tokenizer"))
    assert (tokens.lengths.tolist(), tokens.unit) == ([n + 2 for n in LENGTHS], "tokens")  # [CLS] and [SEP]
    assert tokens.column == "text"


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_other_arrow_types_of_texts(tmp_path, kind):
    texts = pa.array(["a b", None, "c"], pa.string())
    texts = texts.dictionary_encode() if pa.types.is_dictionary(kind) else texts.cast(kind)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema([("body", kind)])) as sink:
        sink.write_table(pa.table({"body": texts}))
    found = file_lengths(tmp_path / "a.arrow")
    assert (found.lengths.tolist(), found.column, found.null_rows) == ([2, 1], "body", 1)


@pytest.mark.parametrize("kind", [pa.large_list(pa.int16()), pa.list_(pa.int64(), 3)])
def test_other_arrow_types_of_ids(tmp_path, kind):
    table = pa.table({"ids": pa.array([[1, 2, 3], None, [4, 5, 6]], kind)})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as sink:  # pyarrow 20 cannot write it as Parquet
        sink.write_table(table)
    found = file_lengths(tmp_path / "a.arrow", column="ids")
    assert (found.lengths.tolist(), found.null_rows) == ([3, 3], 1)


def test_a_folder_is_searched_to_its_bottom_without_hidden_and_foreign_files(tmp_path):
    for folder in ("", "train/deep", ".cache", "_work"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        WRITERS["a.parquet"](tmp_path / folder / "part.parquet")
    WRITERS["a.csv"](tmp_path / ".hidden.csv")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    found = file_lengths(tmp_path)
    assert (len(found.file.sources), found.lengths.tolist()) == (2, [n + 2 for n in LENGTHS] * 2)


def test_a_folder_of_saved_datasets_does_not_count_their_caches(tmp_path):
    for name in ("one", "two"):
        WRITERS["saved"](tmp_path / name)
        shutil.copy(tmp_path / name / "data-00000-of-00003.arrow", tmp_path / name / "cache-123.arrow")
    found = file_lengths(tmp_path)
    assert (found.file.kind, len(found.file.sources), found.lengths.tolist()) == (
        "arrow",
        2,
        [n + 2 for n in LENGTHS] * 2,
    )


def test_a_later_block_may_hold_what_the_first_one_did_not(tmp_path):
    rows = [{"text": None, "score": 1}] * 500 + [{"text": "a b"}, {"score": 2.5}, {"text": "c", "more": [1]}]
    found = file_lengths(write_lines(tmp_path / "a.jsonl", rows))
    assert (found.lengths.tolist(), found.null_rows) == ([2, 1], 501)
    ids = [{"input_ids": []}] * 500 + [{"input_ids": [1, 2]}]
    found = file_lengths(write_lines(tmp_path / "b.jsonl", ids))
    assert (found.lengths.tolist(), found.empty_rows, found.null_rows) == ([2], 500, 0)
    (tmp_path / "c.csv").write_text("id,text\n" + "1,\n" * 2000 + '2.5,"a b\nc"\n')
    found = file_lengths(tmp_path / "c.csv")
    assert (found.lengths.tolist(), found.null_rows + found.empty_rows) == ([3], 2000)


def test_links_lead_to_each_file_once_and_never_in_a_circle(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        WRITERS["a.parquet"](folder / "part.parquet")
    (data / "loop").symlink_to(data)
    (data / "latest.parquet").symlink_to(data / "part.parquet")
    (data / "more").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data)
    found = file_lengths(data)
    assert (len(found.file.sources), found.lengths.tolist()) == (2, [n + 2 for n in LENGTHS] * 2)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_a_json_file_of_a_single_record_is_one_row(tmp_path, indent, column):
    (tmp_path / "one.json").write_text(json.dumps({"label": 1, "text": "a b c", "input_ids": [4, 5]}, indent=indent))
    found = file_lengths(tmp_path / "one.json", column=column)
    assert (found.lengths.tolist(), found.null_rows) == ([3 if column == "text" else 2], 0)


def test_a_text_that_says_null_is_a_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nNA,1\nnull,2\nNaN None,3\n,4\n")
    found = file_lengths(tmp_path / "a.csv")
    assert (found.lengths.tolist(), found.null_rows, found.empty_rows) == ([1, 1, 2], 0, 1)


def test_rows_of_json_may_have_other_fields_and_types_than_the_column_that_counts(tmp_path):
    rows = [{"text": "a", "type": "session", "message": {"a": 1}}] * 200 + [{"text": "b c", "message": [1], "x": 2.5}]
    found = file_lengths(write_lines(tmp_path / "a.jsonl", rows))
    assert found.lengths.tolist() == [1] * 200 + [2]


def test_a_row_may_be_large(tmp_path, monkeypatch):
    monkeypatch.undo()
    words = 3_000_000
    (tmp_path / "a.csv").write_text(f'text,label\na,1\n"{"w " * words}",2\n')
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "w " * words}])
    for name in ("a.csv", "a.jsonl"):
        assert file_lengths(tmp_path / name).lengths.tolist() == [1, words]


def test_nothing_is_asked_for_and_nothing_is_kept(tmp_path):
    """Without HF_HUB_OFFLINE and in a home of its own: no connection is tried and no file is left behind."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("a.jsonl", "a.csv", "a.parquet", "stream.arrow", "saved"):
        WRITERS[name](tmp_path / name)
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): print('asked'); raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from hf_memopt.batching.padding_costs.data_files import file_lengths\n"
        "for path in sys.argv[1:]: print(len(file_lengths(path, column='text').lengths))\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    paths = [str(tmp_path / name) for name in ("a.jsonl", "a.csv", "a.parquet", "stream.arrow", "saved")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        env={**kept, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(len(ROWS))] * len(paths)
    assert list(home.rglob("*")) == []


def test_null_and_empty_rows_are_counted_left_out_and_told(tmp_path):
    rows = [{"text": "a b"}, {"text": None}, {"text": " "}, {"text": ""}, {"text": "c"}]
    found = file_lengths(write_lines(tmp_path / "a.jsonl", rows))
    assert (found.lengths.tolist(), found.null_rows, found.empty_rows) == ([2, 1], 1, 2)
    assert found.heading("a.jsonl") == (
        "a.jsonl: 1 file, json, column 'text', split at white space into words (for tokens pass --tokenizer NAME)\n"
        "Skipped: 1 null and 2 empty rows; remove them before training:\n    dataset.filter(lambda row: row['text'])"
    )


@pytest.mark.parametrize(
    ("columns", "with_tokenizer", "chosen"),
    [
        ({"text": "a", "input_ids": [1], "other": "b"}, False, "input_ids"),
        ({"text": "a", "input_ids": [1], "other": "b"}, True, "text"),
        ({"body": "a", "input_ids": [1]}, True, "body"),
        ({"text": "a", "other": "b"}, False, "text"),
        ({"body": "a", "label": 1}, False, "body"),
    ],
)
def test_the_column_that_is_meant(tmp_path, columns, with_tokenizer, chosen):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    name = str(tmp_path / "tokenizer") if with_tokenizer else None
    assert file_lengths(write_lines(tmp_path / "a.jsonl", [columns]), tokenizer=name).column == chosen


def test_a_text_longer_than_the_model_takes_is_counted_in_full_and_without_a_warning(tmp_path, caplog):
    tokenizer(model_max_length=8).save_pretrained(tmp_path / "tokenizer")
    path = write_lines(tmp_path / "a.jsonl", [{"text": "w1 " * 50}])
    assert file_lengths(path, tokenizer=str(tmp_path / "tokenizer")).lengths.tolist() == [52]
    assert caplog.text == ""


# ---- what cannot


def error_of(path: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        file_lengths(path, **settings)
    return str(error.value)


def test_a_missing_path(tmp_path):
    WRITERS["a.parquet"](tmp_path / "train.parquet")
    path = tmp_path / "trian.parquet"
    assert error_of(path) == (
        f"path={str(path)!r} does not exist; expected a file or a folder. Did you mean 'train.parquet'? Check the path"
    )
    path = tmp_path / "no" / "such"
    assert error_of(path) == f"path={str(path)!r} does not exist; expected a file or a folder. Check the path"


def test_an_unknown_kind_and_a_folder_without_data(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert error_of(tmp_path / "a.txt") == (
        f"path={str(tmp_path / 'a.txt')!r} is not a known kind of file; {ENDINGS}. Convert it first"
    )
    assert error_of(tmp_path) == f"path={str(tmp_path)!r} holds no data files; {ENDINGS}. Name another folder"


def test_a_folder_of_several_kinds(tmp_path):
    for name in ("a.csv", "a.parquet"):
        WRITERS[name](tmp_path / name)
    WRITERS["a.parquet"](tmp_path / "b.parquet")
    assert error_of(tmp_path) == (
        f"path={str(tmp_path)!r} mixes files of several kinds, 1 csv and 2 parquet; expected one kind. "
        f"Name one file: hf-memopt lengths {tmp_path / 'a.csv'}"
    )


def test_a_saved_dict_of_splits(tmp_path):
    part = Dataset.from_dict({"text": ["a"]})
    DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "saved"))
    path = tmp_path / "saved"
    assert error_of(path) == (
        f"path={str(path)!r} holds the splits test, train; expected one dataset. "
        f"Name one of them: hf-memopt lengths {path / 'test'}"
    )


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.json", "a.csv"])
def test_an_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    assert error_of(tmp_path / name) == (
        f"path={str(tmp_path / name)!r} cannot be read as {KINDS[Path(name).suffix]} (EOFError: the file is empty); "
        "expected a complete file. Write it again"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", b"PAR1 and nothing that follows"),
        ("a.arrow", b"ARROW and nothing that follows"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("a.json", b'[{"text": "a"}, '),
        ("a.json", b"[1, 2]"),
        ("a.json", b'[{"text": "a"}, {"text": 1}]'),
        ("a.csv", b"text,label\na,1\nb,2,3\n"),
        ("a.csv.gz", b"no gzip"),
    ],
)
def test_a_broken_file_is_named_in_one_line_with_the_cause(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    message = error_of(tmp_path / name)
    kind = KINDS["." + name.split(".")[1]]
    assert "\n" not in message
    assert message.startswith(f"path={str(tmp_path / name)!r} cannot be read as {kind} (")  # the cause is pyarrow's
    rule = re.search(
        r"\((line \d+): .*\); expected complete JSON\. Correct (line \d+), or write the file again$", message
    )
    if rule is None:
        assert message.endswith("); expected a complete file. Write it again")
    else:
        assert rule.group(1) == rule.group(2)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "a.jsonl", "array.json", "a.jsonl.gz"])
def test_a_file_that_was_cut_off_is_never_counted_by_half(tmp_path, name):
    WRITERS[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    assert " cannot be read as " in error_of(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "kind", "cause"),
    [
        ("a.csv", b"text,text,label\na,b,1\n", "csv", "ArrowInvalid: CSV file contained multiple columns named text"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "json", "UnicodeError: its encoding is utf-16, not utf-8"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16-le"), "json", "UnicodeError: its encoding is utf-16-le, not utf-8"),
        ("a.csv", "text,label\na,1\n".encode("utf-16-be"), "csv", "UnicodeError: its encoding is utf-16-be, not utf-8"),
        ("a.jsonl", b'\n{"text": "a"}\n{"text": ]\n', "json", "line 3: Expecting value"),
        ("a.json", b'{\n "text": "a",\n "x": }\n', "json", "line 3: Expecting value"),
        ("a.jsonl", b'{"text": "a"}\n"b"\n', "json", "line 2: 'b' is not an object"),
        ("a.json", b" \n[]\n", "json", "EOFError: it holds no rows"),
        ("a.jsonl", b"\n\n", "json", "EOFError: it holds no rows"),
    ],
)
def test_what_no_reader_should_guess_is_told_in_whole(tmp_path, name, content, kind, cause):
    (tmp_path / name).write_bytes(content)
    rule = "a complete file. Write it again"
    if cause.startswith("line "):
        rule = f"complete JSON. Correct {cause.partition(':')[0]}, or write the file again"
    assert (
        error_of(tmp_path / name)
        == f"path={str(tmp_path / name)!r} cannot be read as {kind} ({cause}); expected {rule}"
    )


@pytest.mark.parametrize(
    ("name", "opening", "mebibytes", "cause", "most"),
    [
        ("a.jsonl.gz", '{"text": "b"}\n{"text":"', 65, "line 2: a row is too long", "64.0 MiB"),
        ("a.json.gz", '{\n"text":"', 65, "line 1: a row is too long", "64.0 MiB"),
        ("a.json.gz", '[{"text": "b"},\n\n{"text":"', 65, "line 1: a row is too long", "64.0 MiB"),
        ("a.csv.gz", "text\n", 33, "a row is too long", "16.0 MiB"),
    ],
)
def test_a_row_that_is_too_long_is_refused(tmp_path, monkeypatch, name, opening, mebibytes, cause, most):
    monkeypatch.undo()
    with gzip.open(tmp_path / name, "wb", 1) as file:
        file.write(opening.encode() + b"a" * mebibytes * 2**20)
    assert error_of(tmp_path / name) == (
        f"path={str(tmp_path / name)!r} cannot be read as {KINDS[Path(name).suffixes[0]]} ({cause}); expected rows of "
        f"at most {most}. Cut its texts, or close the quotation mark or bracket left open"
    )


def test_memory_is_not_wanting_because_a_file_is_broken(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(file_readers, "_open_table", fail)
    with pytest.raises(MemoryError, match="malloc"):
        file_lengths(tmp_path / "a.parquet")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=12),
    indent=st.none() | st.integers(0, 3),
    once=st.integers(1, 60),
    damage=st.none() | st.tuples(st.floats(0, 1), st.sampled_from(["", ",", "]", '"', "x", "\\", " ", "1"])),
    escaped=st.booleans(),
)
def test_an_array_is_read_element_by_element_as_at_once(tmp_path, monkeypatch, rows, indent, once, damage, escaped):
    """Whatever is read at once, and however it is damaged: the rows of ``json.loads``, or its line and reason."""
    monkeypatch.setattr(file_readers, "JSON_CHARACTERS", once)
    text = json.dumps(rows, indent=indent, ensure_ascii=escaped)
    if damage is not None:
        place = round(damage[0] * len(text))
        text = "[" + text[1:place] + damage[1] + text[place + 1 :]
    try:
        (tmp_path / "a.json").write_text(text, encoding="utf-8", newline="")
    except UnicodeEncodeError:  # half a surrogate pair
        return
    try:
        expected = json.loads(text.rstrip())
    except ValueError as error:
        expected = f"line {error.lineno}: {error.msg}"
    try:
        found = [row for row, _ in file_readers._json_rows(tmp_path / "a.json")]
    except pa.ArrowInvalid as error:
        found = str(error)
    if not str(found).endswith(" is not an object"):  # which an element before what is wrong may be
        assert found == expected


def test_a_row_that_is_cut_off_is_named_by_its_own_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"\n')
    assert "(line 2: " in error_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["imdb", "stanfordnlp/imdb"])
def test_a_dataset_of_the_hub_is_to_be_saved_first(name):
    assert error_of(name) == (
        f"path={name!r} does not exist; expected a file or a folder. Save a dataset of the hub first: "
        f"load_dataset({name!r}, split='train').to_parquet('imdb.parquet')"
    )


@pytest.mark.parametrize("rows", ['{"text": %s}\n', '{"text": "a", "other": %s}\n'])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_an_error_and_not_the_end_of_the_process(tmp_path, rows, opening, closing):
    depth = 100_000
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + rows % f"{opening * depth}1{closing * depth}")
    assert error_of(tmp_path / "a.jsonl").startswith(
        f"path={str(tmp_path / 'a.jsonl')!r} cannot be read as json (line 2: maximum recursion depth"
    )


def test_a_doubled_column_of_parquet(tmp_path):
    texts = pa.array(["a b"])
    pq.write_table(pa.Table.from_arrays([texts, texts], names=["text", "text"]), tmp_path / "a.parquet")
    assert error_of(tmp_path / "a.parquet") == (
        f"path={str(tmp_path / 'a.parquet')!r} cannot be read as parquet (ArrowInvalid: several columns are named "
        "'text'); expected a complete file. Write it again"
    )


@pytest.mark.parametrize("value", ['"\\ud800"', "9" * 5000, "[9223372036854775808]", "1.5", "true", '["a"]'])
def test_values_that_are_no_text_and_no_ids_name_the_file(tmp_path, value):
    (tmp_path / "a.jsonl").write_text(
        f'{{"text": {"[1]" if value.startswith("[") else chr(34) * 2}}}\n{{"text": {value}}}'
    )
    message = error_of(tmp_path / "a.jsonl")
    assert message.startswith(f"path={str(tmp_path / 'a.jsonl')!r} cannot be read as json (")
    assert "\n" not in message


def test_a_folder_that_may_not_be_read_and_a_name_that_is_too_long(tmp_path, monkeypatch):
    path = "a" * 3000
    cause = f"[Errno 36] File name too long: {path!r}"[:297]
    assert error_of(Path(path)) == (
        f"path={path!r} cannot be searched (OSError: {cause}...); expected a file or "
        "folder that may be read. Call: hf-memopt lengths FILE"
    )

    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    path = str(tmp_path)
    assert error_of(tmp_path) == (
        f"path={path!r} cannot be searched (PermissionError: [Errno 13] Permission denied: {path!r}); expected a file "
        "or folder that may be read. Call: hf-memopt lengths FILE"
    )


def test_an_arrow_file_with_wrong_bytes_is_an_error_and_not_the_end_of_the_process(tmp_path):
    WRITERS["a.arrow"](tmp_path / "a.arrow")
    whole, draw, refused = (tmp_path / "a.arrow").read_bytes(), random.Random(0), 0
    for number in range(400):
        content = bytearray(whole)
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        (tmp_path / f"{number}.arrow").write_bytes(content)
        try:
            file_lengths(tmp_path / f"{number}.arrow", column="text")
        except ValueError:
            refused += 1
    assert 0 < refused < 400


def test_a_saved_dataset_without_its_data(tmp_path):
    WRITERS["saved"](tmp_path / "saved")
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    assert error_of(tmp_path / "saved").startswith(
        f"path={str(tmp_path / 'saved')!r} cannot be read as arrow (FileNotFoundError: "
    )


def test_a_broken_file_in_a_folder_is_the_one_named(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"broken")
    assert error_of(tmp_path).startswith(f"path={str(tmp_path / 'b.parquet')!r} cannot be read as parquet (")


def test_an_unknown_column(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    assert error_of(tmp_path / "a.parquet", column="txt") == (
        f"column='txt' is not in {path!r}; expected one of ['input_ids', 'label', 'text']. Did you mean 'text'? "
        "Pass --column NAME"
    )
    assert error_of(tmp_path / "a.parquet", column="label") == (
        f"column='label' of {path!r} holds values of type int64; expected texts or one flat list of integers per row. "
        "Pass --column NAME"
    )


def test_no_column_that_could_be_meant(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"title": "a", "body": "b"}])
    assert error_of(path) == (
        f"path={str(path)!r} has neither 'input_ids' nor 'text', and 2 columns of texts, title, body; expected "
        "one of ['body', 'title'] by name. Pass --column NAME"
    )
    path = write_lines(tmp_path / "b.jsonl", [{"label": 1}])
    assert error_of(path) == (
        f"path={str(path)!r} has neither 'input_ids' nor 'text', and no column of texts; expected one of "
        "['label'] by name. Pass --column NAME"
    )


def test_a_column_that_differs_between_the_files(tmp_path):
    one = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    two = write_lines(tmp_path / "b.jsonl", [{"text": [1, 2]}])
    assert error_of(tmp_path) == (
        f"column='text' holds texts in one and token ids in the other of {str(one)!r} and {str(two)!r}; expected the "
        "same in all files. Pass --column NAME, or one file"
    )
    write_lines(two, [{"body": "a"}])
    assert error_of(tmp_path) == (f"column='text' is not in {str(two)!r}; expected one of ['body']. Pass --column NAME")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"text": None}, {"text": None}], "2 null and 0 empty rows"),
        ([{"text": ""}, {"text": None}], "1 null and 1 empty rows"),
    ],
)
def test_nothing_but_null_and_empty_rows(tmp_path, rows, found):
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert error_of(path) == (
        f"path={str(path)!r} holds {found} in column 'text', and no other; expected at least one example. Check what "
        "wrote it"
    )


def test_a_header_alone(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n")
    assert error_of(tmp_path / "a.csv").startswith(
        f"path={str(tmp_path / 'a.csv')!r} holds 0 null and 0 empty rows in column 'text', and no other; "
    )


def test_lists_that_were_written_as_text(tmp_path):
    (tmp_path / "a.csv").write_text('input_ids,label\n"[101, 7, 102]",1\n')
    assert error_of(tmp_path / "a.csv", column="input_ids") == (
        "column='input_ids' holds lists written as text, like '[101, 7, 102]'; expected texts, or real lists of token "
        "ids. Write a format that has lists: dataset.to_parquet(...)"
    )


def test_a_tokenizer_that_cannot_be_loaded_or_has_no_text(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    name = str(tmp_path / "no-tokenizer")
    message = error_of(tmp_path / "a.parquet", tokenizer=name)
    assert message.startswith(f"tokenizer={name!r} cannot be loaded (")
    assert message.endswith("); expected a folder or a name on the Hub. Leave it out to count words")
    assert "\n" not in message
    assert error_of(tmp_path / "a.parquet", column="input_ids", tokenizer=name) == (
        f"tokenizer={name!r} has no text to split: column 'input_ids' holds token ids already; expected a column of "
        "texts. Leave the tokenizer out, or name another column: --column NAME"
    )


def test_a_tokenizer_without_a_network_fails_at_once(tmp_path, monkeypatch):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    monkeypatch.setattr(data_files, "hub_answers", lambda: False)
    message = error_of(tmp_path / "a.parquet", tokenizer="someone/zzzz")  # its reason is that of transformers
    assert message.startswith("tokenizer='someone/zzzz' cannot be loaded (")
    assert message.endswith("); expected a folder or a name on the Hub. Leave it out to count words")


@pytest.mark.parametrize("answers", [True, False])
def test_a_tokenizer_of_the_hub_is_downloaded_or_taken_from_the_cache(tmp_path, monkeypatch, answers):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    monkeypatch.setattr(data_files, "hub_answers", lambda: answers)
    asked = []

    def load(name, **options):
        asked.append((name, options["local_files_only"]))
        return tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    assert file_lengths(tmp_path / "a.parquet", tokenizer="someone/bert").unit == "tokens"
    assert asked == [("someone/bert", not answers)]


def test_a_tokenizer_with_code_of_its_own_is_refused_and_not_run(tmp_path, monkeypatch):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}}')
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert error_of(tmp_path / "a.parquet", tokenizer=str(folder)) == (
        f"tokenizer={str(folder)!r} needs Python code of its own, and no such code is run; expected a class of "
        "transformers. Count with it yourself: padding_report([len(tokenizer.encode(text)) for text in texts])"
    )
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_makes_an_empty_tokenizer_is_refused(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    name = str(tmp_path / "model")
    bert_config().save_pretrained(name)
    message = error_of(tmp_path / "a.parquet", tokenizer=name)
    assert message.startswith(f"tokenizer={name!r} ")
    if "cannot be loaded" not in message:  # some versions of transformers refuse it themselves
        assert message == (
            f"tokenizer={name!r} has no vocabulary; expected one that save_pretrained has written. "
            f"Call: tokenizer.save_pretrained({name!r})"
        )


@pytest.mark.parametrize("name", ["../secret.arrow", "/secret.arrow", 5])
def test_a_saved_dataset_is_read_in_its_own_folder_alone(tmp_path, name):
    WRITERS["saved"](tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": name}]}))
    assert error_of(tmp_path / "saved") == (
        f"path={str(tmp_path / 'saved')!r} cannot be read as arrow (ArrowInvalid: state.json has the file {name!r}, "
        "which is not one of its folder); expected a complete file. Write it again"
    )
