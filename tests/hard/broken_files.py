"""Files as a stranger may send them: a valid one of each kind that the package reads, and ways to break it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from public_calls import SIZES

import hf_memopt as m
import tiny
from hf_memopt.prediction.memory.models import load_model
from hf_memopt.training.batching import data_file, file_lengths

__all__ = ["FILES", "StrangeFile", "broken_bytes", "broken_json"]


@dataclass(frozen=True)
class StrangeFile:
    """A kind of file.

    Attributes:
        name: in its folder.
        write: a valid one, and what belongs beside it, into a folder.
        read: reads the file as the package does, and uses all of it.
        is_json: whether its values can be replaced one by one.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    is_json: bool = True


def _json(name: str, content: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(content()))


# ---- What the package writes and reads


def _read_recipe(path: Path) -> None:
    found = m.recipe(path)
    str(found), found._repr_html_(), found.step_settings(), found.callbacks(), found.changes()


# ---- Models and data


def _write_model(folder: Path) -> None:
    tiny.llama_config(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(folder)


def _read_model(path: Path) -> None:
    load_model(str(path.parent))


def _write_tokenizer(folder: Path) -> None:
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "tokenizer.json").write_bytes((folder / "tokenizer" / "tokenizer.json").read_bytes())
    (folder / "rows.jsonl").write_text('{"text": "w1 w2"}\n{"text": "w3"}\n')


def _read_tokenizer(path: Path) -> None:
    (path.parent / "tokenizer" / path.name).write_bytes(path.read_bytes())
    file_lengths(path.parent / "rows.jsonl", tokenizer=str(path.parent / "tokenizer"))


def _write_tokenizer_config(folder: Path) -> None:
    _write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_bytes((folder / "tokenizer" / "tokenizer_config.json").read_bytes())


TABLE = pa.table(
    {
        "text": ["a b", "c", None, "d e f", "é"] * 8,
        "input_ids": [[1, 2], [3], None, [4, 5, 6], []] * 8,
        "kind": pa.array(["x", "y", "x", None, "y"] * 8).dictionary_encode(),
    }
)


def _read_data(path: Path) -> None:
    """Read each column that the package counts."""
    for column in ("text", "input_ids", "kind"):
        if column in data_file(path).columns:
            file_lengths(path, column=column)
    file_lengths(path)


def _write_arrow(folder: Path) -> None:
    with pa.ipc.new_file(str(folder / "a.arrow"), TABLE.schema) as writer:
        writer.write_table(TABLE)


def _write_stream(folder: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(folder / "a.arrow"), TABLE.schema, options=options) as writer:
        writer.write_table(TABLE)


def _write_saved(folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        datasets.Dataset(datasets.table.InMemoryTable(TABLE.select(["text", "input_ids"]))).save_to_disk(
            str(folder / "saved"), num_shards=2
        )
    (folder / "state.json").write_bytes((folder / "saved" / "state.json").read_bytes())


def _read_saved(path: Path) -> None:
    (path.parent / "saved" / path.name).write_bytes(path.read_bytes())
    _read_data(path.parent / "saved")


def _rows() -> str:
    return "".join(json.dumps(row) + "\n" for row in TABLE.to_pylist())


FILES: dict[str, StrangeFile] = {
    "recipe": StrangeFile(
        "recipe.json", _json("recipe.json", lambda: json.loads(m.recipe("8gb-gpu").to_json())), _read_recipe
    ),
    "model": StrangeFile("config.json", _write_model, _read_model),
    "tokenizer": StrangeFile("tokenizer.json", _write_tokenizer, _read_tokenizer),
    "tokenizer's configuration": StrangeFile("tokenizer_config.json", _write_tokenizer_config, _read_tokenizer),
    "saved dataset": StrangeFile("state.json", _write_saved, _read_saved),
    "JSON Lines": StrangeFile("a.jsonl", lambda folder: (folder / "a.jsonl").write_text(_rows()), _read_data, False),
    "JSON array": StrangeFile("a.json", _json("a.json", TABLE.to_pylist), _read_data),
    "CSV": StrangeFile(
        "a.csv",
        lambda folder: (folder / "a.csv").write_text('text,label\n"a, b",1\n"c\nd",2\ne,3\n' * 9),
        _read_data,
        False,
    ),
    "Parquet": StrangeFile(
        "a.parquet", lambda folder: pq.write_table(TABLE, str(folder / "a.parquet")), _read_data, False
    ),
    "Arrow": StrangeFile("a.arrow", _write_arrow, _read_data, False),
    "Arrow stream": StrangeFile("a.arrow", _write_stream, _read_data, False),
}
"""By their names in the tests."""


# ---- How they are broken


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in JSON data."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from _places(one, (*path, key))


NUMBERS = (0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 0.5, -0.5, 5e-324, 1e-9, 1e308, -1e308, 1e15)
TEXTS = ("", " ", "x", "\0", "\ud800", "</script>", "[/red]", "$\\frac{", "../../secret", "/etc/passwd", "9" * 5000)
VALUES = (None, True, False, *NUMBERS, *TEXTS, "\N{RIGHT-TO-LEFT OVERRIDE}\N{FLOPPY DISK}", [], {}, [[]], {"a": {}})


@st.composite
def broken_json(draw: st.DrawFn, whole: Any) -> bytes:
    """Return JSON text with one to three values replaced, left out or added."""
    content = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(content))))
        value = draw(st.sampled_from(VALUES) | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8))
        if not path:
            continue
        inside = content
        for key in path[:-1]:
            inside = inside[key]
        how = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "twice")))
        if how == "remove":
            del inside[path[-1]]
        elif how == "add" and isinstance(inside, dict):
            inside[draw(st.text(max_size=8))] = value
        elif how == "add":
            inside.insert(0, value)
        elif how == "twice" and isinstance(inside, list):
            inside.append(inside[path[-1]])
        else:
            inside[path[-1]] = value
    return json.dumps(content).encode("utf-8", "surrogatepass")


ENDS = (b"", b"\0" * 64, b"\xff\xfe", b"{}", b"\n\n", b"NaN", b'{"a": 1, "a": 2}', b'{"a": 1e999}')


@st.composite
def broken_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """Return bytes that are cut off, flipped, doubled, or something else."""
    how = draw(st.sampled_from(("cut", "flip", "flip", "insert", "zeros", "huge", "other", "twice")))
    if how == "other":
        return draw(st.sampled_from(ENDS) | st.binary(max_size=200))
    if how == "twice":
        return whole + whole
    found = bytearray(whole)
    at = draw(st.integers(0, len(whole) - 1))
    if how == "cut":
        return bytes(found[:at])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found) - 1))
        if how == "flip":
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            found[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif how == "zeros":
            found[at : at + 8] = bytes(len(found[at : at + 8]))
        else:  # a length or an offset of gigabytes, wherever one is
            found[at : at + 4] = b"\xff\xff\xff\x7f"[: len(found[at : at + 4])]
    return bytes(found)
