"""Check what a training run on this machine needs: versions, GPU, driver, precision, 8-bit optimizer, NVML."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

from hf_memopt.devices.memory_reading import read_memory
from hf_memopt.devices.precision_support import accelerator_type, choose_precision
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Finding", "examine", "findings_table"]

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "numpy", "peft")
OLDEST_TRANSFORMERS, NEXT_TRANSFORMERS = (5, 8), (6, 0)


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
    return [*_versions(), *_device(), *_several_gpus(), _eight_bit(), *_nvml(), *_windows()]


def findings_table(findings: list[Finding]) -> Table:
    """Return the findings as a table for the terminal, with the advice for each."""
    from rich.table import Table

    table = Table(title="hf-memopt doctor")
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}
    for finding in findings:
        table.add_row(marks[finding.level], finding.subject, finding.found, finding.advice)
    return table


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("python", "ok", f"{python} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "peft":
                yield Finding(package, "ok", "not installed; needed for LoRA only", "pip install 'hf-memopt[peft]'")
            else:
                yield Finding(package, "error", "not installed", f"pip install {package}")
            continue
        yield _transformers(version) if package == "transformers" else Finding(package, "ok", version)


def _transformers(version: str) -> Finding:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if OLDEST_TRANSFORMERS <= numbers < NEXT_TRANSFORMERS:
        return Finding("transformers", "ok", version)
    return Finding("transformers", "error", version, "pip install 'transformers>=5.8,<6'")


def _device() -> Iterator[Finding]:
    import torch

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


def _several_gpus() -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if count > 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Finding(
            "visible GPUs",
            "error",
            f"{count} GPUs are visible to one process, which the Trainer would drive with torch.nn.DataParallel",
            f"torchrun --nproc_per_node={count} your_script.py, or CUDA_VISIBLE_DEVICES=0 python your_script.py",
        )


def _eight_bit() -> Finding:
    import torch

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
    import pynvml

    try:
        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        yield Finding(
            "NVML",
            "warning",
            f"not available ({error}): the memory of other processes is not reported",
            "inside a container, start it with --gpus and the utility capability",
        )
    else:
        yield Finding("NVML", "ok", f"driver {driver}")


def _windows() -> Iterator[Finding]:
    if platform.system() == "Windows" and accelerator_type() == "cuda":
        yield Finding(
            "shared GPU memory",
            "warning",
            "the Windows driver moves to host memory instead of raising CUDA out of memory, many times slower",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback",
        )


def _has_nvidia_gpu() -> bool:
    try:
        import pynvml

        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except Exception:  # no driver, no library or no permission: no GPU that torch could use
        return False
    return count > 0
