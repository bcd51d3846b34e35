"""Start processes that a test ends or starves, forked from a server that has done the imports (7 s of CPU each)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["SERVER", "finish", "start"]

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "datasets", "killed_runs", "hf_memopt.prediction.recipes.running.assistant"])


def start(function: Callable[..., None], *args: Any, log: Path) -> Any:
    """Start a process that calls a function of a module, with its output at the end of a file."""
    process = SERVER.Process(target=_run, args=(function, args, log))
    process.start()
    return process


def finish(process: Any, log: Path, seconds: float = 600.0) -> None:
    """Wait for a process; fail with its output where it does not end well."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, log.read_text(errors="replace")


def _run(function: Callable[..., None], args: tuple[Any, ...], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
    multiprocessing.set_start_method("fork", force=True)  # as in a program of its own, not the server's
    import torch

    torch.set_num_threads(1)
    function(*args)
