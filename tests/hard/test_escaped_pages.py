"""Pages whose every text is a script: nothing of it runs in a browser, and no tag or attribute comes of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, Chromium
from hand_made_runs import finished_run, lost_run
from html_page import Page, with_text
from tiny_plans import fitting_plan, missing_plan
from typer.testing import CliRunner

import tiny
from hf_memopt import custom_gpu, estimate, padding_report, plan, recipe
from hf_memopt.cli.app import app
from hf_memopt.reports.plan import plan_page, read_plan_text
from hf_memopt.reports.run import read_run, run_page

pytestmark = pytest.mark.filterwarnings("ignore")

EVIL = (
    "<script>alert(1)</script></style></title></pre><img src=x onerror=alert(2)><svg onload=alert(3)>"
    '" autofocus onfocus="alert(4)" x="\' onmouseover=\'alert(5)\' {{ 7 * 7 }} javascript:alert(6) --></textarea>'
)
NAME = "<img src=x onerror=alert(1)>"  # of a folder, whose name has no slash
DRAWN = re.compile(r"<svg .*?</svg>", re.DOTALL)
URL = re.compile(r'\b(?:src|href|action|data)="(.*?)"')
SVG_TAGS = {"svg", "g", "defs", "clippath", "rect", "pattern", "path", "text", "title", "use"}
HOOK = "window.ran = []; window.alert = (what) => window.ran.push(what);"


def _pages(text: str) -> Iterator[tuple[str, str]]:
    """Yield each kind of page with this text in place of each."""
    change = partial(with_text, text)
    for name, content in (("finished", finished_run()), ("lost", lost_run())):
        yield name, run_page(read_run(json.dumps(change(content)), "run.json"))
    for name, found in (("fits", fitting_plan()), ("over", missing_plan())):
        content = change(json.loads(found.to_json(figures=True)))
        yield name, plan_page(read_plan_text(json.dumps(content), "plan.json"))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return dict(_pages(EVIL))


def test_texts_make_no_tags_and_no_attributes(pages: dict[str, str]) -> None:
    for name, clean in _pages("plain"):
        evil, plain = (Page(re.sub(DRAWN, "", page)) for page in (pages[name], clean))
        pictures = "".join(re.findall(DRAWN, pages[name]))
        drawn = Page(pictures)  # a longer text has more lines
        assert set(drawn.tags) <= SVG_TAGS, name
        assert drawn.attributes <= Page("".join(re.findall(DRAWN, clean))).attributes, name
        assert all(re.fullmatch(r"#m\w+", url) for url in URL.findall(pictures)), name
        assert Page(pages[name]).open == [], name
        assert Counter(evil.tags) == Counter(plain.tags), name
        assert evil.attributes == plain.attributes, name
        assert set(evil.loaded) == set(plain.loaded), name
        assert "alert(1)" in pages[name], name
        assert not re.search("onmouseover.{0,20}?49", pages[name]), name  # no template in a text is filled in


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=HOOK)
        yield opened


def _ran(browser: Chromium, page: str, path: Path) -> Any:
    path.write_text(page)
    browser.open(path, 800)
    browser.value(
        "document.querySelectorAll('*').forEach((one) => {"
        " for (const kind of ['mouseover', 'focus', 'click', 'load', 'error']) one.dispatchEvent(new Event(kind)); })"
    )
    return browser.value("new Promise((done) => setTimeout(() => done(window.ran), 50))")


def test_nothing_runs_in_a_browser(browser: Chromium, pages: dict[str, str], tmp_path: Path) -> None:
    for name, page in pages.items():
        assert _ran(browser, page, tmp_path / "page.html") == [], name
    unescaped = pages["lost"].replace("<body>", f"<body>{EVIL}", 1)
    assert _ran(browser, unescaped, tmp_path / "page.html") == []  # by the policy
    allowed = re.sub('<meta http-equiv="Content-Security-Policy".*?>', "", unescaped)
    assert set(_ran(browser, allowed, tmp_path / "page.html")) >= {1, 2}  # the hook sees what does run


def test_names_of_folders_files_and_gpus(browser: Chromium, tmp_path: Path) -> None:
    """From the model's folder to the page, as a user comes by them."""
    tiny.llama_config(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / NAME)
    rows = tmp_path / f"{NAME}.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n' * 8)
    gpu = custom_gpu("1GiB", "8.6", name=EVIL)
    found = plan(str(tmp_path / NAME), gpu=gpu, seq_len=8, effective_batch_size=1, method="full", lengths=[3, 1] * 8)
    found = replace(found, command=f"hf-memopt plan {NAME}")
    written = found.write(tmp_path / "run", data=rows)
    compile(Path(str(written.script)).read_text(), "train.py", "exec")
    found.report(tmp_path / "page.html")
    found.plot(tmp_path / "page.svg")
    assert _ran(browser, (tmp_path / "page.html").read_text(), tmp_path / "again.html") == []
    assert "<img" not in (tmp_path / "page.svg").read_text()
    estimated = estimate(str(tmp_path / NAME), batch_size=1, seq_len=8, gpu=gpu)
    estimated.plot(tmp_path / "estimate.svg")
    named = recipe("4gb-gpu").replace(name=EVIL, purpose=EVIL, reasons={"optim": EVIL})
    for shown in (found._repr_html_(), estimated._repr_html_(), named._repr_html_(), padding_report([3])._repr_html_()):
        assert set(Page(shown).tags) <= {"pre", "span"}
        assert _ran(browser, f"<html><body>{shown}</body></html>", tmp_path / "again.html") == []


def test_a_name_that_is_markup_of_a_terminal(tmp_path: Path) -> None:
    """For rich, ``[/red]`` closes what was not opened, and matplotlib reads ``$...$`` as mathematics."""
    for name in ("[/red]", "$\\frac{$"):
        folder = tmp_path / name
        tiny.llama_config().save_pretrained(folder)
        options = ["--batch-size", "1", "--seq-len", "8", "--gpu", "T4", "--plot", str(tmp_path / "a.png")]
        done = CliRunner().invoke(app, ["estimate", str(folder), *options])
        assert done.exit_code == 0, done.output
        assert folder.name in done.output
