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
from html_page import EVIL, Page
from typer.testing import CliRunner

from hf_memopt import Plan
from hf_memopt.cli.app import app
from hf_memopt.reports.page import check_page
from hf_memopt.reports.plan_file import read_plan_text
from hf_memopt.reports.plan_page import plan_page
from hf_memopt.units import format_bytes, to_gib

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SECTIONS = ("peak", "ladder", "scatter", "map", "timeline", "padding", "choices", "sure", "script")


def page_of(text: str) -> str:
    return plan_page(read_plan_text(text, "plan.json"))


def test_it_is_one_whole_file_without_a_network(text: str) -> None:
    page = page_of(text)
    read = Page(page)
    assert read.open == []
    assert len(set(read.ids)) == len(read.ids)
    assert set(SECTIONS) <= set(read.ids)
    assert [where for where in read.loaded if where.startswith("#")] == ["#sure"]
    assert [where for where in read.loaded if not where.startswith("#")] == ["data:,"]
    assert not re.search(r"@import|url\(", page)
    assert read.tags.count("script") == 1
    assert len(page.encode()) < 400_000


def test_it_says_what_the_plan_says(found: Plan, text: str) -> None:
    read = Page(page_of(text))
    one = found.chosen
    assert one is not None
    said = " ".join(read.text.split())
    assert f"{found.model} on {found.gpu.name}" in said
    assert f"{to_gib(one.total_bytes):.2f} of {to_gib(found.gpu.usable_bytes):.2f} GiB" in said
    assert f"{format_bytes(one.spare_bytes)} to spare" in said
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


def test_what_does_not_fit_says_what_is_missing(short: Plan) -> None:
    page = page_of(short.to_json(figures=True))
    read = Page(page)
    assert read.open == []
    said = " ".join(read.text.split())
    assert short.shortfall is not None
    assert "Does not fit" in said
    assert f"{format_bytes(short.shortfall.lacks_bytes)} too much" in said
    assert f"a GPU such as {short.shortfall.gpu}" in said
    assert "✕ out of memory here: " in said
    assert "No data was given" in said


def test_a_notebook_shows_the_table(found: Plan) -> None:
    shown = found._repr_html_()
    assert shown.startswith("<pre")
    words = " ".join(Page(shown).text.split())
    assert " ".join(found.table(80).split()) == words
    assert EVIL not in replace(found, model=EVIL)._repr_html_()


def test_json_without_figures_is_a_page_without_their_pictures(found: Plan, text: str) -> None:
    short, whole = page_of(found.to_json()), page_of(text)
    assert Page(short).open == []
    assert len(short) < len(whole)


def test_texts_are_escaped(text: str) -> None:
    told = json.loads(text)
    told["model"] = told["gpu"] = told["command"] = told["script"] = EVIL
    told["notes"] = [EVIL, '" onmouseover="alert(1)']
    told["chosen"]["name"] = told["chosen"]["reason"] = EVIL
    for one in told["candidates"]:
        one["name"] = one["reason"] = f'"><img src=x onerror=alert(1)>{EVIL}'
    told["chosen"]["recipe"]["name"] = "</code></pre>" + EVIL
    told["versions"] = {EVIL: EVIL}
    figures = told["figures"]
    figures["timeline"]["peak"]["module"] = EVIL
    figures["choices"][0]["value"] = figures["choices"][0]["reason"] = EVIL
    figures["padding"]["strategies"][0]["name"] = EVIL
    for phase in figures["timeline"]["phases"]:
        phase["name"] = f'x" onclick="alert(1)">{EVIL}'
    page = page_of(json.dumps(told))
    read = Page(page)
    assert read.open == []
    assert read.tags.count("script") == 1
    assert "img" not in read.tags
    assert EVIL not in page
    assert EVIL in read.text


def test_the_policy_allows_the_one_script_by_its_hash(text: str) -> None:
    page = page_of(text)
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["script-src"] == f"'sha256-{allowed}'"
    assert rules["default-src"] == "'none'"
    assert not re.search(r"\son\w+=", page)  # a handler in an attribute would not run


def test_the_script_is_there_to_copy(text: str) -> None:
    script = "import torch\n\nmodel = a < b and c > d\n"
    read = Page(page_of(json.dumps({**json.loads(text), "script": script})))
    assert "train" in read.ids
    assert script in read.text
    assert "train" not in Page(page_of(json.dumps({**json.loads(text), "script": None}))).ids


def test_the_same_file_comes_from_the_plan_and_from_its_json(found: Plan, text: str, tmp_path: Path) -> None:
    found.report(tmp_path / "first.html")
    (tmp_path / "plan.json").write_text(text)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "plan.json")])
    assert (done.exit_code, done.output) == (0, f"Report: {tmp_path / 'plan.html'}\n")
    assert (tmp_path / "plan.html").read_bytes() == (tmp_path / "first.html").read_bytes()
    again = CliRunner().invoke(app, ["report", str(tmp_path / "plan.json")])
    assert again.exit_code == 2
    assert "plan.html exists already; expected a new file. Pass another name, or --force to replace it" in again.output
    other = ["-o", str(tmp_path / "first.html"), "--force"]
    assert CliRunner().invoke(app, ["report", str(tmp_path / "plan.json"), *other]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("plan.txt", "is no web page; expected a name that ends in .html. Pass plan.html"),
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

SHOWN = """(() => {
    const box = (one) => one.getBoundingClientRect();
    const all = (names) => [...document.querySelectorAll(names)];
    return {
        width: document.documentElement.scrollWidth, window: document.documentElement.clientWidth,
        pictures: [".bar.large", "#ladder .bar", "#scatter .plot", "#map .cells", "#timeline .plot", ".histogram"].map(
            (name) => document.querySelector(name)).map((one) => one && [box(one).width, box(one).height]),
        curves: all("#timeline path.area, #timeline path.reserved").filter((one) => box(one).height > 0).length,
        points: all(".point").filter((one) => box(one).width > 4).length,
        wide: all("body *").filter((one) => box(one).right > innerWidth + 1 && !one.closest(".scroll, pre, .marks"))
            .map((one) => one.tagName + "." + one.className),
        ink: getComputedStyle(document.body).backgroundColor,
    };
})()"""


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_without_complaint(
    browser: Chromium, found: Plan, short: Plan, text: str, tmp_path: Path, width: int
) -> None:
    pages = {
        "fits": text,
        "over": short.to_json(figures=True),
        "long": json.dumps({**json.loads(text), "model": "x" * 200}),
    }
    for name, told in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(page_of(told))
        browser.open(path, width)
        shown = browser.value(SHOWN)
        assert browser.complaints() == []
        assert shown["window"] == width
        assert shown["width"] <= width, name
        pictures = [one for one in shown["pictures"] if one is not None]
        assert len(pictures) == (5 if name == "over" else 6)
        assert all(wide > 200 and high > 15 for wide, high in pictures)
        assert shown["curves"] >= 5
        assert shown["points"] >= 3
        assert shown["wide"] == []


def test_dark_and_copy(browser: Chromium, text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(text))
    browser.open(path, 800)
    light = browser.value(SHOWN)["ink"]
    browser.open(path, 800, dark=True)
    assert browser.value(SHOWN)["ink"] != light
    browser.value("document.querySelector('button[data-copy=install]').click()")
    selected = browser.value("new Promise((done) => setTimeout(() => done(getSelection().toString()), 50))")
    assert selected.startswith("pip install ")
    assert browser.value("document.querySelector('button[data-copy=install]').textContent") in ("Copied", "Selected")
    assert browser.complaints() == []
