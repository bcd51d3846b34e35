"""What a terminal gets of foreign text, and what a notebook shows of the objects that a terminal shows as text."""

from __future__ import annotations

import ast
import io
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal_runs import FOREIGN, NAME, on_terminal, write_foreign_files

import hf_memopt
import tiny
from hf_memopt import estimate, padding_report, recipe
from hf_memopt.notices import printable
from hf_memopt.terminal import Console, printed_html, printed_text


def text_of(html: str) -> str:
    assert html.startswith("<pre")
    assert html.endswith("</pre>")
    return re.sub(r"<[^>]+>", "", html).replace("&quot;", '"').replace("&#x27;", "'").replace("&gt;", ">")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu="RTX 3060 12GB"), "Reserved load"),
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


@given(st.text(st.characters(exclude_characters="\t\x07\x08\x0b\x0c\r")))  # rich takes those away or expands them
def test_the_console_prints_what_is_printable_with_its_own_colours(text: str) -> None:
    console = Console(file=(stream := io.StringIO()), force_terminal=True, color_system="truecolor", width=10**4)
    console.out(text, highlight=False)
    assert stream.getvalue() == f"{printable(text)}\n"
    console.out(text, style="red", highlight=False)
    plain = re.sub("\x1b\\[(31|0)?m", "", stream.getvalue())
    assert plain == f"{printable(text)}\n" * 2


def test_tables_spinners_and_notebooks_are_printable() -> None:
    from rich.table import Table

    table = Table(NAME, title=NAME, caption=NAME)
    table.add_row(NAME)
    shown = printed_text(lambda console: console.print(table)) + printed_html(lambda console: console.print(table))
    console = Console(file=(stream := io.StringIO()), force_terminal=True, width=200)
    with console.status(NAME):
        pass
    assert [one for one in FOREIGN if one in shown + stream.getvalue()] == []
    assert "\\u001b]0;PWNED" in stream.getvalue()
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (["lengths", "esc.parquet"], 2, "has the columns esc\\u001b]0;PWNED"),
        (["report", f"{NAME}.json", "run_a.json"], 2, "Make a page of each: hf-memopt report 'esc\\u001b]0;PWNED"),
        (
            ["lengths", os.fsdecode(b"\xff\xfe.csv")],
            2,
            "'\\udcff\\udcfe.csv' does not exist; expected a file or a folder",
        ),
        (["lengths", "a", "\u202eb"], 2, "Got unexpected extra argument(s) (\\u202eb)"),
    ],
)
def test_no_foreign_escape_reaches_a_terminal(line: list[str], code: int, said: str, tmp_path: Path) -> None:
    write_foreign_files(tmp_path)
    found, shown = on_terminal(line, tmp_path)
    assert (found, [one for one in FOREIGN if one in shown]) == (code, []), shown
    assert said in " ".join(shown.split())


def test_nothing_is_printed_past_the_console() -> None:
    """``print`` is for figures alone, ``typer.echo`` for constants and for errors that are printable already."""
    allowed = {
        "prediction/memory/run/printed_memory.py": {"print"},
        "prediction/recipes/running/script_as_main.py": {"print"},  # of what printable() returns
        "prediction/rehearsal/child.py": {"print"},  # of what a script gives sys.exit, as Python does
        "cli/app.py": {"typer.echo"},
        "cli/options.py": {"typer.echo"},
    }
    package = Path(hf_memopt.__file__).parent
    for path in package.rglob("*.py"):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(package).as_posix()
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        past = {"print", "typer.echo", "click.echo", "sys.stdout.write", "sys.stderr.write", "rich.console.Console"}
        assert called & past <= allowed.get(name, set()), name
        if "Console" in called:  # rich's is for annotations
            ours = "from hf_memopt.terminal import Console"
            assert name == "terminal.py" or ours in map(ast.unparse, ast.walk(tree)), name
