"""The message that a command was stopped by, out of the lines ``error:`` and ``hint:`` that it prints."""

from __future__ import annotations

from typing import Any

__all__ = ["in_one_line", "stopped"]


def in_one_line(printed: str) -> str:
    """Return what was printed as the message that was raised; what is no error stays."""
    return printed.replace("\nhint: ", ". ").removeprefix("error: ").replace("\nerror: ", "\n")


def stopped(result: Any) -> str:
    """Return the message of a command that ended with exit code 2 and printed nothing else."""
    assert (result.exit_code, result.stdout, result.stderr[-1:]) == (2, "", "\n"), result.output
    return in_one_line(result.stderr)[:-1]
