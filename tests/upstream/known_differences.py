"""Which of transformers' own tests do not hold for an attached Trainer, each for a reason of its own."""

from __future__ import annotations

from fnmatch import fnmatchcase

KNOWN: dict[str, tuple[str, str]] = {}
"""Reasons by the pattern of a test's node id: the variant ("*" for all), and the reason."""


def reason_of(test: str, variant: str) -> str | None:
    """Return why a test does not hold in a variant; None if no reason is known."""
    found = (reason for pattern, (of, reason) in KNOWN.items() if fnmatchcase(test, pattern) and of in ("*", variant))
    return next(found, None)
