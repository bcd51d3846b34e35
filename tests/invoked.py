"""Run a command of ``hf-memopt`` in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from hf_memopt.cli.app import app

__all__ = ["invoked"]


def invoked(*words: object) -> Any:
    """Return typer's result: exit code, output and standard error, in a terminal of 200 columns."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, words)))
