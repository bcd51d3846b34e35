"""The plans of ``tiny_plans``, the JSON of one, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import CHROMIUM, Chromium
from tiny_plans import fitting_plan, missing_plan

from hf_memopt import Plan


@pytest.fixture(scope="session")
def found() -> Plan:
    return fitting_plan()


@pytest.fixture(scope="session")
def short() -> Plan:
    return missing_plan()


@pytest.fixture(scope="session")
def text(found: Plan) -> str:
    return found.to_json(figures=True)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
