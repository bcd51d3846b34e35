"""Sentences for the person who watches a training."""

from __future__ import annotations

import json
import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.notices import PrintableRecord, notify, printable, quoted


def test_words_of_commands_are_quoted_for_the_shell_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (r"run\train.py", "a b", "datasets[vision]")
    assert [*map(quoted, words)] == [r"'run\train.py'", "'a b'", "'datasets[vision]'"]
    monkeypatch.setattr("os.name", "nt")
    found = [*map(quoted, words)]
    monkeypatch.undo()
    assert found == [r"run\train.py", '"a b"', "datasets[vision]"]


def test_configured_logging_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    notify(logging.getLogger("hf_memopt.somewhere"), "step 1: out of memory")
    assert caplog.record_tuples == [("hf_memopt.somewhere", logging.WARNING, "step 1: out of memory")]


def test_without_logging_it_is_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("hf_memopt.somewhere")
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    notify(logger, "step 1: out of memory")
    monkeypatch.setattr(logger, "disabled", True)
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: False)
    notify(logger, "silenced")
    assert capsys.readouterr().err == "[memopt] step 1: out of memory\n"


@given(
    st.text() | st.text(st.sampled_from(["\x1b", "\x9b", "\x7f", "\r", "\t", "\n", "\u202e", "\u2069", "\udcff", "a"]))
)
def test_nothing_printable_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    bidirectional = {"L", "R", "AL", "EN", "ES", "ET", "AN", "CS", "NSM", "BN", "B", "S", "WS", "ON", ""}
    for one in shown.replace("\n", "").replace("\t", ""):
        assert unicodedata.category(one) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(one) in bidirectional  # of letters, none that embeds or overrides
    assert all(shown.count(one) == text.count(one) for one in "\n\t")
    assert printable(shown) == shown
    assert shown.encode().decode() == shown
    kept = "".join(one for one in text if one in "\n\t" or one.isprintable())
    assert printable(kept) == kept


@given(st.text(max_size=20))
def test_json_says_the_same_afterwards(text: str) -> None:
    for escaped in (True, False):
        assert json.loads(printable(json.dumps({text: text}, ensure_ascii=escaped, indent=2))) == {text: text}


def test_notices_and_records_are_printable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notify(logging.getLogger("hf_memopt.somewhere"), "model \x1b[31m")
    assert caplog.messages == ["model \\u001b[31m"]
    record = PrintableRecord("other", logging.WARNING, "file", 1, "%s of %d", ("\x1b[31m\u202e", 3), None)
    assert record.getMessage() == "\\u001b[31m\\u202e of 3"
    logger = logging.getLogger("hf_memopt.somewhere")
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    notify(logger, "model \x1b[31m")
    assert capsys.readouterr().err == "[memopt] model \\u001b[31m\n"
