"""The HTML report of a plan: one whole file that says what the plan says, escaped, and the same from its JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Chromium
from html_page import EVIL, SHOWN, Page
from invoked import invoked
from printed_errors import in_one_line

from hf_memopt import Plan, plotting
from hf_memopt.plotting import LIGHT
from hf_memopt.prediction.reports import check_page
from hf_memopt.prediction.reports.plan import plan_page, read_plan_text
from hf_memopt.units import format_bytes, to_gib

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SECTIONS = ("peak", "ladder", "map", "timeline", "padding", "choices", "sure", "script")


def page_of(text: str) -> str:
    return plan_page(read_plan_text(text, "plan.json"))


@pytest.fixture(scope="module")
def page(text: str) -> str:
    """Its pictures take seconds to draw."""
    return page_of(text)


def test_it_is_one_whole_file_without_a_network(page: str) -> None:
    read = Page(page)
    assert read.open == []
    assert len(set(read.ids)) == len(read.ids)
    assert set(SECTIONS) <= set(read.ids)
    assert [where for where in read.loaded if where.startswith("#")] == ["#sure"]
    assert [where for where in read.loaded if not where.startswith("#")] == ["data:,"]
    assert not re.search(r"@import|url\((?!#)", page)
    assert read.tags.count("script") == 1
    assert len(page.encode()) < 400_000
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["script-src"] == f"'sha256-{allowed}'"
    assert rules["default-src"] == "'none'"
    assert not re.search(r"\son\w+=", page)  # a handler in an attribute would not run


def test_its_pictures_have_text_titles_and_the_colours_of_the_page(page: str) -> None:
    pytest.importorskip("matplotlib")
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 10  # a wide and a narrow one of each
    for svg in pictures:
        assert re.match(r'<svg class="(?:wide|narrow)" viewBox="[^"]*" role="img" aria-label="[^"]+">', svg)
        assert "<text" in svg
        assert "font-family" not in svg
        assert "fill: var(--paper)" in svg
        assert not set(re.findall(r": (#\w{6})", svg)) & {colour.lower() for colour in vars(LIGHT).values()}
    assert "<title>weights: " in pictures[0]
    assert "<title>1 example of 64 tokens, 4 times: fits" in pictures[4]


def test_without_matplotlib_it_has_its_tables_and_says_what_draws_pictures(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the script to copy, if the plan has one."""
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    script = "import torch\n\nmodel = a < b and c > d\n"
    read = Page(page_of(json.dumps({**json.loads(text), "script": script})))
    assert "train" in read.ids
    assert script in read.text
    assert "train" not in Page(page_of(json.dumps({**json.loads(text), "script": None}))).ids
    assert read.open == []
    assert "svg" not in read.tags
    assert 'To get them: pip install "hf-memopt[plot]"' in " ".join(read.text.split())
    assert set(SECTIONS) <= set(read.ids)


def test_it_says_what_the_plan_says(found: Plan, page: str) -> None:
    read = Page(page)
    one = found.chosen
    assert one is not None
    said = " ".join(read.text.split())
    assert f"{found.model} on {found.gpu.name}" in said
    assert f"{to_gib(one.total_bytes):.2f} of {to_gib(found.gpu.usable_bytes):.2f} GiB" in said
    assert f"{format_bytes(one.spare_bytes)} free" in said
    assert one.reason[1:] in said
    assert one.batch in said
    for candidate in found.candidates:
        assert candidate.reason in said
    for name, size in one.components.items():
        assert not size or f"{name} {format_bytes(size)}" in said
    assert "lengths measured Counted in 100 rows of your data." in said
    for choice in found.figures["choices"]:
        assert choice["reason"] in said
    assert said.count("pip install") == 1


def test_what_does_not_fit_says_what_is_missing(short: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)  # which is quicker
    page = page_of(short.to_json(figures=True))
    read = Page(page)
    assert read.open == []
    said = " ".join(read.text.split())
    assert short.shortfall is not None
    assert "Does not fit" in said
    assert f"{format_bytes(short.shortfall.lacks_bytes)} too much" in said
    assert f"a GPU such as {short.shortfall.gpu}" in said
    assert "Memory runs out: " in said
    assert "Lengths and padding" not in said  # no data was given


def test_a_notebook_shows_the_table(found: Plan) -> None:
    shown = found._repr_html_()
    assert shown.startswith("<pre")
    words = " ".join(Page(shown).text.split())
    assert " ".join(found.table(80).split()) == words
    assert EVIL not in replace(found, model=EVIL)._repr_html_()


def test_json_without_figures_is_a_page_without_their_pictures(found: Plan, page: str) -> None:
    short = Page(page_of(found.to_json()))
    assert short.open == []
    assert short.tags.count("svg") < Page(page).tags.count("svg")


def test_the_same_file_comes_from_the_plan_and_from_its_json(
    found: Plan, text: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.report(tmp_path / "first.html")
    assert (tmp_path / "first.html").read_text(encoding="utf-8") == page
    (tmp_path / "plan.json").write_text(text)
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)  # which is quicker
    done = invoked("report", tmp_path / "plan.json")
    assert (done.exit_code, done.output) == (0, f"Report: {tmp_path / 'plan.html'}\n")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == page_of(text)
    again = invoked("report", tmp_path / "plan.json")
    assert again.exit_code == 2
    assert "plan.html exists already; expected a new file. Pass another name, or --force to replace it" in in_one_line(
        again.output
    )
    other = ["-o", str(tmp_path / "first.html"), "--force"]
    assert invoked("report", tmp_path / "plan.json", *other).exit_code == 0
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "plan.html").read_bytes()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("plan.txt", "is not a web page; expected a name that ends in .html or .htm. Pass plan.html"),
        ("missing/plan.html", "is a folder or is in a missing one; expected a file in an existing folder."),
        ("there.html", "exists already; expected a new file. Pass another name, or force=True to replace it"),
    ],
)
def test_where_no_report_can_be_written_is_said_first(tmp_path: Path, found: Plan, name: str, says: str) -> None:
    (tmp_path / "there.html").write_text("kept")
    for call in (check_page, found.report):
        with pytest.raises(ValueError) as error:
            call(tmp_path / name)
        assert str(error.value).startswith(f"report={str(tmp_path / name)!r} ")
        assert says in str(error.value)
    assert (tmp_path / "there.html").read_text() == "kept"
    check_page(tmp_path / "there.html", force=True)


# ---- In a browser ---------------------------------------------------------------------------------------------------


def test_dark_and_copy(browser: Chromium, page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page)
    browser.open(path, 800)
    light = browser.value(SHOWN)
    browser.open(path, 800, dark=True)
    dark = browser.value(SHOWN)
    assert light["paper"] == light["drawn"] != dark["paper"] == dark["drawn"]  # a picture is of its page's colours
    browser.value("document.querySelector('button[data-copy=install]').click()")
    selected = browser.value("new Promise((done) => setTimeout(() => done(getSelection().toString()), 50))")
    assert selected.startswith("pip install ")
    assert browser.value("document.querySelector('button[data-copy=install]').textContent") in ("Copied", "Selected")
    assert browser.complaints() == []
