"""Run a program as the two processes of one gloo run, as torchrun would, and read what each of them found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_pair(folder: Path, *command: str, timeout_seconds: int = 300) -> list[Any]:
    """Run ``python command`` twice side by side; return the JSON that each rank wrote to ``folder/rank<rank>.json``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    shared |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=timeout_seconds)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
