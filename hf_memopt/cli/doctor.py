"""Check what a training run on this machine needs: versions, GPU and who holds its memory, several processes, driver,
8-bit optimizer.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import psutil
import torch
from packaging.requirements import Requirement
from torch import distributed

from hf_memopt.devices import accelerator_type, choose_precision, current_os
from hf_memopt.devices.readings import measured_device, nvml_handle, read_memory
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXTRAS = {"peft": "LoRA", "plot": "pictures"}
"""What may be missing, and what needs it."""
HELD_SHARE = 0.1  # of a GPU that other processes may hold without a warning
MOST_HOLDERS = 4  # that are named
SLOW_NCCL = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
LEAST_DISK_BYTES = 8 * 2**30  # two checkpoints of BERT-large with AdamW, the last and the one that replaces it
STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``level``: ``ok``, ``warning`` (runs, but probably slower) or ``error`` (will fail)."""

    subject: str
    level: Literal["ok", "warning", "error"]
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the fields for JSON."""
        return asdict(self)


def examine() -> list[Finding]:
    """Return the results of all checks.

    Meant for a process of its own: where bitsandbytes is not imported yet, its CPU functions stay uncompiled.
    """
    memory = [*_gpu_memory()]  # before this process itself holds a context
    launch = [*_several_gpus(), _meeting(), *_between_gpus(), *_threads()]
    return [*_versions(), *_device(), *memory, *launch, _eight_bit(), *_nvml(), *_fallback(), _disk()]


def verdict(findings: Sequence[Finding]) -> str:
    """Return one sentence: whether training would work here, and if not, what to do first."""
    errors = [finding for finding in findings if finding.level == "error"]
    warnings = [finding.subject for finding in findings if finding.level == "warning"]
    device = next(finding.found for finding in findings if finding.subject == "device")
    if errors:
        first, number = errors[0], len(errors)
        others = "" if number == 1 else f" (and {number - 1} more below)"
        return f"Training would fail here: {first.subject}: {first.found}{others}. To do: {first.advice}"
    if warnings:
        return f"Ready to train: {device}. Look at: {', '.join(warnings)}."
    return f"Ready to train: {device}."


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print the verdict, then a table of the findings, for a terminal of any width."""
    level = next((level for level in ("error", "warning") if any(one.level == level for one in findings)), "ok")
    console.print(verdict(findings), style=f"bold {STYLES[level]}", markup=False, highlight=False, emoji=False)
    console.print(findings_table(findings))


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table, what to do under what was found."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        found = finding.found + (f"\nTo do: {finding.advice}" if finding.advice else "")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.subject, Text(found))
    return table


def _versions() -> Iterator[Finding]:
    """Yield what this package requires, as its own metadata says, and what the ``EXTRAS`` do."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        lines = importlib.metadata.requires("hf-memopt") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        lines = ["hf-memopt"]
    for required in map(Requirement, lines):
        marker = required.marker
        extra = next((name for name in EXTRAS if marker is not None and marker.evaluate({"extra": name})), "")
        if marker is None or extra:
            yield _version(required, extra)


def _version(required: Requirement, extra: str) -> Finding:
    name, specifier = required.name, required.specifier
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if extra:
            missing = f"not installed; needed for {EXTRAS[extra]} only"
            return Finding(name, "ok", missing, f"pip install 'hf-memopt[{extra}]'")
        return Finding(name, "error", "not installed", f"pip install {name}")
    if specifier.contains(version, prereleases=True):
        return Finding(name, "ok", version)
    return Finding(name, "warning" if extra else "error", version, f"pip install '{name}{specifier}'")


def _device() -> Iterator[Finding]:
    kind = accelerator_type()
    chosen = choose_precision()
    if kind == "cpu":
        yield Finding(
            "device", "ok", f"no accelerator; {format_bytes(read_memory('cpu').host_total_bytes or 0)} of host memory"
        )
        if torch.version.cuda is None and _has_nvidia_gpu():
            yield Finding(
                "torch build",
                "error",
                f"this machine has an NVIDIA GPU, but torch {torch.__version__} is a CPU build",
                "install a CUDA build: https://pytorch.org/get-started/locally",
            )
    else:
        reading = read_memory()
        total = format_bytes(reading.device_total_bytes) if reading.device_total_bytes else "unknown memory"
        yield Finding("device", "ok", f"{reading.device_name}, {total}, torch {torch.__version__}")
        try:
            torch.ones(1, device=kind).add_(1).item()
        except RuntimeError as error:
            yield Finding(
                "kernels",
                "error",
                str(error).splitlines()[0],
                "install a torch build that supports this GPU and driver",
            )
    yield Finding("precision", "ok", f"{chosen.name}: {chosen.reason}")


def _gpu_memory() -> Iterator[Finding]:
    """Yield what is free on the GPU, and which other processes hold the rest."""
    kind = accelerator_type()
    if kind != "cuda" or (use := read_gpu_use(measured_device(torch.device(kind)))) is None:
        return
    free_bytes, total_bytes, holders = use
    found = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
    if holders:
        more = len(holders) - MOST_HOLDERS
        found += f"; held by {'; '.join(holders[:MOST_HOLDERS])}" + (f"; {more} more" if more > 0 else "")
    if total_bytes - free_bytes <= HELD_SHARE * total_bytes:
        yield Finding("GPU memory", "ok", found)
        return
    left = f"hf-memopt plan MODEL --budget {free_bytes >> 20}MiB"
    advice = f"end what is not needed, or plan with what is left: {left}"
    yield Finding("GPU memory", "warning", found, advice)


def _several_gpus() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    if count > 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Finding(
            "visible GPUs",
            "error",
            f"{count} GPUs are visible to one process, which the Trainer would drive with torch.nn.DataParallel",
            f"torchrun --nproc_per_node={count} your_script.py, or CUDA_VISIBLE_DEVICES=0 python your_script.py",
        )


def _meeting() -> Finding:
    """Let this process meet itself by the host's name, as those of ``torchrun`` and ``accelerate launch`` do."""
    if not distributed.is_available():
        return Finding("several processes", "warning", "this torch is built without torch.distributed")
    try:
        store = distributed.HashStore()  # type: ignore[attr-defined]  # public, but not named in __all__
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        distributed.destroy_process_group()
    except RuntimeError as error:
        found = f"processes cannot meet here: {str(error).splitlines()[0]}"
        return Finding(
            "several processes", "warning", found, "give this host's name an address, or GLOO_SOCKET_IFNAME=lo"
        )
    count = torch.cuda.device_count()
    where = f"on {count} GPU{'s' if count > 1 else ''}" if count else "on the CPU"
    return Finding("several processes", "ok", f"can meet here, and would train {where}")


def _between_gpus() -> Iterator[Finding]:
    """Yield what is wrong or slow between processes, each with a GPU of its own."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    if count and local_rank is not None and int(local_rank) >= count:
        found = f"no GPU is left for local rank {local_rank}: {count} visible"
        yield Finding("processes", "error", found, f"torchrun --nproc_per_node={count} your_script.py")
    if count < 2:
        return
    if not distributed.is_nccl_available():
        advice = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        yield Finding("NCCL", "error", "this torch has GPUs and no NCCL", advice)
    for name in SLOW_NCCL:
        if os.environ.get(name, "0") != "0":
            yield Finding("NCCL", "warning", f"{name} is set, which switches a fast way off", f"unset {name}")


def _threads() -> Iterator[Finding]:
    processes = max(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fair, threads = max(1, cores // processes), torch.get_num_threads()
    if processes > 1 and "OMP_NUM_THREADS" in os.environ and threads != fair:
        found = f"{threads} for each of {processes} processes on {cores} cores"
        advice = f"OMP_NUM_THREADS={fair} torchrun --nproc_per_node={processes} your_script.py"
        yield Finding("CPU threads", "warning", found, advice)


def _eight_bit() -> Finding:
    try:
        # bitsandbytes wraps some CPU functions in torch.compile, which imports inductor: half of this command's time
        with patch("torch.compile", lambda function=None, **options: function or (lambda inner: inner)):
            import bitsandbytes
    except Exception as error:  # a broken native library raises other errors than ImportError
        return Finding("8-bit optimizer", "error", f"{type(error).__name__}: {error}", "pip install -U bitsandbytes")
    parameter = torch.nn.Parameter(torch.ones(4096, device=accelerator_type()))
    parameter.grad = torch.ones_like(parameter)
    optimizer: Any = getattr(bitsandbytes.optim, "AdamW8bit")([parameter])  # noqa: B009  # it has no types
    try:
        optimizer.step()
    except Exception as error:
        return Finding(
            "8-bit optimizer",
            "error",
            f"a step failed on {accelerator_type()!r}: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}",
            'train with optim="adamw_torch_fused", or see: python -m bitsandbytes',
        )
    return Finding("8-bit optimizer", "ok", f"bitsandbytes {bitsandbytes.__version__} steps on {accelerator_type()!r}")


def _nvml() -> Iterator[Finding]:
    if accelerator_type() != "cuda":
        return
    try:
        driver = _ask_nvml("nvmlSystemGetDriverVersion")
    except Exception as error:  # not installed, no library, or a driver that fails
        yield Finding(
            "NVML",
            "warning",
            f"not available ({error}): the memory of other processes is not reported",
            "inside a container, start it with --gpus and the utility capability",
        )
    else:
        yield Finding("NVML", "ok", f"driver {driver}")


def _fallback() -> Iterator[Finding]:
    if current_os() != "linux" and accelerator_type() == "cuda":
        yield Finding(
            "shared GPU memory",
            "warning",
            "where the GPU is full, the Windows driver goes on in host memory, many times slower, instead of raising "
            "CUDA out of memory",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback",
        )


def _disk() -> Finding:
    free_bytes = shutil.disk_usage(".").free
    found = f"{format_bytes(free_bytes)} free in this folder"
    if free_bytes >= LEAST_DISK_BYTES:
        return Finding("disk", "ok", found)
    advice = "train with save_total_limit=2, or an output_dir on another disk"
    return Finding("disk", "warning", f"{found}, a checkpoint of BERT-large with AdamW takes 4 GiB", advice)


def _has_nvidia_gpu() -> bool:
    with suppress(Exception):  # no driver, no library or no permission: no GPU that torch could use
        return int(_ask_nvml("nvmlDeviceGetCount")) > 0
    return False


def _ask_nvml(question: str) -> Any:
    import pynvml

    pynvml.nvmlInit()
    return getattr(pynvml, question)()


# ---- Who holds a GPU's memory: NVML knows, without a CUDA context; on Windows without bytes, in a container not all --


def read_gpu_use(device: torch.device) -> tuple[int, int, list[str]] | None:
    """Return the free and all bytes of a CUDA device, and its other processes in words, the largest first.

    None where NVML is missing, fails or does not know the device.
    """
    handle = nvml_handle(device) if torch.version.hip is None else None
    if handle is None:
        return None
    try:
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.free), int(memory.total), _holders(pynvml, handle)
    except Exception:  # a driver that fails leaves nothing to report
        return None


def _holders(pynvml: Any, handle: Any) -> list[str]:
    held: dict[int, int | None] = {}
    for list_processes in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        with suppress(pynvml.NVMLError):  # GPUs that do not draw have no list of those that do
            held |= {entry.pid: entry.usedGpuMemory for entry in list_processes(handle) if entry.pid != os.getpid()}
    largest = sorted(held.items(), key=lambda holder: -(holder[1] or 0))
    sizes = {pid: "an unknown amount" if size is None else format_bytes(size) for pid, size in largest}
    return [f"{_name_of(pid)} (process {pid}) {size}" for pid, size in sizes.items()]


def _name_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # of another user, or outside this container
        return "a process outside this container or of another user"
