"""``hf-memopt doctor --launch`` in real processes, and what it says of jobs with GPUs that are not here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from slow_cases import slow_except
from typer.testing import CliRunner

from hf_memopt.cli.app import app
from hf_memopt.cli.doctor_launch import LaunchedProcess, find_problems, processes_table
from two_ranks import run_pair

PROGRAM = str(Path(__file__).parent / "launched_doctor.py")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "CUDA": "12.8"}
FIRST = LaunchedProcess(
    rank=0,
    local_rank=0,
    host="one",
    gpus=2,
    gpu="T4",
    gpu_id="a",
    cores=8,
    threads=4,
    omp_num_threads="4",
    backend="nccl",
    has_nccl=True,
    slow_nccl=(),
    versions=VERSIONS,
)
SECOND = replace(FIRST, rank=1, local_rank=1, gpu_id="b")


def test_two_processes_are_compared_and_the_first_prints(tmp_path) -> None:
    one, other = run_pair(tmp_path, PROGRAM, str(tmp_path))
    (code, table), (json_code, text) = one
    assert (code, json_code) == (0, 0)
    assert other == [[0, ""], [0, ""]]
    assert "hf-memopt doctor: 2 processes" in table
    found = json.loads(text)
    assert [(each["rank"], each["local_rank"], each["device"]) for each in found["processes"]] == [
        (0, 0, "cpu"),
        (1, 1, "cpu"),
    ]
    assert {each["backend"] for each in found["processes"]} == {"gloo"}
    assert {each["threads"] for each in found["processes"]} == {1}
    assert set(found["processes"][0]["versions"]) == {
        *("python", "torch", "transformers", "accelerate", "hf-memopt", "CUDA")
    }
    assert all(problem["level"] == "warning" for problem in found["findings"])


@pytest.mark.parametrize("ranks", slow_except([2], [2, 3]))
def test_a_missing_process_is_named_by_every_other_one(tmp_path, ranks) -> None:
    found = run_pair(tmp_path, PROGRAM, str(tmp_path), "missing", timeout_seconds=60, ranks=ranks)
    for rank in set(range(ranks)) - {1}:
        [[message, seconds]] = found[rank]
        assert message == (
            f"TimeoutError: rank 1 of world_size={ranks} did not answer rank {rank} within 1 s; expected every process "
            "of the job. Start as many as WORLD_SIZE says, and read the first error of those that ended: torchrun "
            "--nproc_per_node=2 --tee=3 -m hf_memopt doctor --launch"
        )
        assert seconds < 30


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc_per_node=2", "-m"],
    # on CPUs accelerate would start one process; as for GPUs it calls torchrun
    "accelerate": ["accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2", "--module"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launchers_run_it(launcher) -> None:
    command = [sys.executable, "-m", *LAUNCHERS[launcher], "hf_memopt", "doctor", "--launch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["processes"]) == 2


def test_outside_of_a_job_the_launch_line_is_said(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["doctor", "--launch"])
    assert (result.exit_code, result.stdout, result.stderr) == (
        2,
        "",
        "--launch compares the processes of a launched job, and the environment has no RANK, WORLD_SIZE, "
        "MASTER_ADDR, MASTER_PORT; expected several processes. Run: torchrun --nproc_per_node=2 -m hf_memopt doctor "
        "--launch\n",
    )


PROBLEMS: dict[str, tuple[list[LaunchedProcess], list[tuple[str, str, str]]]] = {
    "none": ([FIRST, SECOND], []),
    "versions": (
        [FIRST, replace(SECOND, host="two", versions={**VERSIONS, "torch": "2.6.0"})],
        [("error", "torch", "differs: 2.13.0 on rank 0; 2.6.0 on rank 1")],
    ),
    "DataParallel": (
        [replace(FIRST, local_rank=None), replace(SECOND, local_rank=None, host="two", gpu_id="c")],
        [
            (
                "error",
                "visible GPUs",
                "LOCAL_RANK is not set, so the Trainer would drive every visible GPU with torch.nn.DataParallel in "
                "ranks 0, 1",
            )
        ],
    ),
    "one GPU": (
        [FIRST, replace(FIRST, rank=1)],
        [("error", "shared GPU", "ranks 0, 1 use the same GPU of one, each with a model of its own")],
    ),
    "more processes than GPUs": (
        [replace(FIRST, gpus=1), replace(SECOND, gpus=1, gpu=None, gpu_id=None)],
        [
            ("error", "processes", "no GPU is left for rank 1: 1 visible on one"),
            ("warning", "devices", "differ: T4, cpu"),
        ],
    ),
    "gloo": (
        [replace(each, gpu=None, gpu_id=None, backend="gloo") for each in (FIRST, SECOND)],
        [("error", "backend", "ranks 0, 1 would train on the CPU with gloo beside visible GPUs")],
    ),
    "no NCCL": (
        [replace(each, backend="gloo", has_nccl=False) for each in (FIRST, SECOND)],
        [("error", "backend", "the torch of ranks 0, 1 has GPUs and no NCCL")],
    ),
    "NCCL without P2P": (
        [FIRST, replace(SECOND, slow_nccl=("NCCL_P2P_DISABLE",))],
        [("warning", "NCCL", "NCCL_P2P_DISABLE is set on rank 1: slower")],
    ),
    "too many threads": (
        [replace(FIRST, threads=8), replace(SECOND, threads=8)],
        [("warning", "CPU threads", "16 of 2 processes on 8 cores of one: they wait for each other")],
    ),
    "one thread": (
        [replace(each, threads=1, omp_num_threads="1") for each in (FIRST, SECOND)],
        [
            (
                "warning",
                "CPU threads",
                "one for each process (OMP_NUM_THREADS=1, which torchrun sets) on one, where 4 cores are there for "
                "each",
            )
        ],
    ),
}


@pytest.mark.parametrize(("processes", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_wrong_or_slow(processes: list[LaunchedProcess], expected: list[tuple[str, str, str]]) -> None:
    found = find_problems(processes)
    assert [(problem.level, problem.subject, problem.found) for problem in found] == expected
    assert all(problem.advice for problem in found)


def test_the_table_has_a_row_for_each_process_and_what_they_share() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(processes_table([FIRST, replace(SECOND, local_rank=None, versions={**VERSIONS, "torch": "2"})]))
    lines: Any = console.export_text().splitlines()
    [first] = [line for line in lines if "cuda:0 T4" in line and "not set" not in line]
    assert [cell.strip() for cell in first.split("│")[1:-1]] == ["0", "0", "one", "cuda:0 T4", "2", "nccl", "4 / 8"]
    assert any("in all of them: python 3.11.7, transformers 5.23.0, CUDA 12.8" in line for line in lines)
