"""Say what training on this machine has: versions, the GPU, what of this package works here, and one next command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

import torch
from packaging.requirements import Requirement

from hf_memopt.prediction.rehearsal import RehearsalError, compiler, installed_torch
from hf_memopt.training.devices import accelerator_type, choose_precision, current_os
from hf_memopt.training.devices.readings import read_memory
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

EXTRAS = {"peft": "LoRA", "plot": "pictures"}
Level = Literal["ok", "warning", "error"]
STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``level``: ``ok``, ``warning`` (training works without it) or ``error`` (it fails)."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Return the results of all checks; for a process that does nothing else, as bitsandbytes stays uncompiled."""
    return [*_versions(), *_device(), *_what_works()]


def verdict(findings: Sequence[Finding]) -> tuple[str, str]:
    """Return in one sentence whether training would work here, and what to call next."""
    by_subject = {finding.subject: finding for finding in findings}
    if errors := [finding for finding in findings if finding.level == "error"]:
        more = f" (and {len(errors) - 1} more below)" if errors[1:] else ""
        return f"Training would fail here: {errors[0].subject}: {errors[0].found}{more}.", errors[0].advice
    if "GPU" in by_subject:
        return f"Ready to train: {by_subject['GPU'].found}.", "hf-memopt run train.py"
    command = "rehearse --gpu T4 train.py" if by_subject["rehearse"].level == "ok" else "plan MODEL --gpu T4"
    return "CPU only: installed correctly, no GPU found.", f"hf-memopt {command}"


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print the verdict, a table of the findings and the next command, for a terminal of any width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.columns[2].overflow = "fold"
    for finding in findings:
        found = finding.found + (f"\nTo do: {finding.advice}" if finding.advice else "")
        table.add_row(Text(finding.level, style=STYLES[finding.level]), finding.subject, Text(found))
    level = max((finding.level for finding in findings), key=[*STYLES].index)
    sentence, command = verdict(findings)
    console.print(Text(sentence, style=f"bold {STYLES[level]}"), table, Text(f"Next: {command}"), sep="\n")


def _versions() -> Iterator[Finding]:
    """Yield what this package requires, as its own metadata says, and what the ``EXTRAS`` do."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        lines = importlib.metadata.requires("hf-memopt") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        lines = ["hf-memopt"]
    for required in map(Requirement, lines):
        extra = next((name for name in EXTRAS if required.marker and required.marker.evaluate({"extra": name})), "")
        if required.marker and not extra:
            continue
        try:
            found = importlib.metadata.version(required.name)
            fits = required.specifier.contains(found, prereleases=True)
        except importlib.metadata.PackageNotFoundError:
            found, fits = "not installed" + (f", needed for {EXTRAS[extra]} only" if extra else ""), False
        level: Level = "ok" if fits else "warning" if extra else "error"
        yield Finding(required.name, level, found, "" if fits else f"pip install '{required.name}{required.specifier}'")


def _device() -> Iterator[Finding]:
    """Yield the GPU, if there is one, and why training would not use it."""
    if accelerator_type() == "cpu":
        if torch.version.cuda is None and _has_nvidia_gpu():
            found = f"this machine has an NVIDIA GPU, but torch {torch.__version__} is a CPU build"
            yield Finding("torch build", "error", found, "install CUDA's: https://pytorch.org/get-started/locally")
        return
    reading = read_memory()  # before this process holds memory itself
    total, used = reading.device_total_bytes or 0, reading.device_used_bytes
    free = "" if used is None else f" ({format_bytes(total - used)} free)"
    yield Finding("GPU", "ok", f"{reading.device_name}, {format_bytes(total)}{free}, torch {torch.__version__}")
    if (count := torch.cuda.device_count()) > 1 and os.environ.get("WORLD_SIZE", "1") == "1":
        found = f"{count} are visible to one process, which attach refuses"
        yield Finding("several GPUs", "error", found, f"torchrun --nproc_per_node={count} train.py")


def _has_nvidia_gpu() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount()) > 0
    except Exception:  # no driver, no library or no permission: no GPU that torch could use
        return False


def _what_works() -> Iterator[Finding]:
    """Yield what of this package depends on the machine."""
    chosen = choose_precision()
    yield Finding("precision", "ok", f"{chosen.name}: {chosen.reason}")
    yield _eight_bit()
    if current_os() != "linux" and accelerator_type() == "cuda":
        found = "no paged optimizers or expandable segments; a full GPU goes on in host memory, many times slower"
        yield Finding("Windows", "warning", found, "NVIDIA Control Panel > CUDA - Sysmem Fallback Policy > Prefer No")
    try:
        installed_torch()
        compiler()
        yield Finding("rehearse", "ok", "works here, without a GPU too")
    except RehearsalError as error:
        problem, _, advice = str(error).partition(". ")
        yield Finding("rehearse", "warning", problem, advice)


def _eight_bit() -> Finding:
    kind, subject = accelerator_type(), "kernels"
    advice = "install a torch build that supports this GPU and driver"
    try:
        parameter = torch.nn.Parameter(torch.ones(4096, device=kind))
        parameter.grad = torch.ones_like(parameter)
        subject, advice = "8-bit optimizer", "pip install -U bitsandbytes"
        # bitsandbytes wraps some CPU functions in torch.compile, which imports inductor: half of this command's time
        with patch("torch.compile", lambda function=None, **options: function or (lambda inner: inner)):
            import bitsandbytes
        advice = 'train with optim="adamw_torch_fused", or see: python -m bitsandbytes'
        getattr(bitsandbytes.optim, "AdamW8bit")([parameter]).step()  # noqa: B009  # it has no types
    except Exception as error:  # a broken native library raises other errors than ImportError
        return Finding(subject, "error", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", advice)
    return Finding(subject, "ok", f"bitsandbytes {bitsandbytes.__version__} steps on {kind!r}")
