"""Train a pattern in a set-up, do what a refusal says, and compare what came of it with what comes of stock."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer

from comparison import ABSOLUTE, NARROW, RELATIVE, Outcome, Run, compared, outcome_of_error, run
from hf_memopt import attach
from pattern import REMEDIES, SETUPS, Pattern, Remedy, Setup
from starvation import Starvation

ROUNDING = 2.0**-23


class Found(NamedTuple):
    """What came of a pattern in a set-up.

    ``remedied``: the same with the remedy of a refusal; ``is_whole``: whether a batch that was to be cut was not.
    """

    outcome: Outcome
    remedied: Outcome | None = None
    is_whole: bool = False

    @property
    def is_as_stock(self) -> bool:
        """Whether it is, or becomes so by the remedy."""
        last = self.outcome if self.outcome.verdict != "refused" or self.remedied is None else self.remedied
        return last.verdict in ("same", "equal")


def found_in(pattern: Pattern, setup: str) -> Found:
    """Train a pattern in a set-up, and once more with the remedy where it is refused."""
    outcome, is_whole = _outcome(pattern, SETUPS[setup])
    if outcome.verdict != "refused":
        return Found(outcome, is_whole=is_whole)
    known = (remedy for text, remedy in REMEDIES.items() if re.search(text, outcome.detail))
    remedy = pattern.remedies.get(setup, next(known, None))
    if remedy is None:
        return Found(outcome)
    return Found(outcome, _outcome(pattern, replace(SETUPS[setup], callbacks=remedy.callbacks), remedy)[0])


def is_right(pattern: Pattern, setup: str, found: Found) -> bool:
    """Return whether it is as with stock, or refused, as expected, with a remedy that makes it so."""
    is_expected = re.search(pattern.refuses.get(setup, ""), found.outcome.detail) is not None
    return found.is_as_stock and is_expected


@functools.lru_cache(maxsize=4)
def stock_run(pattern: Pattern) -> Run:
    """Train with stock."""
    return run(pattern.build, pattern.drive)


def repeated(pattern: Pattern) -> Outcome:
    """Train with stock twice and compare; what is not finite, or is not trained at all, is an error."""
    one = stock_run(pattern)
    for name, value in one.values.items():
        numbers = value if torch.is_tensor(value) else torch.tensor(value if isinstance(value, (int, float)) else 0.0)
        if numbers.is_floating_point() and not math.isfinite(numbers.double().abs().sum().item()):
            return Outcome("error", f"{name} is not finite")
    if pattern.trains and not any(value for name, value in one.values.items() if name.startswith("grad_norm")):
        return Outcome("error", "no gradient")
    return compared(run(pattern.build, pattern.drive).values, one.values)


def rounded(pattern: Pattern) -> Outcome:
    """Train with stock from weights that are off by a rounding: what this makes of it, no cut can be blamed for."""

    def build(folder: Path) -> Trainer:
        trainer = pattern.build(folder)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                if weight.dtype == torch.float32:
                    weight.mul_(1 + ROUNDING * torch.randn(weight.shape, generator=generator).clamp(-2, 2))
        return trainer

    return _compared(pattern, run(build, pattern.drive), stock_run(pattern))


def _outcome(pattern: Pattern, setup: Setup, remedy: Remedy | None = None) -> tuple[Outcome, bool]:
    """Train in a set-up and compare with stock; return also whether batches that were to be cut were whole."""
    stock = stock_run(pattern) if remedy is None else run(_changed(pattern, remedy), pattern.drive)
    starved: list[Starvation] = []

    def drive(trainer: Trainer) -> Mapping[str, Any]:
        attach(trainer, *setup.callbacks())
        starved.append(Starvation(trainer, pattern.fits, setup.starves))
        with starved[0] if setup.cuts or setup.starves else contextlib.nullcontext():
            return pattern.drive(trainer)

    try:
        ours = run(pattern.build if remedy is None else _changed(pattern, remedy), drive)
    except Exception as error:  # whatever the pattern, or what stands over it, raises
        return outcome_of_error(error), False
    if setup.starves is not None and starved[0].raised == 0 and remedy is None:
        return Outcome("error", "memory did not run out"), False
    is_exact = setup.starves is None and not setup.callbacks()
    outcome = compared(ours.values, stock.values) if is_exact else _compared(pattern, ours, stock)
    new = tuple(dict.fromkeys(text for text in ours.warnings if text not in stock.warnings))
    return outcome._replace(warnings=new), setup.cuts and starved[0].most_rows > pattern.fits


def _compared(pattern: Pattern, ours: Run, stock: Run) -> Outcome:
    tolerance = NARROW if pattern.is_narrow else (RELATIVE, ABSOLUTE)
    return compared(ours.values, stock.values, is_cut=True, compares_all=True, tolerance=tolerance)


def _changed(pattern: Pattern, remedy: Remedy) -> Callable[[Path], Trainer]:
    def build(folder: Path) -> Trainer:
        trainer = pattern.build(folder)
        remedy.change(trainer)
        return trainer

    return build
