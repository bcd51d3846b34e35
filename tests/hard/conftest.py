"""Hard use: what a long run meets rarely. Everything in this folder is marked ``hard`` (``make test-hard``)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.hard)
            item.add_marker(pytest.mark.slow)  # so that `-m "not slow"` leaves it out too
