"""Count what micro-batching did in a run, for the notice at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_memopt.techniques.microbatching.limits import Limit

__all__ = ["Tally"]


@dataclass
class Tally:
    """What micro-batching did in a run.

    Attributes:
        steps: optimizer steps.
        cut_steps: those of them that ran in micro-batches.
        failures: attempts that ran out of memory.
        lost_seconds: what these took, and what was repeated.
        seconds: the whole run.
        check_seconds: what the checks took that rows are independent.
    """

    steps: int = 0
    cut_steps: int = 0
    failures: int = 0
    lost_seconds: float = 0.0
    seconds: float = 0.0
    check_seconds: float = 0.0

    def restart(self) -> None:
        """Count from 0."""
        self.steps = self.cut_steps = self.failures = 0
        self.lost_seconds = self.seconds = self.check_seconds = 0.0

    def summary(self, limits: Mapping[str, Limit]) -> str:
        """Return what it cost, and how to spare it next time."""
        learned = [f"{name}={limit.limit}" for name, limit in limits.items() if limit.limit != limit.maximum]
        text = f"{self.cut_steps} of {self.steps} steps ran in micro-batches."
        if self.check_seconds:
            share = self.check_seconds / max(self.seconds, self.check_seconds)
            text += f" Checks that rows are independent took {self.check_seconds:.1f} s, {share:.1%} of the run."
        if self.failures:
            times = "once" if self.failures == 1 else f"{self.failures} times"
            text += f" Memory ran out {times}, which cost {self.lost_seconds:.1f} s."
        return text + (f" To cut from the first step on: MicrobatchCallback({', '.join(learned)})" if learned else "")
