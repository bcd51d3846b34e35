"""The plans of ``tiny_plans`` and the JSON of one."""

from __future__ import annotations

import pytest
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
