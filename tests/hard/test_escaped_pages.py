"""Pages whose every text is a script: nothing of it runs in a browser, and no tag or attribute comes of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, Chromium
from hand_made_runs import finished_run, lost_run
from html_page import Page, with_text
from tiny_plans import fitting_plan, missing_plan

from hf_memopt.prediction.reports.plan import plan_page, read_plan_text
from hf_memopt.prediction.reports.run import read_run, run_page

pytestmark = pytest.mark.filterwarnings("ignore")

EVIL = (
    "<script>alert(1)</script></style></title></pre><img src=x onerror=alert(2)><svg onload=alert(3)>"
    '" autofocus onfocus="alert(4)" x="\' onmouseover=\'alert(5)\' {{ 7 * 7 }} javascript:alert(6) --></textarea>'
)
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
