"""What a notebook shows of the objects that a terminal shows as text."""

from __future__ import annotations

import re

import pytest

import tiny
from hf_memopt import estimate, padding_report, recipe


def text_of(html: str) -> str:
    assert html.startswith("<pre")
    assert html.endswith("</pre>")
    return re.sub(r"<[^>]+>", "", html).replace("&quot;", '"').replace("&#x27;", "'").replace("&gt;", ">")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu="RTX 3060 12GB"), "peak reserved"),
        (lambda: padding_report([3, 5, 8, 40] * 8), "What each way of padding wastes"),
        (lambda: recipe("4gb-gpu"), "effective_batch_size"),
    ],
    ids=["estimate", "padding report", "recipe"],
)
def test_a_notebook_shows_what_a_terminal_shows(make, expected) -> None:
    found = make()
    shown = text_of(found._repr_html_())
    assert expected in shown
    assert max(map(len, shown.splitlines())) <= 80  # 580 pixels
    words = set(re.findall(r"\w{4,}", str(found.table() if hasattr(found, "table") else found)))
    assert len(words - set(re.findall(r"\w{4,}", shown))) <= len(words) // 5  # names may wrap


def test_strings_are_escaped() -> None:
    named = recipe("4gb-gpu").replace(purpose="<script>alert(1)</script> [bold]")
    assert "<script>" not in named._repr_html_()
    assert "&lt;script&gt;" in named._repr_html_()


def test_text_made_in_a_notebook_is_not_displayed_piece_by_piece(monkeypatch, capsys) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # pinned: rich 13 to 15
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: print("displayed"))
    str(padding_report([3, 5, 8, 40] * 8))
    padding_report([3, 5, 8, 40] * 8)._repr_html_()
    assert capsys.readouterr().out == ""
