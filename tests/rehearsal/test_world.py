"""Rank 0 of several GPUs alone: DDP's buckets, FSDP2's shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_memopt.prediction.rehearsal import world

pytestmark = pytest.mark.stand_in
SCRIPT = Path(__file__).with_name("several_gpus.py")


@cache
def _run(kind: str, count: int = 0) -> dict[str, Any]:
    # DDP's first broadcast flattens all weights, and its buckets all gradients: values of 12 MB are wanted
    limits = dict.fromkeys(("HF_MEMOPT_GPU_VALUES", "HF_MEMOPT_GPU_COPY_LIMIT"), str(2**25))
    ranks = world.environment(count) if count else {}
    environment = {**os.environ, **limits, **ranks, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-W", "ignore", SCRIPT, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("count", [2, 4])
def test_ddp_holds_all_weights_and_a_copy_of_the_gradients_in_its_buckets(count: int) -> None:
    alone, found = _run("trainer"), _run("trainer", count)
    assert (found["steps"], found["examples"]) == (2, count * alone["examples"])
    assert (found["held"], found["moments"]) == (alone["weights"], 2 * alone["weights"])
    # two buckets, of 1 and at most 25 MiB; torch's allocator leaves up to 1 MiB with each
    assert 0 <= found["peak"] - alone["peak"] - alone["weights"] <= 2 * 2**20
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)  # all rows are equal; sums in another order


@pytest.mark.parametrize("count", [2, 4])
def test_fsdp2_holds_one_rank_s_share(count: int) -> None:
    alone, found = _run("trainer"), _run("fsdp", count)
    assert found["steps"] == 2
    assert (found["held"], found["moments"]) == (alone["weights"] / count, 2 * alone["weights"] / count)
    assert found["peak"] < alone["peak"]
