"""Data files read in small parts, and tokenizers of the hub."""

from __future__ import annotations

import pytest
from test_data_files import LENGTHS, WRITERS, error_of
from transformers import AutoTokenizer

from hf_memopt.training.batching import file_lengths
from hf_memopt.training.batching.padding_costs import counted_lengths, file_readers
from tiny import tokenizer


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_is_read_in_parts(tmp_path, monkeypatch, name):
    monkeypatch.setattr(file_readers, "MOST_OF_CSV", 4096)
    monkeypatch.setattr(file_readers, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(file_readers, "JSON_ROWS_AT_ONCE", 64)
    WRITERS[name](tmp_path / name)
    assert file_lengths(tmp_path / name, column="text").lengths.tolist() == LENGTHS


def test_a_tokenizer_without_a_network_fails_at_once(tmp_path, monkeypatch):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    monkeypatch.setattr(counted_lengths, "hub_answers", lambda: False)
    message = error_of(tmp_path / "a.parquet", tokenizer="someone/zzzz")  # its reason is that of transformers
    assert message.startswith("tokenizer='someone/zzzz' cannot be loaded (")
    assert message.endswith("); expected a folder or a name on the Hub. Leave it out to count words")


@pytest.mark.parametrize("answers", [True, False])
def test_a_tokenizer_of_the_hub_is_downloaded_or_taken_from_the_cache(tmp_path, monkeypatch, answers):
    WRITERS["a.parquet"](tmp_path / "a.parquet")
    monkeypatch.setattr(counted_lengths, "hub_answers", lambda: answers)
    asked = []

    def load(name, **options):
        asked.append((name, options["local_files_only"]))
        return tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    assert file_lengths(tmp_path / "a.parquet", tokenizer="someone/bert").unit == "tokens"
    assert asked == [("someone/bert", not answers)]
