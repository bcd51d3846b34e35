"""Every text of a page is escaped: no tag, no attribute and no script comes of one."""

from __future__ import annotations

import json

import pytest
from hand_made_runs import lost_run
from html_page import EVIL, Page, with_text

from hf_memopt.prediction.reports.plan import plan_page, read_plan_text
from hf_memopt.prediction.reports.run import read_run, run_page

TEXT = f'"><img src=x onerror=alert(1)>\' " onload="alert(1)" {EVIL}'


@pytest.mark.filterwarnings("ignore:constrained_layout not applied:UserWarning")  # such long names leave no room
def test_texts_are_escaped(text: str) -> None:
    pages = {
        "plan": plan_page(read_plan_text(json.dumps(with_text(TEXT, json.loads(text))), "plan.json")),
        "run": run_page(read_run(json.dumps(with_text(TEXT, lost_run())), "memopt_run.json")),
    }
    for name, page in pages.items():
        read = Page(page)
        assert read.open == [], name
        assert read.tags.count("script") == 1, name
        assert "img" not in read.tags, name
        assert not [one for one in read.attributes if one.startswith("on")], name
        assert EVIL not in page, name
        assert EVIL in read.text, name
