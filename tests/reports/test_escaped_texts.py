"""Every text of a page is escaped: no tag, no attribute and no script comes of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hand_made_runs import estimate_data, lost_run
from html_page import EVIL, Page, with_text

from hf_memopt.reports.difference import compare, difference_page, read_side
from hf_memopt.reports.plan import plan_page, read_plan_text
from hf_memopt.reports.run import read_run, run_page

TEXT = f'"><img src=x onerror=alert(1)>\' " onload="alert(1)" {EVIL}'


@pytest.mark.filterwarnings("ignore:constrained_layout not applied:UserWarning")  # such long names leave no room
def test_texts_are_escaped(text: str, tmp_path: Path) -> None:
    for name, told in (("a", with_text(TEXT, estimate_data())), ("b", estimate_data())):
        (tmp_path / name).write_text(json.dumps(told))
    pages = {
        "plan": plan_page(read_plan_text(json.dumps(with_text(TEXT, json.loads(text))), "plan.json")),
        "run": run_page(read_run(json.dumps(with_text(TEXT, lost_run())), "memopt_run.json")),
        "difference": difference_page(compare(*(read_side(tmp_path / name) for name in "ab"))),
    }
    for name, page in pages.items():
        read = Page(page)
        assert read.open == [], name
        assert read.tags.count("script") == 1, name
        assert "img" not in read.tags, name
        assert not [one for one in read.attributes if one.startswith("on")], name
        assert EVIL not in page, name
        assert EVIL in read.text, name
