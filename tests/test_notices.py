"""Sentences for the person who watches a training."""

from __future__ import annotations

import logging

import pytest

from hf_memopt.notices import notify


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
