"""The part of docs/cli.md that the command line prints itself: the help of every command."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from hf_memopt.cli.app import app

WIDTH = "80"


def cli_help() -> str:
    """Return the help of each command, as a terminal of 80 columns shows it."""
    parts = []
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="hf-memopt", env={"COLUMNS": WIDTH}).output
        lines = "\n".join(line.rstrip() for line in shown.strip("\n").splitlines())
        parts.append(f"## hf-memopt {name}\n\n```text\n{lines}\n```")
    return "\n\n".join(parts)
