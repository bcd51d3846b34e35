"""Compare what the processes of a launched job see: ``hf-memopt doctor --launch``.

It runs in every process, in place of the script that is to be trained. Each process collects its own facts, all of them
exchange these, so that all end with the same exit code, and the first prints one table.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hf_memopt.cli.doctor import Finding

if TYPE_CHECKING:
    from rich.table import Table
    from torch.distributed.distributed_c10d import Store

    from hf_memopt.cli.doctor import Finding

__all__ = ["LaunchedProcess", "examine_launch", "find_problems", "processes_table"]

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, accelerate and other launchers set in each process."""
PACKAGES = ("torch", "transformers", "accelerate", "hf-memopt")
TIMEOUT_SECONDS = 60.0
GRACE_SECONDS = 2.0
SLOW_NCCL = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """What one process of a job sees.

    Attributes:
        local_rank: ``LOCAL_RANK``, or None where the launcher does not set it.
        gpus: how many it sees.
        gpu: the name of the one that the Trainer would use, and its id, which is the same in every process.
        cores: that it may run on; ``threads``: those that torch uses for one operation.
        backend: that the Trainer would use; ``has_nccl``: whether this torch has NCCL.
        slow_nccl: variables in the environment that switch a fast way of NCCL off.
    """

    rank: int
    local_rank: int | None
    host: str
    gpus: int
    gpu: str | None
    gpu_id: str | None
    cores: int
    threads: int
    omp_num_threads: str | None
    backend: str
    has_nccl: bool
    slow_nccl: tuple[str, ...]
    versions: dict[str, str]

    @property
    def device(self) -> str:
        """The device that the Trainer would use, for people."""
        return "cpu" if self.gpu is None else f"cuda:{self.local_rank or 0} {self.gpu}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the device for JSON."""
        return {**asdict(self), "device": self.device}


def check_is_launched() -> None:
    """Raise ValueError outside of a launched job."""
    missing = [name for name in NAMES if name not in os.environ]
    if missing:
        raise ValueError(
            "--launch compares the processes of a launched job, and the environment has no "
            f"{', '.join(missing)}; expected several processes. "
            "Run: torchrun --nproc_per_node=2 -m hf_memopt doctor --launch"
        )


def examine_launch(*, json_output: bool, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
    """Compare what the processes of this job see, and return the exit code of all: 1 if something will fail, else 0.

    It is called in each of them; the first prints, before any ends, since a launcher stops the others then.

    Raises:
        ValueError: this is no launched job.
        TimeoutError: a process did not answer in time; raised in all the others.
        ConnectionError: rank 0 could not be reached, or a process ended meanwhile.
    """
    check_is_launched()
    from torch import distributed
    from torch.distributed.distributed_c10d import PrefixStore

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _connect(rank, timeout_seconds)
        _call_the_roll(store, rank, world_size, timeout_seconds)
        distributed.init_process_group(
            "gloo",
            store=PrefixStore("memopt-gloo", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        try:
            processes: list[Any] = [None] * world_size
            distributed.all_gather_object(processes, _this_process())
            problems = find_problems(processes)
            if rank == 0:
                _print(processes, problems, json_output=json_output)
            distributed.barrier()
        finally:
            distributed.destroy_process_group()
    except RuntimeError as error:  # of the store or of gloo
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConnectionError(
            f"MASTER_ADDR:MASTER_PORT={address!r} could not be reached by rank {rank} of {world_size}, or another "
            f"process ended ({str(error).splitlines()[0]}); expected all processes of the job. Check that rank 0 runs "
            f"there and that its port is open: nc -z {address.replace(':', ' ')}"
        ) from error
    return int(any(problem.level == "error" for problem in problems))


def _connect(rank: int, timeout_seconds: float) -> Store:
    """Return the store of the job, which torchrun's agent serves, else the first process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not named in __all__

    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=serves,
        timeout=timedelta(seconds=timeout_seconds + (GRACE_SECONDS if serves else 0)),  # the server leaves last
        wait_for_workers=False,
    )


def _call_the_roll(store: Store, rank: int, world_size: int, timeout_seconds: float) -> None:
    """Wait until every process has answered, or raise an error that names those which have not."""
    from torch.distributed import DistStoreError
    from torch.distributed.distributed_c10d import PrefixStore

    roll = PrefixStore("memopt-roll", store)
    keys = {other: f"rank{other}" for other in range(world_size)}
    roll.set(keys[rank], "here")
    try:
        roll.wait(list(keys.values()))
    except DistStoreError as error:
        missing = [other for other, key in keys.items() if not roll.check([key])]
        raise TimeoutError(
            f"rank {', '.join(map(str, missing))} of world_size={world_size} did not answer rank {rank} within "
            f"{timeout_seconds:g} s; expected every process of the job. Start as many as WORLD_SIZE says, and read the "
            "first error of those that ended: torchrun --nproc_per_node=2 --tee=3 -m hf_memopt doctor --launch"
        ) from error


def _this_process() -> LaunchedProcess:
    import torch

    local = os.environ.get("LOCAL_RANK")
    local_rank = int(local) if local is not None else None
    gpus = torch.cuda.device_count()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    has_nccl = torch.distributed.is_nccl_available()
    gpu = gpu_id = None
    if not on_cpu and (local_rank or 0) < gpus:
        facts = torch.cuda.get_device_properties(local_rank or 0)
        gpu, gpu_id = facts.name, str(getattr(facts, "uuid", f"cuda:{local_rank or 0}"))
    versions = {name: _version(name) for name in PACKAGES}
    return LaunchedProcess(
        rank=int(os.environ["RANK"]),
        local_rank=local_rank,
        host=socket.gethostname(),
        gpus=gpus,
        gpu=gpu,
        gpu_id=gpu_id,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        backend="nccl" if gpus and not on_cpu and has_nccl else "gloo",
        has_nccl=has_nccl,
        slow_nccl=tuple(name for name in SLOW_NCCL if os.environ.get(name, "0") != "0"),
        versions={"python": platform.python_version(), **versions, "CUDA": str(torch.version.cuda)},
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def processes_table(processes: Sequence[LaunchedProcess]) -> Table:
    """Return one row for each process, in the order of the ranks."""
    from rich.table import Table

    table = Table(title=f"hf-memopt doctor: {len(processes)} processes")
    for heading in ("rank", "local rank", "host", "device", "GPUs seen", "backend", "CPU threads / cores"):
        table.add_column(heading, overflow="fold")
    for process in processes:
        local = "not set" if process.local_rank is None else str(process.local_rank)
        threads = f"{process.threads} / {process.cores}"
        own = (str(process.rank), local, process.host, process.device, str(process.gpus), process.backend, threads)
        table.add_row(*own)
    common = ", ".join(
        f"{name} {version}"
        for name, version in processes[0].versions.items()
        if all(process.versions.get(name) == version for process in processes)
    )
    table.caption = f"in all of them: {common}"
    return table


def _print(processes: Sequence[LaunchedProcess], problems: Sequence[Finding], *, json_output: bool) -> None:
    from hf_memopt.terminal import Console

    console = Console()
    if json_output:
        import json

        found = {"processes": [each.as_dict() for each in processes], "findings": [each.as_dict() for each in problems]}
        console.out(json.dumps(found, indent=2), highlight=False)
        return
    console.print(processes_table(processes))
    for problem in problems:
        console.print(f"{problem.level}: {problem.subject}: {problem.found}", markup=False)
        console.print(f"  {problem.advice}", markup=False)
    if not problems:
        console.print(f"{len(processes)} processes agree, and nothing here slows them down.")


# ---- Problems


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
