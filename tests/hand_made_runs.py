"""The JSON of runs on a GPU that the tests do not have, as ``MemoryReportCallback`` writes it."""

from __future__ import annotations

import copy
from typing import Any

from tables import tables

__all__ = ["finished_run", "lost_run"]


def finished_run(**changes: Any) -> dict[str, Any]:
    """Return a run of 40 steps that fitted, with a prediction."""
    return {**tables(__file__)["finished run"], **copy.deepcopy(changes)}


def lost_run(**changes: Any) -> dict[str, Any]:
    """Return a run that ran out of memory in step 3, in the backward pass."""
    return finished_run(**{**tables(__file__)["lost run"], **changes})
