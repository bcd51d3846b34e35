"""``gpus``: the table against its sources, names in every usual spelling, GPUs by size, and the current one."""

from __future__ import annotations

import csv
import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from tables import refusals, tables

from hf_memopt.training.devices import GPUS, Gpu, PeakRates, current_gpu, custom_gpu, find_gpu

TABLES = tables(__file__)

GIB = 2**30
MIB = 2**20

# https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus, by the beginnings of names.
NVIDIA_SAYS = TABLES["compute capabilities"]


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a table beside this file."""
    return list(csv.DictReader((Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()))


PUBLISHED = rows_of("published.csv")
"""As drivers, data sheets and whitepapers have them; TFLOPS of dense products, half of those of sparse operands."""


def is_amd(gpu: Gpu) -> bool:
    return gpu.name.startswith("MI")


# ---- the table


def test_rows_are_plausible():
    for gpu in GPUS.values():
        assert GPUS[gpu.name] is gpu
        assert gpu.memory_bytes % GIB == 0
        assert 0.9 * gpu.memory_bytes < gpu.usable_bytes < gpu.memory_bytes
        assert gpu.context_bytes is None or 100 * MIB < gpu.context_bytes < GIB
        assert 80e9 <= gpu.bandwidth_bytes_per_second <= 8e12
        size = re.search(r"(\d+)GB", gpu.name)
        assert size is None or int(size.group(1)) * GIB == gpu.memory_bytes
        assert bool(gpu.notes) == is_amd(gpu)


def test_every_figure_has_a_source():
    for gpu in GPUS.values():
        parts = dict(part.split(": ", 1) for part in gpu.source.split("; "))
        assert re.fullmatch(r"https://\S+|that of the simulated kernels", parts.pop("compute capability"))
        page = parts.pop("size, bandwidth, bus, multiprocessors and clock")
        assert re.fullmatch(r"https://www\.techpowerup\.com/gpu-specs/[a-z0-9-]+\.c\d+", page)
        assert re.fullmatch(r"https://\S+", parts.pop("operations per clock"))
        if gpu.sustained_fraction < 1:
            assert re.fullmatch(r"https://\S+", parts.pop("clock under a long load"))
        assert list(parts) == ["usable memory", "context"]
        for text in parts.values():
            assert re.fullmatch(r"https://\S+( \((H100 NVL|gfx950)\))?|derived from the GPUs .*|unknown", text)
        assert ("unknown" in gpu.source) == (gpu.context_bytes is None)


def test_figures_are_the_published_ones():
    for row in PUBLISHED:
        gpu, (figure, _, dtype), value = GPUS[row["gpu"]], row["figure"].partition(" in "), float(row["value"])
        if figure == "multiprocessors":
            assert gpu.multiprocessors == value
        elif figure == "context":  # of the message that the row names: the table's is rounded to MiB
            assert abs(gpu.context_bytes / MIB - value) <= 1
        else:  # printed with two or three digits
            assert getattr(gpu.peak_flops_per_second, dtype) / 1e12 == pytest.approx(value, rel=0.013)


def test_a_rate_that_nobody_published_is_none():
    assert GPUS["GTX 1650"].peak_flops_per_second == PeakRates(fp32=14 * 128 * 1665 * 10**6)
    assert GPUS["T4"].peak_flops_per_second.tf32 is GPUS["T4"].peak_flops_per_second.bf16 is None


def test_compute_capabilities_are_those_of_nvidia():
    for gpu in GPUS.values():
        if not is_amd(gpu):
            found = [capability for capability, names in NVIDIA_SAYS.items() if re.match(names, gpu.name)]
            assert found == ["{}.{}".format(*gpu.compute_capability)], gpu.name


# ---- by name


@pytest.mark.parametrize(("spelling", "name"), [tuple(row.values()) for row in rows_of("spellings.csv")])
def test_usual_spellings_are_found(spelling, name):
    assert dataclasses.replace(find_gpu(spelling), notes=GPUS[name].notes) == GPUS[name]
    assert find_gpu(GPUS[name]) is GPUS[name]


@drawn(st.sampled_from(sorted(GPUS)), st.booleans(), st.sampled_from(["", "NVIDIA ", "nvidia geforce "]))
def test_case_separators_and_maker_do_not_count(name, dashes, maker):
    assert find_gpu(maker + name).name == name
    assert find_gpu(name.lower().replace(" ", "-" if dashes else "  ")).name == name


def test_what_is_no_gpu_is_refused():
    assert refusals(__file__, find_gpu=find_gpu, custom_gpu=custom_gpu) == 58


@pytest.mark.parametrize(("name", "taken", "why", "others"), TABLES["names of several sizes"])
def test_a_name_of_several_sizes_is_the_usual_one_and_says_so(name, taken, why, others):
    found = find_gpu(name)
    [note] = found.notes
    assert note.startswith(f"gpu={name!r} is taken as {taken}, ")
    assert note.endswith(f"{why}; others of that name: {others}")
    assert found == dataclasses.replace(GPUS[taken.partition(" (")[0]], notes=(note,))


# ---- by size


@pytest.mark.parametrize("text", ["8GB", "8 GB", "8gb", "8G", "8 g", "8GiB", " 8 gib ", "8192MiB", "8192 MB"])
def test_a_size_alone_is_a_gpu_of_so_many_gib(text):
    assert find_gpu(text).memory_bytes == custom_gpu(text).usable_bytes == 8 * GIB
    of_size = [known.usable_bytes for known in GPUS.values() if known.memory_bytes == 8 * GIB]
    assert find_gpu(text).usable_bytes == min(of_size) == round(7.75 * GIB)
    assert find_gpu("7.5GiB") == custom_gpu("7.5GiB")  # a size that is not sold


# ---- of this machine


@pytest.mark.parametrize(
    ("given", "context_bytes", "source", "assumed"),
    [
        *(
            ({"memory": "4GiB", "compute_capability": capability}, 224 * MIB, "given; context: derived", "")
            for capability in ("8.6", 8.6, (8, 6))
        ),
        (
            {"memory": "4GiB", "name": "mine"},
            224 * MIB,
            "given; compute capability: assumed; context: derived",
            "assumed of mine: compute capability 8.6 (its kernels, bf16 and context), all of 4.00 GiB usable",
        ),
        ({"memory": "4GiB", "compute_capability": 10}, 676 * MIB, "given; context: derived", ""),
    ],
)
def test_a_custom_gpu_has_what_the_user_says_and_leaves_the_rest_open(given, context_bytes, source, assumed):
    gpu = custom_gpu(**given)
    capability = (10, 0) if given.get("compute_capability") == 10 else (8, 6)
    nearest = "9.0, the nearest that is known" if capability == (10, 0) else "8.6"
    source += f" from the GPUs of compute capability {nearest}"
    name = given.get("name", "custom 4.00 GiB")
    sizes = {"memory_bytes": 4 * GIB, "usable_bytes": 4 * GIB, "context_bytes": context_bytes}
    assert gpu == Gpu(name, **sizes, compute_capability=capability, source=source, notes=(assumed,) if assumed else ())
    assert gpu.peak_flops_per_second == PeakRates()
    assert find_gpu(gpu) is gpu


def test_a_size_alone_says_what_it_assumes():
    assert find_gpu("8GB").notes == (
        "assumed of custom 8.00 GiB: compute capability 8.6 (its kernels, bf16 and context), 7.75 GiB usable, the "
        "least of the table's",
    )
    one_size = ("NVIDIA GeForce RTX 3050 Laptop GPU", "NVIDIA T1000", "NVIDIA RTX A2000", "RTX 3060 12GB", "T4", "3090")
    assert [find_gpu(name).notes for name in one_size] == [()] * len(one_size)


MULTIPROCESSORS = 7  # no GPU of the table has so few


def install_gpu(monkeypatch, name, total_bytes, capability):
    """Let ``torch.cuda`` show one GPU that this process has not used; making a context on it fails the test."""

    def no_context(*_):
        pytest.fail("asks for memory that only a context knows")

    properties = SimpleNamespace(name=name, total_memory=total_bytes, uuid="", multi_processor_count=MULTIPROCESSORS)
    properties.major, properties.minor = capability
    for attribute, answer in {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": no_context,
        "get_device_properties": lambda device: properties,
        "memory_stats_as_nested_dict": lambda device: {},
        "mem_get_info": no_context,
    }.items():
        monkeypatch.setattr(torch.cuda, attribute, answer)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)


CURRENT = TABLES["current GPUs"]


@pytest.mark.parametrize(("driver_name", "total_mib", "capability", "expected"), CURRENT)
def test_a_current_gpu_is_what_the_driver_says_and_the_tables_rest(
    monkeypatch, driver_name, total_mib, capability, expected
):
    total_bytes = total_mib * MIB
    install_gpu(monkeypatch, driver_name, total_bytes, capability)
    here = {"usable_bytes": total_bytes, "multiprocessors": MULTIPROCESSORS}
    gpu = current_gpu()
    if isinstance(expected, str):
        row = GPUS[expected]
        source = f"usable memory and multiprocessors: this machine; else {row.source}"
        assert gpu == dataclasses.replace(row, **here, source=source)
    else:
        nearest = "9.0, the nearest that is known" if capability == [10, 3] else "{}.{}".format(*capability)
        source = f"this machine; context: derived from the GPUs of compute capability {nearest}"
        sizes = {**here, "memory_bytes": total_bytes, "context_bytes": expected}
        assert gpu == Gpu(driver_name, **sizes, compute_capability=tuple(capability), source=source)


@pytest.mark.parametrize(("driver_name", "known_mib"), [("NVIDIA L4", 236), ("NVIDIA RTX 2500 Ada Generation", 256)])
def test_a_context_that_can_be_measured_is_unless_it_will_grow(monkeypatch, driver_name, known_mib):
    install_gpu(monkeypatch, driver_name, 22563 * MIB, (8, 9))
    guessed = current_gpu()
    assert guessed.context_bytes == known_mib * MIB
    for read_bytes in (321 * MIB, guessed.context_bytes - 1):  # less than in mid-training
        monkeypatch.setattr("hf_memopt.training.devices.readings.read_context", lambda device, found=read_bytes: found)
        source = f"context: measured on this machine; else {guessed.source}"
        measured = dataclasses.replace(guessed, context_bytes=read_bytes, source=source)
        assert current_gpu() == (guessed if read_bytes < guessed.context_bytes else measured)


def test_without_a_gpu_of_nvidia_nothing_is_asked(monkeypatch):
    install_gpu(monkeypatch, "AMD Instinct MI300X", 192 * GIB, (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pytest.fail("initialises CUDA"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "7.0")
        assert current_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_gpu() is None


@pytest.mark.gpu
def test_the_real_gpu():
    gpu = current_gpu()
    assert gpu is not None
    assert gpu.usable_bytes == torch.cuda.get_device_properties(0).total_memory
    assert gpu.compute_capability == torch.cuda.get_device_capability(0)
    assert gpu.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count


def test_the_bus_is_that_of_the_card() -> None:
    """Half of 16 lanes on the chips of small cards and laptops; of a GPU by its size 16."""
    small = {"RTX 4060": (4, 8), "RTX 4070 Laptop": (4, 8), "RTX 5060": (5, 8)}
    lanes = {"T4": (3, 16), "RTX 4090": (4, 16), "H100": (5, 16), **small}
    assert {name: GPUS[name].bus for name in lanes} == lanes
    assert GPUS["RTX 4060"].bus_bytes_per_second == 16 * 10**9
    assert custom_gpu("8GB", "8.6").bus == (4, 16)
