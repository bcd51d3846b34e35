"""What is wrong in a launched job, or slow, by what its processes see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hf_memopt.cli.doctor import Finding

if TYPE_CHECKING:
    from hf_memopt.cli.doctor_launch import LaunchedProcess

__all__ = ["find_problems"]


def find_problems(processes: Sequence[LaunchedProcess]) -> list[Finding]:
    """Return what will fail (``error``) or be slow (``warning``) in this job, the same in every process."""
    return [*_versions(processes), *_devices(processes), *_communication(processes), *_threads(processes)]


def _versions(processes: Sequence[LaunchedProcess]) -> Iterator[Finding]:
    for name in processes[0].versions:
        ranks: dict[str, list[int]] = defaultdict(list)
        for process in processes:
            ranks[process.versions.get(name, "unknown")].append(process.rank)
        if len(ranks) > 1:
            found = "; ".join(f"{version} on {_ranks(on)}" for version, on in ranks.items())
            yield Finding(name, "error", f"differs: {found}", "install the same on every host")


def _devices(processes: Sequence[LaunchedProcess]) -> Iterator[Finding]:
    parallel = [process.rank for process in processes if process.local_rank is None and process.gpus > 1]
    if parallel:
        yield Finding(
            "visible GPUs",
            "error",
            f"LOCAL_RANK is not set, so the Trainer would drive every visible GPU with torch.nn.DataParallel in "
            f"{_ranks(parallel)}",
            "let the launcher set LOCAL_RANK: torchrun --nproc_per_node=<GPUs> your_script.py",
        )
    without = [process for process in processes if process.gpus and (process.local_rank or 0) >= process.gpus]
    if without:
        yield Finding(
            "processes",
            "error",
            f"no GPU is left for {_ranks([process.rank for process in without])}: "
            f"{without[0].gpus} visible on {without[0].host}",
            f"torchrun --nproc_per_node={without[0].gpus} your_script.py",
        )
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for process in processes:
        if process.gpu_id is not None:
            users[process.host, process.gpu_id].append(process.rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            yield Finding(
                "shared GPU",
                "error",
                f"{_ranks(ranks)} use the same GPU of {host}, each with a model of its own",
                "start one process for each GPU, and let the launcher set LOCAL_RANK",
            )
    kinds = sorted({process.gpu or "cpu" for process in processes})
    if len(kinds) > 1:
        advice = "the slowest decides the time of every step: use equal devices"
        yield Finding("devices", "warning", f"differ: {', '.join(kinds)}", advice)


def _communication(processes: Sequence[LaunchedProcess]) -> Iterator[Finding]:
    on_gloo = [process.rank for process in processes if process.gpus and process.backend == "gloo"]
    lacking = [process.rank for process in processes if process.gpus and not process.has_nccl]
    if lacking:
        advice = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        yield Finding("backend", "error", f"the torch of {_ranks(lacking)} has GPUs and no NCCL", advice)
    elif on_gloo:
        advice = "unset ACCELERATE_USE_CPU, or use_cpu in the configuration of accelerate"
        found = f"{_ranks(on_gloo)} would train on the CPU with gloo beside visible GPUs"
        yield Finding("backend", "error", found, advice)
    for name in sorted({name for process in processes for name in process.slow_nccl}):
        ranks = [process.rank for process in processes if process.backend == "nccl" and name in process.slow_nccl]
        if ranks:
            yield Finding("NCCL", "warning", f"{name} is set on {_ranks(ranks)}: slower", f"unset {name}")


def _threads(processes: Sequence[LaunchedProcess]) -> Iterator[Finding]:
    hosts: dict[str, list[LaunchedProcess]] = defaultdict(list)
    for process in processes:
        hosts[process.host].append(process)
    for host, inside in hosts.items():
        cores, threads = max(process.cores for process in inside), sum(process.threads for process in inside)
        fair = max(1, cores // len(inside))
        setting = f"OMP_NUM_THREADS={fair} torchrun --nproc_per_node={len(inside)} your_script.py"
        if threads > cores and threads > len(inside):
            yield Finding(
                "CPU threads",
                "warning",
                f"{threads} of {len(inside)} processes on {cores} cores of {host}: they wait for each other",
                setting,
            )
        elif fair > 1 and all(process.threads == 1 for process in inside):
            named = " (OMP_NUM_THREADS=1, which torchrun sets)" if inside[0].omp_num_threads == "1" else ""
            yield Finding(
                "CPU threads",
                "warning",
                f"one for each process{named} on {host}, where {fair} cores are there for each",
                setting,
            )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
