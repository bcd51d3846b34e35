"""Free memory of a GPU and the processes that hold the rest, by a made-up NVML."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_memopt.cli import doctor
from hf_memopt.cli.doctor import read_gpu_use

GIB = 2**30
CUDA = torch.device("cuda", 0)


class NvmlError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML of a GPU of 12 GiB: this process computes on it, another one computes and draws, a third draws."""

    def entry(pid: int, used: int | None) -> SimpleNamespace:
        return SimpleNamespace(pid=pid, usedGpuMemory=used)

    computing = [entry(os.getpid(), 3 * GIB), entry(41, 2 * GIB)]
    drawing = [entry(41, 2 * GIB), entry(42, None), entry(43, 5 * GIB)]
    fake = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=2 * GIB, total=12 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: computing,
        nvmlDeviceGetGraphicsRunningProcesses=lambda handle: drawing,
    )
    names = {41: "python", 42: "Xorg"}

    def process(pid: int) -> SimpleNamespace:
        if pid not in names:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(name=lambda: names[pid])

    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(doctor, "nvml_handle", lambda device: "a handle")
    monkeypatch.setattr(psutil, "Process", process)
    return fake


def test_other_processes_are_named_once_and_the_largest_first(nvml: SimpleNamespace) -> None:
    holders = [
        "a process outside this container or of another user (process 43) 5.00 GiB",
        "python (process 41) 2.00 GiB",
        "Xorg (process 42) an unknown amount",
    ]
    assert read_gpu_use(CUDA) == (2 * GIB, 12 * GIB, holders)


def test_a_gpu_that_does_not_draw_lists_what_computes(nvml: SimpleNamespace) -> None:
    def not_supported(handle: str) -> list[SimpleNamespace]:
        raise NvmlError("Not Supported")

    nvml.nvmlDeviceGetGraphicsRunningProcesses = not_supported
    assert read_gpu_use(CUDA) == (2 * GIB, 12 * GIB, ["python (process 41) 2.00 GiB"])


@pytest.mark.parametrize("cause", ["no handle", "lost"])
def test_what_nvml_does_not_know_is_none(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    def lost(handle: str) -> None:
        raise NvmlError("GPU is lost")

    if cause == "no handle":
        monkeypatch.setattr(doctor, "nvml_handle", lambda device: None)
    if cause == "lost":
        nvml.nvmlDeviceGetMemoryInfo = lost
    assert read_gpu_use(CUDA) is None
