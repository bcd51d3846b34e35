"""``Change`` records an automatic decision with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CHANGES = "memopt_changes"  # the attribute of a trainer that holds what was changed


@dataclass(frozen=True, slots=True)
class Change:
    """One automatic choice, or one that was refused, with its reason.

    ``name`` is the setting, ``old`` what was asked for or would have been used, ``new`` what is used now.

    Examples:
        >>> print(Change("gradient_accumulation_steps", 4, 8, "keeps 32 examples per optimizer step"))
        gradient_accumulation_steps: 4 -> 8 (keeps 32 examples per optimizer step)
    """

    name: str
    old: Any
    new: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} -> {self.new!r} ({self.reason})"


def add_change(changes: list[Change], change: Change) -> bool:
    """Append a change unless the list has it already, from an earlier run; return whether it is new."""
    is_new = change not in changes
    if is_new:
        changes.append(change)
    return is_new


def record_changes(trainer: Any, changes: Iterable[Change]) -> None:
    """Append changes to those that are known of this trainer, ``trainer.memopt_changes``."""
    known = getattr(trainer, CHANGES, ())
    setattr(trainer, CHANGES, (*known, *(change for change in changes if change not in known)))
