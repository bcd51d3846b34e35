"""Two published ladders of memory techniques, as data: rows of what others measured, and the settings of each.

``hf-memopt ladder`` predicts them, ``benchmarks/gpu.py ladder`` measures them. Read without torch or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from hf_memopt.errors import did_you_mean
from hf_memopt.plain_data import parse_object

__all__ = ["LADDERS", "Ladder", "LadderRow", "read_ladder"]

LADDERS = ("A", "B")


@dataclass(frozen=True)
class LadderRow:
    """A published run.

    Attributes:
        name: of its techniques.
        total_bytes: of the whole GPU, as published.
        seconds: of an optimizer step; of the whole task where only that was published (``Ladder.of_task``).
        settings: of ``estimate``, batch and length among them.
    """

    name: str
    total_bytes: int
    seconds: float
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Ladder:
    """A published ladder.

    Attributes:
        name: "A" or "B".
        title: model, data and effective batch.
        source: its address.
        measured_on: GPU and versions, as far as they were published.
        model: a known name.
        gpu: of the measurement, or the one that is assumed.
        of_task: whether seconds are those of a task of unknown size on an unknown GPU, so that only ratios mean
            anything.
        context_bytes: of CUDA, where the source measured it.
        effective_batch_size: examples of an optimizer step.
        seq_len: tokens of a row where a row says nothing else.
        then: settings of ``estimate`` for what the measured versions did and those of today do not.
        rows: in the order of the source.
    """

    name: str
    title: str
    source: str
    measured_on: str
    model: str
    gpu: str
    of_task: bool
    context_bytes: int | None
    effective_batch_size: int
    seq_len: int
    then: Mapping[str, Any]
    rows: tuple[LadderRow, ...]


def read_ladder(name: str) -> Ladder:
    """Return a ladder by its name.

    Raises:
        ValueError: no such ladder.
    """
    if name.upper() not in LADDERS:
        raise ValueError(
            f"name={name!r} is not a published ladder; expected A or B.{did_you_mean(name, LADDERS)} "
            "Call: hf-memopt ladder A"
        )
    return _every_ladder()[name.upper()]


@cache
def _every_ladder() -> dict[str, Ladder]:
    text = resources.files("hf_memopt.cli").joinpath("published_ladders.json").read_text(encoding="utf-8")
    return {name: _ladder(name, found) for name, found in parse_object(text).items()}


def _ladder(name: str, found: Mapping[str, Any]) -> Ladder:
    shared = {"precision": "fp32", "optim": "adamw_torch", "seq_len": found["seq_len"], **found["common"]}
    rows = []
    for row in found["rows"]:
        size_bytes = round(row["gib"] * 2**30) if "gib" in row else row["mib"] * 2**20
        speed = row.get("examples_per_second")
        seconds = row["seconds"] if speed is None else found["effective_batch_size"] / speed
        rows.append(LadderRow(row["id"], size_bytes, seconds, {**shared, **row["settings"]}))
    context = found.get("context_mib")
    return Ladder(
        name=name,
        of_task=found["gpu_is_assumed"],
        context_bytes=None if context is None else context * 2**20,
        rows=tuple(rows),
        **{key: found[key] for key in ("title", "source", "measured_on", "model", "gpu", "effective_batch_size")},
        seq_len=found["seq_len"],
        then=found["then"],
    )
