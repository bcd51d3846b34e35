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
import pandas
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from tables import table, whole

from hf_memopt.training.batching import file_lengths
from tiny import bert_config, tokenizer

KINDS = {
    **{".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"},
    **{".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv"},
}
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


def write_tsv(path: Path) -> None:
    pa_csv.write_csv(TABLE.drop_columns("input_ids"), path, pa_csv.WriteOptions(delimiter="\t"))


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
    "a.tsv": write_tsv,
    "saved": lambda path: Dataset(datasets.table.InMemoryTable(TABLE)).save_to_disk(path, num_shards=3),
}
WITH_IDS = [name for name in WRITERS if "sv" not in name]


@pytest.mark.parametrize("name", WRITERS)
def test_ids_words_and_tokens_of_every_kind(tmp_path, name):
    WRITERS[name](tmp_path / name)
    words = file_lengths(tmp_path / name, column="text")
    assert (words.lengths.tolist(), words.unit) == (LENGTHS, "words")
    if "sv" in name:  # which has no lists
        tokenizer(model_max_length=8).save_pretrained(tmp_path / "tokenizer")  # longer texts are counted in full
        tokens = file_lengths(tmp_path / name, tokenizer=str(tmp_path / "tokenizer"))
        assert (tokens.lengths.tolist(), tokens.unit) == ([n + 2 for n in LENGTHS], "tokens")  # [CLS] and [SEP]
        return
    found = file_lengths(tmp_path / name)
    assert found.lengths.dtype == np.int32
    assert found.lengths.tolist() == [n + 2 for n in LENGTHS]
    kind = "arrow" if name == "saved" else KINDS["." + name.split(".")[1]]
    told = {"kind": kind, "files": 1, "format": "tokens", "unread": ["text"], "column": "input_ids", "unit": "tokens"}
    assert found.as_dict() == {**told, "null_rows": 0, "empty_rows": 0}
    if not name.endswith((".bz2", ".zst")) and name not in ("saved", "a.feather", "a.ndjson", "lines.json"):
        content = (tmp_path / name).read_bytes()  # a file that was cut off is never counted by half
        (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
        assert " cannot be read as " in error_of(tmp_path / name)


@pytest.mark.parametrize(
    "cells",
    [
        pa.array(["a b", None, "c"], pa.large_string()),
        pa.array(["a b", None, "c"]).dictionary_encode(),
        pa.array([[1, 2], None, [3]], pa.large_list(pa.int16())),
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)),
    ],
    ids=lambda cells: str(cells.type),
)
def test_other_arrow_types(tmp_path, cells):
    table = pa.table({"body": cells})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as sink:  # pyarrow 20 cannot write all as Parquet
        sink.write_table(table)
    found = file_lengths(tmp_path / "a.arrow", column="body")
    expected = [len(cell.split()) if isinstance(cell, str) else len(cell) for cell in cells.to_pylist() if cell]
    assert (found.lengths.tolist(), found.column, found.null_rows) == (expected, "body", 1)


def test_a_folder_is_searched_to_its_bottom_without_hidden_and_foreign_files(tmp_path):
    for folder in ("", "train/deep", ".cache", "_work"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        WRITERS["a.parquet"](tmp_path / folder / "part.parquet")
    WRITERS["a.csv"](tmp_path / ".hidden.csv")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    found = file_lengths(tmp_path)
    assert (len(found.file.sources), found.lengths.tolist()) == (2, [n + 2 for n in LENGTHS] * 2)


def test_links_lead_to_each_file_once_and_never_in_a_circle(tmp_path):
    WRITERS["a.parquet"](tmp_path / "part.parquet")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "latest.parquet").symlink_to(tmp_path / "part.parquet")
    found = file_lengths(tmp_path)
    assert (len(found.file.sources), found.lengths.tolist()) == (1, [n + 2 for n in LENGTHS])


def test_a_row_may_be_large(tmp_path):
    words = 3_000_000
    (tmp_path / "a.csv").write_text(f'text,label\na,1\n"{"w " * words}",2\n')
    write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "w " * words}])
    for name in ("a.csv", "a.jsonl"):
        assert file_lengths(tmp_path / name).lengths.tolist() == [1, words]


def test_nothing_is_asked_for_and_nothing_is_kept(tmp_path):
    """Without HF_HUB_OFFLINE and in a home of its own: no connection is tried and no file is left behind."""
    home, names = tmp_path / "home", ("a.jsonl", "a.csv", "a.parquet", "stream.arrow", "saved")
    home.mkdir()
    paths = [tmp_path / name for name in names]
    for path in paths:
        WRITERS[path.name](path)
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): print('asked'); raise OSError('no network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from hf_memopt.training.batching import file_lengths\n"
        "for path in sys.argv[1:]: print(len(file_lengths(path, column='text').lengths))\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, env={**kept, "HOME": str(home)}, capture_output=True, text=True, check=True)
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
        ({"text": "a", "other": "b"}, False, "text"),
        ({"anchor": "a", "positive": "b", "label": 1}, False, "anchor, positive"),
    ],
)
def test_the_column_that_is_meant(tmp_path, columns, with_tokenizer, chosen):
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    name = str(tmp_path / "tokenizer") if with_tokenizer else None
    assert file_lengths(write_lines(tmp_path / "a.jsonl", [columns]), tokenizer=name).column == chosen


def error_of(path: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        file_lengths(path, **settings)
    return str(error.value)


@pytest.mark.parametrize("rows", ['{"text": %s}\n', '{"text": "a", "other": %s}\n'])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_an_error_and_not_the_end_of_the_process(tmp_path, rows, opening, closing):
    depth = 100_000
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + rows % f"{opening * depth}1{closing * depth}")
    assert error_of(tmp_path / "a.jsonl").startswith(
        f"path={str(tmp_path / 'a.jsonl')!r} cannot be read as json (ArrowInvalid: line 2: maximum recursion depth"
    )


def test_an_arrow_file_with_wrong_bytes_is_an_error_and_not_the_end_of_the_process(tmp_path):
    WRITERS["a.arrow"](tmp_path / "a.arrow")
    whole, draw, refused = (tmp_path / "a.arrow").read_bytes(), random.Random(0), 0
    for number in range(100):
        content = bytearray(whole)
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        (tmp_path / f"{number}.arrow").write_bytes(content)
        try:
            file_lengths(tmp_path / f"{number}.arrow", column="text")
        except ValueError:
            refused += 1
    assert 0 < refused < 100


def test_a_tokenizer_that_cannot_be_loaded_or_has_no_text(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    name = str(tmp_path / "no-tokenizer")
    message = error_of(tmp_path / "a.parquet", tokenizer=name)
    assert message.startswith(f"tokenizer={name!r} cannot be loaded (")
    assert message.endswith("); expected a folder or a name on the Hub. Leave it out to count words")
    assert "\n" not in message
    assert error_of(tmp_path / "a.parquet", column="input_ids", tokenizer=name) == whole(
        "tokenizer={name!r} has no text", name=name
    )


def test_a_tokenizer_with_code_of_its_own_is_refused_and_not_run(tmp_path, monkeypatch):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}}')
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    message = error_of(tmp_path / "a.parquet", tokenizer=str(folder))
    assert message.startswith(f"tokenizer={str(folder)!r} cannot be loaded (ValueError: ")
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_makes_an_empty_tokenizer_is_refused(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    name = str(tmp_path / "model")
    bert_config().save_pretrained(name)
    message = error_of(tmp_path / "a.parquet", tokenizer=name)
    assert message.startswith(f"tokenizer={name!r} ")
    if "cannot be loaded" not in message:  # some versions of transformers refuse it themselves
        assert message == whole("tokenizer={name!r} has no vocabulary;", name=name)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


LATER = [{"text": None, "score": 1}] * 600 + [{"text": "a b"}, {"score": 2.5}, {"text": "c", "more": [1]}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]}]
TURNS = [{"messages": [{"role": "user", "content": "a"}, *PARTS]}, {"messages": PARTS}]
OTHERS = [{"text": "a", "message": {"a": 1}}] * 600 + [{"text": "b c", "message": [1], "x": 2.5}]
COUNTED: dict[str, tuple[str, str, list[int], int, int]] = {
    "a later block": ("a.jsonl", lines(*LATER), [2, 1], 601, 0),
    "later ids": ("a.jsonl", lines(*[{"input_ids": []}] * 600, {"input_ids": [1, 2]}), [2], 0, 600),
    "a later type": ("a.csv", "id,text\n" + "1,\n" * 2000 + '2.5,"a b\nc"\n', [3], 0, 2000),
    "other fields": ("a.jsonl", lines(*OTHERS), [1] * 600 + [2], 0, 0),
    "texts and parts of texts": ("a.jsonl", lines(*TURNS), [4, 3], 0, 0),
    "one record": ("a.json", lines({"label": 1, "text": "a b c"}), [3], 0, 0),
    "one record of many lines": ("a.json", json.dumps({"label": 1, "input_ids": [4, 5]}, indent=2), [2], 0, 0),
    "texts that say null": ("a.csv", "text,label\nNA,1\nnull,2\nNaN None,3\n,4\n", [1, 1, 2], 0, 1),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_counts_in_a_file(tmp_path, name):
    file, content, lengths, null_rows, empty_rows = COUNTED[name]
    (tmp_path / file).write_text(content)
    found = file_lengths(tmp_path / file)
    assert (found.lengths.tolist(), found.null_rows, found.empty_rows) == (lengths, null_rows, empty_rows)


IN_WHOLE = table("batching/tables/broken_files")


@pytest.mark.parametrize(("name", "content", "message"), IN_WHOLE)
def test_what_cannot_be_read_is_told_in_whole(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert error_of(tmp_path / name) == message.format(path=str(tmp_path / name))


BY_READERS: list[tuple[str, bytes]] = [
    ("a.parquet", b"PAR1 and nothing that follows"),
    ("a.arrow", b"ARROW and nothing that follows"),
    ("a.jsonl", b'{"text": "a"}\n{"text": \n'),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n'),
    ("a.json", b'[{"text": "a"}, '),
    ("a.json", b"[1, 2]"),
    ("a.json", b'[{"text": "a"}, {"text": 1}]'),
    ("a.csv", b"text,label\na,1\nb,2,3\n"),
    ("a.csv.gz", b"no gzip"),
    *[
        ("a.jsonl", f'{{"text": {first}}}\n{{"text": {value}}}'.encode())
        for first, value in [
            *[('""', value) for value in ('"\\ud800"', "9" * 5000, "1.5", "true")],
            *[("[1]", value) for value in ("[9223372036854775808]", '["a"]')],
        ]
    ],
]


@pytest.mark.parametrize(("name", "content"), BY_READERS, ids=range(len(BY_READERS)))
def test_a_broken_file_is_named_in_one_line_with_the_cause(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    message = error_of(tmp_path / name)
    assert "\n" not in message
    kind = KINDS["." + name.split(".")[1]]
    assert message.startswith(f"path={str(tmp_path / name)!r} cannot be read as {kind} (")  # the cause is pyarrow's
    of_json = "complete JSON, with an object for each row. Correct it there"
    assert message.endswith(f"); expected {of_json if kind == 'json' else 'a complete file. Write it again'}")


def test_folders_and_paths_that_cannot_be_read(tmp_path):
    empty, mixed, saved, differing = (tmp_path / name for name in ("empty", "mixed", "saved", "differing"))
    for folder in (empty, mixed, differing):
        folder.mkdir()
    assert error_of(empty) == f"path={str(empty)!r} holds no data files; {ENDINGS}. Convert it first"
    for name in ("a.csv", "a.parquet"):
        WRITERS[name](mixed / name)
    WRITERS["a.parquet"](mixed / "b.parquet")
    assert error_of(mixed) == whole("path={mixed!r} mixes", mixed=str(mixed), file=mixed / "a.csv")
    part = Dataset.from_dict({"text": ["a"]})
    DatasetDict({"train": part, "test": part}).save_to_disk(str(saved))
    assert error_of(saved) == whole("path={saved!r} holds", saved=str(saved), part=saved / "test")
    (saved / "test" / "data-00000-of-00001.arrow").unlink()
    start = f"path={str(saved / 'test')!r} cannot be read as arrow (ArrowInvalid: FileNotFoundError: "
    assert error_of(saved / "test").startswith(start)
    write_lines(differing / "a.jsonl", [{"text": "a"}])
    two = write_lines(differing / "b.jsonl", [{"text": [1, 2]}])
    assert error_of(differing) == whole("column='text' of", two=str(two))
    write_lines(two, [{"body": "a"}])
    assert error_of(differing) == f"column='text' is not in {str(two)!r}; expected one of ['body']. Pass --column NAME"
    two.write_bytes(b"[")
    assert error_of(differing).startswith(f"path={str(two)!r} cannot be read as json (")
    missing = mixed / "a.parqet"
    assert error_of(missing) == (
        f"path={str(missing)!r} does not exist; expected a file or a folder. Did you mean 'a.parquet'? Check the path"
    )
    for name in ("imdb", "stanfordnlp/imdb"):
        assert error_of(name) == whole("path={name!r} does", name=name)


def test_columns_that_cannot_be_counted(tmp_path):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    assert error_of(path, column="txt") == whole("column='txt' is not", path=path)
    assert error_of(path, column="label") == whole("column='label' of {path!r}", path=path)
    texts = pa.array(["a b"])
    pq.write_table(pa.Table.from_arrays([texts, texts], names=["text", "text"]), path)
    assert error_of(path).startswith(f"path={path!r} cannot be read as parquet (ArrowInvalid: ")


OF_OTHER_TASKS = [
    (
        *("masked-lm", {"tokens": ["a"], "ner_tags": ["O"]}),
        "has the columns tokens, ner_tags, rows of tokens and tags, which are for token-classification; expected those "
        "of a format for masked-lm: input_ids; text. Pass --task token-classification",
    ),
    (
        *("masked-lm", {"question": "a", "context": "b", "answers": []}),
        "has the columns question, context, answers, rows of question and answers, which are for question-answering; "
        "expected those of a format for masked-lm: input_ids; text. Pass --task question-answering",
    ),
    (
        *("masked-lm", {"prompt": "a", "completion": "b"}),
        "has the columns prompt, completion, rows of prompt and completion, which are for causal-lm; expected those of "
        "a format for masked-lm: input_ids; text. Take a model of causal-lm, or rename the columns",
    ),
]


@pytest.mark.parametrize(("task", "row", "says"), OF_OTHER_TASKS)
def test_rows_of_another_task_name_what_reads_them(tmp_path, task, row, says):
    path = write_lines(tmp_path / "a.jsonl", [row])
    assert error_of(path, task=task) == f"path={str(path)!r} {says}"


WORDS = "alpha beta gamma delta"
ANSWERED = {"question": "what ?", "context": WORDS, "answers": {"text": ["beta"], "answer_start": [6]}}
SQUAD = {"id": "0", "question": "what ?", "answers": [{"text": "beta", "answer_start": 6}]}
NESTED = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": WORDS, "qas": [SQUAD] * 2}]}] * 3}
COLUMNS_OF = {"text": [WORDS] * 3, "label": [0, 1, 0]}
PAIRS = [{"query": WORDS, "pos": ["beta"], "neg": ["delta", "gamma"]}] * 3
PREFERRED = [{"prompt": WORDS, "chosen": "beta", "rejected": "gamma"}] * 3
QUOTES = [{"quote": WORDS, "by": 1}] * 3
"""Rows in no format, and what the line makes of them that the error names."""
CONVERTED: dict[str, tuple[str, str, dict[str, str], str, list[Any]]] = {
    "rows of SQuAD 1.1": (
        *("a.json", json.dumps(NESTED), {"field": "data"}, "title (texts), paragraphs (lists of objects)"),
        [ANSWERED] * 6,
    ),
    "articles": ("a.json", json.dumps(NESTED["data"]), {}, "title (texts), paragraphs (lists of", [ANSWERED] * 6),
    "an object of columns": (
        *("a.json", json.dumps(COLUMNS_OF), {}, "text (lists of texts), label (lists of integers)"),
        [{"text": WORDS, "label": label} for label in (0, 1, 0)],
    ),
    "pairs with lists": (
        *("a.jsonl", "\n".join(map(json.dumps, PAIRS)), {}),
        "query (texts), pos (lists of texts), neg (lists of texts)",
        [{"query": WORDS, "positive": "beta"}] * 3,
    ),
    "preferences": (
        *("a b.jsonl", "\n".join(map(json.dumps, PREFERRED)), {}, "prompt (texts), chosen (texts), rejected (texts)"),
        [{"prompt": WORDS, "completion": "beta"}] * 3,
    ),
    "a column of another name": (
        *("a.jsonl", "\n".join(map(json.dumps, QUOTES)), {}, "quote (texts), by (integers)"),
        [{"text": WORDS, "by": 1}] * 3,
    ),
    "semicolons": ("a.csv", "text;label\na b;1\n", {}, "text;label (texts)", [{"text": "a b", "label": 1}]),
    "objects one after another": ("a.jsonl", "\n".join([json.dumps({"text": WORDS}, indent=2)] * 3), {}, "", None),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets 4.0 leaves a CSV file open
@pytest.mark.parametrize("name", CONVERTED)
def test_rows_in_no_format_are_refused_with_a_line_that_converts_them(tmp_path, monkeypatch, name):
    file, content, settings, columns, rows = CONVERTED[name]
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(content)
    message = error_of(Path(file), **settings)
    if columns:
        formats = "; expected those of a format: messages; translation; text; prompt, completion; tokens, ner_tags; "
        assert message.startswith(f"path={file!r} has the columns {columns}")
        assert formats in message
    code = re.search(r"all: (.+)", message)[1]
    if code.startswith("jq "):
        if shutil.which("jq") is None:
            pytest.skip("jq is not installed")
        subprocess.run(code, shell=True, check=True)
    else:
        eval(code, {"datasets": datasets, "pandas": pandas})
    (made,) = Path().glob("rows.*")
    assert file_lengths(made).file.format != ""
    found = getattr(Dataset, f"from_{made.suffix[1:].replace('jsonl', 'json')}")(str(made), cache_dir=str(tmp_path))
    assert found.to_list() == (rows or [{"text": WORDS}] * 3)


def test_an_object_that_holds_the_rows_is_not_taken_for_one(tmp_path):
    held = {"text": "about these rows", "data": ROWS[:9]}
    path = tmp_path / "a.json"
    for indent in (None, 1):
        path.write_text(json.dumps(held, indent=indent))
        assert error_of(path) == whole("path={path!r} is one object,", path=str(path))
        assert file_lengths(path, field="data").lengths.tolist() == [n + 2 for n in LENGTHS[:9]]
    for field in ("text", "rows"):
        assert f"there is no object or list of rows in {field})" in error_of(path, field=field)
    WRITERS["a.csv"](tmp_path / "a.csv")
    assert error_of(tmp_path / "a.csv", field="data") == whole("field='data' is for JSON", path=str(tmp_path / "a.csv"))
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a b"}]}))  # which is a row
    assert file_lengths(path).lengths.tolist() == [2]


def test_columns_that_are_not_read_are_named(tmp_path):
    alpaca = {"instruction": "a b", "input": "", "output": "c", "history": [["d", "e"]], "system": None}
    found = file_lengths(write_lines(tmp_path / "a.jsonl", [alpaca] * 2))
    assert found.file.unread == ("history", "system")
    assert "\nColumns that are not read: history, system." in found.heading("a.jsonl")
    assert found.as_dict()["unread"] == ["history", "system"]


def test_texts_that_are_embedded_count_by_the_longest(tmp_path):
    rows = [{"query": "a", "positive": "b c", "negative": "d e f"}, {"query": "a b", "positive": "c", "negative": None}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert file_lengths(path).lengths.tolist() == [3, 2]
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    found = file_lengths(path, tokenizer=str(tmp_path / "tokenizer"))
    assert (found.lengths.tolist(), found.file.task) == ([5, 4], "sentence-similarity")
