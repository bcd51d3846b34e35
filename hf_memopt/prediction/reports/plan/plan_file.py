"""The JSON that ``hf-memopt plan --json`` writes, as reports read it: the figures of ``Plan``, by ``Plan.to_json``."""

from __future__ import annotations

from typing import Any

from hf_memopt.plain_data import read_json

FORMAT = 2
"""Raised when a field changes its meaning or goes."""

PlanData = dict[str, Any]
CandidateData = dict[str, Any]


def read_plan_text(text: str | bytes, name: str) -> PlanData:
    """Return the plan of a JSON text; ``name`` is what messages call it."""
    remedy = "Write it anew: hf-memopt plan MODEL --json > plan.json"
    return read_json(text, (1, FORMAT), path=name, what="a plan", remedy=remedy)


def shown_one(told: PlanData) -> CandidateData:
    """Return the chosen set-up, else the one that comes nearest."""
    found: CandidateData = told["chosen"] or told["shortfall"]["nearest"]
    return found


def batch_of(one: CandidateData) -> str:
    """Return the rows of a micro-batch times the micro-batches."""
    return f"{one['micro_batch_size']} x {one['accumulation_steps']}"


def is_same(one: CandidateData, other: CandidateData | None) -> bool:
    """Return whether two are the same set-up."""
    names = ("name", "micro_batch_size", "seq_len")
    return other is not None and all(one.get(name) == other.get(name) for name in names)
