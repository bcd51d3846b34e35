"""Data files read in small parts, JSON element by element, and tokenizers of the hub."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_data_files import LENGTHS, WRITERS, error_of
from transformers import AutoTokenizer

from hf_memopt.batching import file_lengths
from hf_memopt.batching.padding_costs import data_files, file_readers
from tiny import tokenizer


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_is_read_in_parts(tmp_path, monkeypatch, name):
    monkeypatch.setitem(file_readers.MOST_ROW, "csv", 4096)
    monkeypatch.setattr(file_readers, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(file_readers, "JSON_ROWS_AT_ONCE", 64)
    WRITERS[name](tmp_path / name)
    assert file_lengths(tmp_path / name, column="text").lengths.tolist() == LENGTHS


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
