"""``reading``: the host for real; accelerators through fakes of torch, NVML and the driver, and a real GPU if any."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from played_allocator import PlayedAllocator
from tables import refuses

from hf_memopt.training.devices.readings import (
    PeakMeter,
    measured_device,
    read_context,
    read_device_used,
    read_memory,
    read_process,
)
from hf_memopt.training.devices.readings import memory_reading as reading

GIB = 2**30
MIB = 2**20
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


class FakeGpu(PlayedAllocator):
    """A stand-in for ``torch.cuda`` (or ``torch.xpu``) with ``count`` equal GPUs and one allocator."""

    def __init__(self, monkeypatch, kind="cuda", count=2, current_device=0, initialized=True):
        super().__init__()
        self.free_bytes, self.total_bytes, self.calls = 10 * GIB, 16 * GIB, []
        self.properties = SimpleNamespace(name="Fake 16", total_memory=self.total_bytes, uuid="1234-abcd")
        module = getattr(torch, kind)
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: current_device,
            "is_initialized": lambda: initialized,
            "get_device_properties": lambda device: self.properties,
            "memory_stats_as_nested_dict": self.stats if initialized else lambda device: {},
            "reset_peak_memory_stats": self.reset,
            "mem_get_info": self.ask_driver,
        }.items():
            monkeypatch.setattr(module, name, answer)

    def stats(self, device):
        self.calls.append(("stats", device))
        return super().stats(device)

    def reset(self, device):
        self.calls.append(("reset", device))
        super().reset(device)

    def ask_driver(self, device):
        self.calls.append(("driver", str(device)))
        return self.free_bytes, self.total_bytes


class FakeNVMLError(Exception):
    pass


def fake_nvml(monkeypatch, by_uuid=("GPU-1234-abcd",), split=(), fails="", processes=()):
    """Install a ``pynvml`` that knows GPUs by UUID, and return the names that it is asked for.

    ``split`` are handles in MIG mode; ``processes`` run on every GPU, each with its number and bytes.
    """
    asked = []

    def answer(name, found, holds=True):
        if name in fails or not holds:
            raise FakeNVMLError(name)
        return found

    def find(name):
        asked.append(name)
        return answer("find", name, name in by_uuid)

    running = [SimpleNamespace(pid=pid, usedGpuMemory=size_bytes) for pid, size_bytes in processes]
    fake = SimpleNamespace(
        NVMLError=FakeNVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: answer("no driver", None),
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetMigMode=lambda handle: answer("mode", [1, 1], handle in split),
        nvmlDeviceGetMemoryInfo=lambda handle: answer("lost", SimpleNamespace(used=5 * GIB)),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: answer("lost", running),
    )
    monkeypatch.setitem(sys.modules, "pynvml", None if fails == "missing" else fake)
    return asked


@pytest.fixture(autouse=True)
def _no_remembered_handles():
    reading._nvml_handle.cache_clear()
    yield
    reading._nvml_handle.cache_clear()


def hide_accelerators(monkeypatch):
    for module in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)


def printed_by(script):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout


# ---- host


def test_host_reading_agrees_with_psutil():
    found = read_memory("cpu")
    info = psutil.Process().memory_info()
    assert found.device == "cpu"
    assert not found.has_accelerator
    assert abs(found.rss_bytes - info.rss) < 64 * MIB  # the two are read one after the other
    assert found.peak_rss_bytes >= found.rss_bytes
    assert found.host_total_bytes == psutil.virtual_memory().total
    assert 0 < found.host_available_bytes <= found.host_total_bytes
    figures = (found.allocated_bytes, found.reserved_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes)
    assert (*figures, found.device_total_bytes, found.device_used_bytes) == (None,) * 6


def test_without_an_accelerator_the_host_is_read_and_the_text_says_so(monkeypatch):
    hide_accelerators(monkeypatch)
    found = read_memory()
    assert found.device == "cpu"
    assert str(found).startswith(f"cpu ({found.device_name}): no accelerator, host memory only\n  process, resident ")


def test_asking_for_the_host_touches_no_accelerator(monkeypatch):
    def touched(*_):
        raise AssertionError("touched")

    for name in ("is_available", "device_count", "init", "current_device", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, touched)
    for device in ("cpu", torch.device("cpu"), "cpu:0"):
        assert read_memory(device).device == "cpu"


@pytest.mark.skipif(sys.platform != "linux", reason="clears the peak through /proc")
@pytest.mark.slow
def test_peak_of_the_process_is_its_own_and_not_its_parents():
    parent_bytes = GIB  # a child that has imported torch is smaller
    held = b"x" * parent_bytes
    script = "from hf_memopt.training.devices.readings.memory_reading import read_process; print(*read_process())"
    rss_bytes, peak_bytes = map(int, printed_by(script).split())
    assert len(held) == parent_bytes
    assert rss_bytes <= peak_bytes < parent_bytes  # ru_maxrss would give the parent's


def test_peak_rises_with_an_allocation_and_stays():
    before = read_process()[1]
    held = bytearray(b"x" * (256 * MIB))
    top = read_process()[1]
    assert top >= before
    assert top >= len(held)
    del held
    assert read_process()[1] >= top


# ---- which device


@pytest.mark.parametrize(
    ("expected", "spellings"),
    [("cuda:0", (0, "cuda:0", torch.device("cuda", 0))), ("cuda:1", (None, "cuda", torch.device("cuda")))],
)
def test_a_device_is_found_by_each_of_its_spellings(monkeypatch, expected, spellings):
    FakeGpu(monkeypatch, current_device=1)
    fake_nvml(monkeypatch)
    assert [read_memory(device).device for device in spellings] == [expected] * 3


NO_DEVICES = [
    *(2, -1, True, 1.5, "cuda:2", "cuda:-1", "cuda:999", "gpu:0", "", "meta", "xpu:0", "npu"),
    torch.device("meta"),
]


@pytest.mark.parametrize("device", [*NO_DEVICES, 0, "cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    known = "cpu, cuda:0, cuda:1"
    if device in (0, "cuda", "mps") and device is not True:
        known = "cpu"
        hide_accelerators(monkeypatch)
    else:
        FakeGpu(monkeypatch)
    message = (
        f"device={device!r} is not a device whose memory can be read here; expected None, the index of an accelerator "
        f"or one of: {known}. Call read_memory() for the current accelerator, else the host."
    )
    refuses(ValueError, message, read_memory, device)


def test_a_run_on_an_accelerator_that_tells_nothing_is_measured_on_the_host(monkeypatch):
    FakeGpu(monkeypatch)
    assert measured_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert measured_device(torch.device("hpu", 0)) == torch.device("cpu")
    assert measured_device(torch.device("cpu")) == torch.device("cpu")


# ---- accelerators


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_an_accelerator_reading_holds_the_allocators_and_the_drivers_figures(monkeypatch, kind):
    gpu = FakeGpu(monkeypatch, kind)
    fake_nvml(monkeypatch, by_uuid=())
    gpu.hold(3 * GIB)
    gpu.free(2 * GIB)
    found = read_memory(f"{kind}:1")
    of_torch = {"allocated_bytes": GIB, **dict.fromkeys(("reserved_bytes", *PEAKS), 3 * GIB)}
    of_driver = {"device_total_bytes": 16 * GIB, "device_used_bytes": 6 * GIB}
    assert found == replace(found, device=f"{kind}:1", device_name="Fake 16", **of_torch, **of_driver)
    assert found.table().splitlines()[:4] == [
        f"{kind}:1 (Fake 16): accelerator",
        "  allocated by tensors  1.00 GiB (peak 3.00 GiB)",
        "  reserved by torch     3.00 GiB (peak 3.00 GiB)",
        "  used on the device    6.00 GiB of 16.00 GiB",
    ]
    assert str(found) == found.table()
    assert pickle.loads(pickle.dumps(found)) == found


CARD = torch.device("cuda", 1)
MIG = "MIG-1234-abcd"
OURS, OTHERS = (os.getpid(), 300 * MIB), (os.getpid() + 1, GIB)
TOLD = {
    # settings of NVML; bytes used on the device, of which the driver tells 6 GiB and NVML 5; bytes of our context
    "by UUID": ({"processes": [OTHERS, OURS]}, 5 * GIB, 200 * MIB),
    "a slice": ({"by_uuid": (MIG, "GPU-1234-abcd"), "split": (MIG, "GPU-1234-abcd")}, 5 * GIB, None),
    "split, of which no slice is known": ({"split": ("GPU-1234-abcd",), "processes": [OURS]}, 6 * GIB, None),
    "unknown GPU": ({"by_uuid": (), "processes": [OURS]}, 6 * GIB, None),
    "missing": ({"fails": "missing"}, 6 * GIB, None),
    "no driver": ({"fails": "no driver"}, 6 * GIB, None),
    "lost": ({"fails": "lost", "processes": [OURS]}, 6 * GIB, None),
    "no process": ({}, 5 * GIB, None),
    "numbers of another namespace": ({"processes": [OTHERS]}, 5 * GIB, None),
    "one of them ours by accident": ({"processes": [(os.getpid(), 50 * MIB)]}, 5 * GIB, None),
    "Windows": ({"processes": [(os.getpid(), None)]}, 5 * GIB, None),
}


@pytest.mark.parametrize("name", TOLD)
def test_nvml_is_asked_by_uuid_and_else_the_driver(monkeypatch, name):
    settings, used_bytes, context_bytes = TOLD[name]
    gpu = FakeGpu(monkeypatch)
    gpu.hold(100 * MIB)
    gpu.free(60 * MIB)  # still reserved
    fake_nvml(monkeypatch, **settings)
    assert read_device_used(CARD) == used_bytes
    assert gpu.calls[-1:] == [("driver", "cuda:1")] * (used_bytes == 6 * GIB)
    gpu.calls.clear()
    assert read_context(CARD) == context_bytes
    assert all(called == "stats" for called, _ in gpu.calls)  # nothing that makes a context


def test_a_gpu_that_torch_has_not_touched_gets_no_context(monkeypatch):
    gpu = FakeGpu(monkeypatch, initialized=False)
    asked = fake_nvml(monkeypatch, processes=[OURS])
    found, meter = read_memory(), PeakMeter(CARD)
    assert (found.allocated_bytes, found.peak_reserved_bytes, found.device_used_bytes) == (0, 0, 5 * GIB)
    assert "  used on the device    5.00 GiB of 16.00 GiB" in str(found)
    assert asked == ["MIG-1234-abcd", "GPU-1234-abcd"]
    assert read_context(CARD) is None
    meter.skip()
    assert meter.read() == {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
    assert gpu.calls == []  # cudaMemGetInfo would make a context


# ---- MPS


def fake_mps(monkeypatch):
    hide_accelerators(monkeypatch)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2", raising=False)
    for name, size in (("current_allocated", 2), ("driver_allocated", 3), ("recommended_max", 11)):
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda size=size: size * GIB)


def test_mps_tells_what_is_held_now_but_no_peaks(monkeypatch):
    fake_mps(monkeypatch)
    found = read_memory()
    assert (found.device, found.device_name) == ("mps:0", "Apple M2")
    assert (found.allocated_bytes, found.reserved_bytes, found.device_total_bytes) == (2 * GIB, 3 * GIB, 11 * GIB)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes, found.device_used_bytes) == (None, None, None)
    assert "  allocated by tensors  2.00 GiB\n" in str(found)
    meter = PeakMeter(torch.device("mps", 0))
    meter.skip()
    assert meter.only_samples
    assert meter.read() == {"allocated_bytes": 2 * GIB, "reserved_bytes": 3 * GIB}


# ---- spans


# ---- a real GPU


@pytest.mark.gpu
def test_a_real_gpu_is_read_as_torch_and_the_driver_tell():
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    found = read_memory()
    assert found.allocated_bytes == torch.cuda.memory_allocated() >= held.numel()
    assert found.reserved_bytes == torch.cuda.memory_reserved()
    assert found.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert found.device_total_bytes == torch.cuda.get_device_properties().total_memory
    assert found.reserved_bytes <= found.device_used_bytes <= found.device_total_bytes


@pytest.mark.gpu
def test_reading_a_real_gpu_makes_no_context():
    script = (
        "import torch; from hf_memopt import read_memory; read_memory('cpu'); assert not torch.cuda.is_initialized(); "
        "print(read_memory().allocated_bytes, torch._C._cuda_hasPrimaryContext(0))"
    )
    assert printed_by(script).split() == ["0", "False"]


@pytest.mark.gpu
def test_context_of_a_real_gpu_is_read_and_none_before_it_is_there():
    script = (
        "import torch; from hf_memopt.training.devices.readings import read_context; GPU = torch.device('cuda', 0); "
        "torch.cuda.init(); "
        "print(read_context(GPU), torch._C._cuda_hasPrimaryContext(0)); "
        "held = torch.zeros(64 << 20, dtype=torch.uint8, device=GPU); print(read_context(GPU))"
    )
    before, after = printed_by(script).splitlines()
    assert before == "None False"
    assert after == "None" or 64 * MIB < int(after) < 2 * GIB  # None: in a container


@pytest.mark.gpu
def test_meter_of_a_real_gpu_separates_two_spans():
    meter = PeakMeter(torch.device("cuda", torch.cuda.current_device()))
    meter.skip()
    base = torch.cuda.memory_allocated()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del held
    assert meter.read()["peak_allocated_bytes"] == base + 64 * MIB
    assert meter.read()["peak_allocated_bytes"] == base
