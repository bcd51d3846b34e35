"""Commands on a real pseudo-terminal, with names that steer a terminal in every place a command reads one from."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hand_made_runs import finished_run
from html_page import with_text

__all__ = ["FOREIGN", "NAME", "on_terminal", "write_foreign_files"]

FOREIGN = ("\x1b]0;PWNED", "\x07", "\x1b[38;5;123m", "\x9b7m", "\x7f", "\u202e", "\u2066")
NAME = f"esc{''.join(FOREIGN)}end"
"""Sets the title of the window, rings, colours, does so by C1, deletes, and turns the direction of text."""


def on_terminal(arguments: list[str], folder: Path, columns: int = 120) -> tuple[int, str]:
    """Return the exit code and what one command wrote to a terminal, both streams."""
    ours, theirs = pty.openpty()
    settings = {"TERM": "xterm", "COLUMNS": str(columns), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "HF_MEMOPT_DEBUG")}
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_memopt", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**environment, **settings},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            some = os.read(ours, 2**16)
        except OSError:  # the other end is closed
            break
        if not some:
            break
        written += some
    os.close(ours)
    return process.wait(timeout=60), written.decode("utf-8", "replace")


def write_foreign_files(folder: Path) -> None:
    """Write data, reports and a script whose names and texts are ``NAME``."""
    texts = ["a b c", "d e"] * 20
    pq.write_table(pa.table({NAME: texts, "text2": texts}), folder / "esc.parquet")
    pq.write_table(pa.table({NAME: texts, "text2": texts}), folder / f"{NAME}.parquet")
    pq.write_table(pa.table({NAME: texts}), folder / "one.parquet")
    (folder / "evil.py").write_text(f"raise ValueError({NAME!r})\n")
    for name in ("run_a.json", f"{NAME}.json"):
        (folder / name).write_text(json.dumps(with_text(NAME, finished_run())))
