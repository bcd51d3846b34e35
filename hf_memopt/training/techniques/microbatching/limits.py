"""How large a micro-batch may be, lowered when memory runs out and raised again with care, and what was done."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_memopt.plain_data import Count, check_value
from hf_memopt.units import format_number, percent

LIMIT_NAMES = ("max_tokens", "max_examples")

FIRST_WAIT_STEPS = 200
MOST_FAILED_TRIES = 3


@dataclass(slots=True)
class Limit:
    """The largest size of a micro-batch, in padded tokens or in examples.

    - Out of memory sets the limit to half the size of the micro-batch that failed.
    - After ``wait_steps`` steps that were split and ran, a limit half as large again is tried. If memory runs out
      during such a try (it lasts ``wait_steps`` steps too), the limit returns to ``last_good`` and the wait doubles;
      after three failed tries the limit is not raised any more.
    - The limit never exceeds ``maximum``.

    Examples:
        >>> limit = Limit()
        >>> limit.lower(4096); limit.limit
        2048
        >>> sum(limit.note_step(was_split=True) for _ in range(200)), limit.limit
        (1, 3072)
        >>> limit.lower(2900); limit.limit, limit.wait_steps
        (2048, 400)
    """

    maximum: int | None = None  # what the user set; None for no maximum
    limit: int | None = None  # the current limit; None while batches are not split
    last_good: int | None = None  # the limit before the current try; None if there is no try
    steps_since_change: int = 0  # the steps that were split and ran since the limit last changed
    wait_steps: int = FIRST_WAIT_STEPS  # the number of such steps before a larger limit is tried
    failed_tries: int = 0  # how many tries ran out of memory

    def __post_init__(self) -> None:
        if self.limit is None:
            self.limit = self.maximum

    def lower(self, size: int) -> None:
        """Lower the limit after a micro-batch of this size, of two rows or more, ran out of memory.

        The new limit is always below ``size``, so repeated splitting ends. Half of the size is enough for the longest
        row, since the micro-batch had at least two.
        """
        if self.last_good is not None and self.last_good < size:
            self.limit = self.last_good
            self.wait_steps *= 2
            self.failed_tries += 1
        else:
            self.limit = max(size // 2, 1)
        self.last_good = None
        self.steps_since_change = 0

    def note_step(self, *, was_split: bool) -> bool:
        """Count a step that ran; return whether the limit was raised for the next one."""
        if self.limit is None or not was_split or self.failed_tries >= MOST_FAILED_TRIES:
            return False
        self.steps_since_change += 1
        if self.steps_since_change < self.wait_steps:
            return False
        raised = max(self.limit * 3 // 2, self.limit + 1)
        if self.maximum is not None:
            raised = min(raised, self.maximum)
        self.last_good = self.limit if raised > self.limit else None
        self.limit, self.steps_since_change = raised, 0
        return self.last_good is not None


def microbatch_limits(
    max_tokens: int | Literal["auto"] | None = None, max_examples: int | None = None
) -> dict[str, Limit]:
    """Return new limits for ``run_in_microbatches``.

    Examples:
        >>> microbatch_limits(max_tokens=4096)["max_tokens"].limit
        4096
    """
    check_value("max_tokens", max_tokens, Count | Literal["auto"] | None, 4096)
    check_value("max_examples", max_examples, Count | None, 8)
    return {
        "max_tokens": Limit(None if isinstance(max_tokens, str) else max_tokens),
        "max_examples": Limit(max_examples),
    }


def are_set(limits: Mapping[str, Limit]) -> bool:
    """Return whether batches are cut at all."""
    return any(limit.limit is not None for limit in limits.values())


def part_rows(limits: Mapping[str, Limit], columns: int | None) -> int:
    """Return the most rows of so many columns that the limits allow, 1 at least; ``columns=None``: by examples alone.

    Examples:
        >>> part_rows(microbatch_limits(max_tokens=100, max_examples=8), 30)
        3
    """
    tokens, examples = limits["max_tokens"].limit, limits["max_examples"].limit
    most = sys.maxsize if examples is None else examples
    return most if tokens is None or columns is None else min(most, max(1, tokens // max(columns, 1)))


def saved_limits(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Limit]:
    """Return the limits that a checkpoint has, as plain data."""
    return {name: Limit(**values.get(name, {})) for name in LIMIT_NAMES}


@dataclass
class Tally:
    """What micro-batching did in a run."""

    steps: int = 0  # optimizer steps
    cut_steps: int = 0  # those of them that ran in micro-batches
    failures: int = 0  # attempts that ran out of memory
    lost_seconds: float = 0.0  # what these took, and what was repeated
    seconds: float = 0.0  # the whole run
    check_seconds: float = 0.0  # what the checks took that rows are independent

    def restart(self) -> None:
        """Count from 0."""
        vars(self).update(vars(Tally()))

    def summary(self, limits: Mapping[str, Limit]) -> str:
        """Return what it cost, and how to spare it next time."""
        learned = [f"{name}={limit.limit}" for name, limit in limits.items() if limit.limit != limit.maximum]
        text = f"{self.cut_steps} of {self.steps} steps ran in micro-batches."
        if self.check_seconds:
            share = self.check_seconds / max(self.seconds, self.check_seconds)
            seconds = format_number(self.check_seconds)
            text += f" Checks that rows are independent took {seconds} s, {percent(share, 1)} of the run."
        if self.failures:
            times = "once" if self.failures == 1 else f"{self.failures} times"
            text += f" Memory ran out {times}, which cost {format_number(self.lost_seconds)} s."
        return text + (f" To cut from the first step on: MicrobatchCallback({', '.join(learned)})" if learned else "")
