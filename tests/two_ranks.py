"""Run a program as the processes of one gloo run, as torchrun would, and read what each of them found."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny

# Ranks are forked from a server that has done the imports, which cost more than most programs: 7 s of CPU a rank.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "transformers.trainer", "datasets", "bitsandbytes", "peft"])


def run_pair(folder: Path, *command: str, timeout_seconds: int = 300, ranks: int = 2) -> list[Any]:
    """Run ``python command`` once for each rank, side by side.

    Returns:
        The JSON that each rank wrote to ``folder/rank<rank>.json``.
    """
    if tiny.DEVICE != "cpu":
        pytest.skip("two processes of gloo train on the CPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(_SERVER.Process(target=_run, args=(environment, command, log)))
        processes[-1].start()
    for process in processes:
        process.join(timeout_seconds)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks, [log.read_text() for log in logs]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _run(environment: dict[str, str], command: tuple[str, ...], log: Path) -> None:
    """Be ``python command`` in this environment, with its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # as in a program of its own, not the server's
    import torch

    torch.set_num_threads(1)
    sys.argv = list(command)
    sys.path[:0] = [str(Path(command[0]).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    runpy.run_path(command[0], run_name="__main__")
