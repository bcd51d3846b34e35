"""What the package tells about its own decisions: ``Change``, the errors of its own, and the hint of an error text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["BudgetError", "Change", "MissingExtraError", "add_change", "nearest"]


@dataclass(frozen=True, slots=True)
class Change:
    """One automatic choice, or one that was refused, with its reason.

    ``name`` is the setting, ``old`` what was asked for or would have been used, ``new`` what is used now.

    Example:
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


class BudgetError(RuntimeError):
    """A set-up needs more memory than its budget allows."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed.

    Args:
        package: the distribution that could not be imported.
        extra: the extra of hf-memopt that installs it.
        purpose: what needs it, as the subject of a sentence.
    """

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed. Call: pip install 'hf-memopt[{extra}]'")
        self.package = package
        self.extra = extra


def nearest(name: Any, known: Iterable[Any]) -> str:
    """Return the known name that ``name`` most resembles as a hint for an error text, or an empty string.

    What is not text resembles nothing.

    Example:
        >>> nearest("4gb", ["4gb-gpu", "cpu"])
        " Did you mean '4gb-gpu'?"
    """
    if not isinstance(name, str):
        return ""
    names = [other for other in known if isinstance(other, str)]
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""
