"""The message that a command was stopped by, out of the lines ``error:`` and ``hint:`` that it prints."""

from __future__ import annotations

__all__ = ["in_one_line"]


def in_one_line(printed: str) -> str:
    """Return what was printed as the message that was raised; what is no error stays."""
    return printed.replace("\nhint: ", ". ").removeprefix("error: ").replace("\nerror: ", "\n")
