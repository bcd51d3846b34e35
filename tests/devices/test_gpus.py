"""``gpus``: the table against its sources, names in every usual spelling, GPUs by size, and the current one."""

from __future__ import annotations

import dataclasses
import doctest
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_memopt.devices import gpus
from hf_memopt.devices import memory_reading as reading
from hf_memopt.devices.gpus import GPUS, Gpu, current_gpu, custom_gpu, find_gpu

GIB = 2**30
MIB = 2**20

# https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus. They have no GTX 1660 Ti,
# which is a Turing GPU like the T4.
NVIDIA_SAYS = {
    "6.0": ["P100"],
    "7.0": ["V100"],
    "7.5": ["T4", "GTX 1650", "GTX 1660 Ti", "RTX 2060", "RTX 2080 Ti"],
    "8.0": ["A100"],
    "8.6": ["A10", "RTX 3050", "RTX 3060", "RTX 3070", "RTX 3080", "RTX 3090"],
    "8.9": ["L4", "L40S", "RTX 4050", "RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4080", "RTX 4090"],
    "9.0": ["H100", "H200"],
    "12.0": ["RTX 5090"],
}

# GPU, then of the process in the message that the row names: GiB in use, GiB allocated, MiB reserved but unallocated.
MESSAGES = [
    ("V100 32GB", 31.34, 29.76, 637.51),
    ("T4", 4.11, 3.72, 264.21),
    ("RTX 3070", 7.39, 7.21, 5.22),
    ("RTX 3090", 20.57, 20.13, 0.74),
    ("A10", 21.91, 21.69, 1.55),
    ("A100 40GB", 14.25, 12.87, 912.01),
    ("A100 80GB", 16.54, 15.94, 205.65),
    ("RTX 4060", 7.46, 7.13, 222.83),
    ("RTX 4060 Ti 16GB", 15.38, 14.87, 266.35),
    ("RTX 4090", 22.80, 22.10, 222.14),
    ("L4", 20.78, 18.66, 1.89 * 1024),
    ("L40S", 44.47, 43.89, 79.61),
    ("H100", 91.91, 86.10, 5.15 * 1024),
    ("RTX 5090", 26.89, 25.95, 343.86),
]

# What drivers report of a GPU: deviceQuery, OpenCL's compute units and the like.
REPORTED_MULTIPROCESSORS = {
    "GTX 1660 Ti": 24,  # https://github.com/Dr-Noob/gpufetch/issues/10
    "T4": 40,  # https://chiemon.github.io/2024/12/25/%E6%98%BE%E5%8D%A1%E4%BF%A1%E6%81%AF.html
    "RTX 3050 4GB": 16,  # https://github.com/xtrupal/My-GPU-Architecture
    "RTX 3050 8GB": 20,  # https://github.com/nohzen/opencl/blob/main/info/desktop_RTX3050.md
    "RTX 3090": 82,  # https://github.com/Jumperkables/cuda-benchmarking/blob/main/00_deviceQuery/README.md
    "A100 40GB": 108,  # https://github.com/bottlerocket-os/bottlerocket/pull/3873
    "A100 80GB": 108,  # https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122
    "RTX 4090": 128,  # https://github.com/pc2/GPUInspector.jl/issues/11
    "L4": 58,  # https://github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139
    "RTX 5090": 170,  # https://github.com/aikitoria/open-gpu-kernel-modules/issues/1
}

# As counts, not as cores: NVIDIA's own table for P100 and V100 and the other sources named in ``devices/gpus.py``; L40S
# by NVIDIA's whitepaper, whose RTX 6000 Ada has the same cores (https://github.com/NVIDIA/cudnn-frontend/pull/1164).
PUBLISHED_MULTIPROCESSORS = {"P100": 56, "V100 16GB": 80, "V100 32GB": 80, "A10": 72, "L40S": 142, "H100": 132}

KNOWN = ", ".join(GPUS)


def unknown(name: object, hint: str = "") -> str:
    return (
        f"gpu={name!r} is not a GPU of the table; expected one of: {KNOWN}.{hint} "
        "Pass gpu=custom_gpu('4GiB', compute_capability='7.5'), or --gpu-memory 4GiB --compute-capability 7.5."
    )


def model_name(name: str) -> str:
    return re.sub(r" (Laptop|\d+GB)", "", name)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(gpus).failed == 0


def test_importing_the_table_does_not_import_torch():
    script = "import sys, hf_memopt.devices.gpus; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- the table


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_a_row_is_plausible(gpu):
    assert GPUS[gpu.name] is gpu
    assert gpu.memory_bytes % GIB == 0
    assert 0.9 * gpu.memory_bytes < gpu.usable_bytes < gpu.memory_bytes
    assert gpu.context_bytes is None or 100 * MIB < gpu.context_bytes < GIB
    assert 128e9 <= gpu.bandwidth_bytes_per_second <= 4.8e12
    size = re.search(r"(\d+)GB", gpu.name)
    assert size is None or int(size.group(1)) * GIB == gpu.memory_bytes


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_figure_has_a_source(gpu):
    parts = dict(part.split(": ", 1) for part in gpu.source.split("; "))
    names = ["usable memory", "context", "size and bandwidth", "multiprocessors", "compute capability"]
    assert list(parts) == names
    assert re.fullmatch(r"https://\S+", parts.pop("compute capability"))
    cores = re.fullmatch(r"(\d+) cores, (\d+) in each, https?://\S+", parts.pop("multiprocessors"))
    assert int(cores.group(1)) == gpu.multiprocessors * int(cores.group(2))
    assert re.fullmatch(r"https?://\S+", parts.pop("size and bandwidth"))
    for text in parts.values():
        assert re.fullmatch(r"https://\S+( \(H100 NVL\))?|derived from the GPUs .*|unknown", text)
    assert ("unknown" in gpu.source) == (gpu.context_bytes is None)


def test_multiprocessors_are_those_that_drivers_report_and_whitepapers_give():
    for name, count in (REPORTED_MULTIPROCESSORS | PUBLISHED_MULTIPROCESSORS).items():
        assert GPUS[name].multiprocessors == count, name
    assert all(5 < gpu.multiprocessors <= 170 for gpu in GPUS.values())


def test_compute_capabilities_are_those_of_nvidia():
    expected = {model: capability for capability, models in NVIDIA_SAYS.items() for model in models}
    found = {model_name(gpu.name): "{}.{}".format(*gpu.compute_capability) for gpu in GPUS.values()}
    assert found == expected


def test_bf16_begins_with_ampere():
    without = {gpu.name for gpu in GPUS.values() if not gpu.bf16}
    assert without == {
        "P100",
        "V100 16GB",
        "V100 32GB",
        "GTX 1650",
        "GTX 1660 Ti",
        "RTX 2060",
        "RTX 2080 Ti",
        "T4",
    }


@pytest.mark.parametrize(("name", "in_use", "allocated", "unallocated_mib"), MESSAGES)
def test_contexts_are_what_the_messages_say(name, in_use, allocated, unallocated_mib):
    context_mib = (in_use - allocated) * 1024 - unallocated_mib
    assert abs(GPUS[name].context_bytes / MIB - context_mib) <= 1  # the row is rounded to MiB


def test_contexts_without_a_message_are_the_median_of_their_compute_capability():
    assert {name for name, *_ in MESSAGES} == {name for name in GPUS if "context: http" in GPUS[name].source}
    assert GPUS["RTX 3080"].context_bytes == GPUS["RTX 3050 4GB"].context_bytes == 224 * MIB  # of 179, 224, 450
    assert GPUS["RTX 4070"].context_bytes == 256 * MIB  # of 115, 236, 256, 495, 514
    assert "context: derived from the GPUs of compute capability 8.9;" in GPUS["RTX 4070"].source
    assert GPUS["P100"].context_bytes is None  # no GPU of its compute capability was found


def test_usable_memory_without_a_source_is_that_of_the_gpus_nearest_in_size():
    assert GPUS["RTX 3050 6GB"].usable_bytes == GPUS["RTX 3060 Laptop 6GB"].usable_bytes  # the middle of three
    assert GPUS["RTX 4070"].usable_bytes == GPUS["RTX 3060 12GB"].usable_bytes
    share = GPUS["H100"].usable_bytes / GPUS["H100"].memory_bytes
    assert GPUS["H200"].usable_bytes == pytest.approx(141 * GIB * share, abs=1)  # a float against a fraction
    assert "usable memory: derived from the GPUs nearest in size;" in GPUS["H200"].source


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        GPUS["T4"] = GPUS["L4"]  # type: ignore[index]


# ---- by name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("GeForce RTX 4090 24GB", "RTX 4090"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("2080ti", "RTX 2080 Ti"),
        ("gtx-1660-ti", "GTX 1660 Ti"),
        ("RTX 3050 4GB", "RTX 3050 4GB"),
        ("NVIDIA GeForce RTX 3050 Laptop GPU", "RTX 3050 4GB"),
        ("rtx 3050 8 gb", "RTX 3050 8GB"),
        ("RTX3050_6GiB", "RTX 3050 6GB"),
        ("RTX 3060 Mobile", "RTX 3060 Laptop 6GB"),
        ("RTX 3060 6GB", "RTX 3060 Laptop 6GB"),
        ("rtx 3060 (12 GB)", "RTX 3060 12GB"),
        ("RTX 4050", "RTX 4050 Laptop"),
        ("RTX 4060", "RTX 4060"),
        ("rtx 4060 ti", "RTX 4060 Ti 16GB"),
        ("Tesla T4", "T4"),
        ("t4 16GB", "T4"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_usual_spellings_are_found(spelling, name):
    assert find_gpu(spelling) is GPUS[name]


@given(st.sampled_from(sorted(GPUS)), st.booleans(), st.sampled_from(["", "NVIDIA ", "nvidia geforce "]))
def test_case_separators_and_maker_do_not_count(name, dashes, maker):
    assert find_gpu(maker + name) is GPUS[name]
    assert find_gpu(name.lower().replace(" ", "-" if dashes else "  ")) is GPUS[name]


def test_a_gpu_is_returned_as_it_is():
    gpu = custom_gpu("4GiB")
    assert find_gpu(gpu) is gpu


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("RTX 3050", ["RTX 3050 4GB", "RTX 3050 6GB", "RTX 3050 8GB"]),
        ("NVIDIA GeForce RTX 3060", ["RTX 3060 Laptop 6GB", "RTX 3060 12GB"]),
        ("a100", ["A100 40GB", "A100 80GB"]),
        ("V100-SXM2", ["V100 16GB", "V100 32GB"]),
    ],
)
def test_a_name_of_several_gpus_lists_them(name, variants):
    with pytest.raises(ValueError) as error:
        find_gpu(name)
    assert str(error.value) == (
        f"gpu={name!r} matches several GPUs; expected one of: {', '.join(variants)}. Pass gpu={variants[0]!r}."
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RTX 4070 Ti", " Did you mean 'RTX 4070'?"),
        ("RTX 4080 SUPER", " Did you mean 'RTX 4080'?"),
        ("RTX 4090 Laptop", " Did you mean 'RTX 4050 Laptop'?"),
        ("RTX 3080 12GB", " Did you mean 'RTX 3060 12GB'?"),
        ("GTX 4090", " Did you mean 'RTX 4090'?"),
        ("A10G", " Did you mean 'A10'?"),
        ("MI300X", ""),
        ("NVIDIA", ""),
        ("16GB", " Did you mean 'V100 16GB'?"),
        ("", ""),
        (4090, " Did you mean 'RTX 4090'?"),
        (None, ""),
    ],
)
def test_an_unknown_name_lists_the_table(name, hint):
    with pytest.raises(ValueError) as error:
        find_gpu(name)
    assert str(error.value) == unknown(name, hint)


# ---- by size


@pytest.mark.parametrize("capability", ["8.6", 8.6, (8, 6)])
def test_a_custom_gpu_has_what_the_user_says(capability):
    assert custom_gpu("4GiB", compute_capability=capability) == Gpu(
        name="custom 4.00 GiB",
        memory_bytes=4 * GIB,
        usable_bytes=4 * GIB,
        context_bytes=224 * MIB,
        compute_capability=(8, 6),
        source="given; context: derived from the GPUs of compute capability 8.6",
        bandwidth_bytes_per_second=None,
    )


def test_what_a_custom_gpu_leaves_open():
    gpu = custom_gpu(6_000_000_000, name="mine")
    assert (gpu.name, gpu.usable_bytes, gpu.compute_capability) == ("mine", 6_000_000_000, (7, 5))
    assert gpu.source == (
        "given; compute capability: assumed; context: derived from the GPUs of compute capability 7.5"
    )
    blackwell = custom_gpu("192GB", 10)
    assert (blackwell.compute_capability, blackwell.context_bytes, blackwell.bf16) == ((10, 0), None, True)
    assert blackwell.source == "given; context: unknown"
    assert (gpu.multiprocessors, blackwell.multiprocessors) == (None, None)


@pytest.mark.parametrize("memory", ["", "4", "4 quarks", None, 4.0, True])
def test_what_is_no_memory_is_refused(memory):
    with pytest.raises(ValueError) as error:
        custom_gpu(memory)
    assert str(error.value) == (
        f"memory={memory!r} is not an amount of memory; expected a number with one of the units "
        "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB. Write, for example, '4GB' or '3.5GiB'."
    )


def test_a_negative_memory_is_refused():
    with pytest.raises(ValueError) as error:
        custom_gpu(-1)
    assert str(error.value) == "memory=-1 is negative; expected 0 bytes or more. Write, for example, '4GB'."


@pytest.mark.parametrize("memory", [0, 4, "512KiB"])  # 4: gigabytes were meant
def test_too_little_memory_is_refused(memory):
    with pytest.raises(ValueError) as error:
        custom_gpu(memory)
    assert str(error.value) == (
        f"memory={memory!r} is too little for a GPU; expected 1.0 MiB to 1048576.00 GiB. Pass memory='4GiB'."
    )


def test_memory_that_no_gpu_has_is_refused():
    with pytest.raises(ValueError) as error:
        custom_gpu("1025TiB")
    assert str(error.value) == (
        "memory='1025TiB' is too much for a GPU; expected 1.0 MiB to 1048576.00 GiB. Pass memory='4GiB'."
    )


@pytest.mark.parametrize("capability", ["", "8", "86", 86, "sm_86", "8.66", 2.0, True, (8,), (8, 6, 0), float("nan")])
def test_what_is_no_compute_capability_is_refused(capability):
    with pytest.raises(ValueError) as error:
        custom_gpu("4GiB", compute_capability=capability)
    assert str(error.value) == (
        f"compute_capability={capability!r} is not a compute capability; expected major.minor as in "
        "https://developer.nvidia.com/cuda-gpus. Pass compute_capability='7.5'."
    )


# ---- of this machine

MULTIPROCESSORS = 7  # no GPU of the table has so few


def install_gpu(monkeypatch, name, total_bytes, capability):
    """Let ``torch.cuda`` show one GPU that this process has not used; making a context on it fails the test."""

    def no_context(*_):
        pytest.fail("asks for memory that only a context knows")

    properties = SimpleNamespace(
        name=name,
        total_memory=total_bytes,
        major=capability[0],
        minor=capability[1],
        uuid="",
        multi_processor_count=MULTIPROCESSORS,
    )
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


@pytest.mark.parametrize(
    ("driver_name", "total_bytes", "name"),
    [
        ("NVIDIA GeForce RTX 3050 Laptop GPU", 3759 * MIB, "RTX 3050 4GB"),
        ("NVIDIA GeForce RTX 3050", 7800 * MIB, "RTX 3050 8GB"),
        ("NVIDIA GeForce RTX 3060", 11910 * MIB, "RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3060", 5938 * MIB, "RTX 3060 Laptop 6GB"),
        ("Tesla V100-SXM2-16GB", 16160 * MIB, "V100 16GB"),
        ("NVIDIA GeForce RTX 4090", 24564 * MIB, "RTX 4090"),  # Windows
    ],
)
def test_a_known_current_gpu_has_the_drivers_size_and_the_tables_rest(monkeypatch, driver_name, total_bytes, name):
    row = GPUS[name]
    install_gpu(monkeypatch, driver_name, total_bytes, row.compute_capability)
    gpu = current_gpu()
    assert gpu is not None
    assert gpu.usable_bytes == total_bytes
    assert gpu.multiprocessors == MULTIPROCESSORS
    assert gpu.source == f"usable memory and multiprocessors: this machine; else {row.source}"
    assert (gpu.name, gpu.memory_bytes, gpu.context_bytes) == (row.name, row.memory_bytes, row.context_bytes)
    assert (gpu.compute_capability, gpu.bandwidth_bytes_per_second) == (
        row.compute_capability,
        row.bandwidth_bytes_per_second,
    )


@pytest.mark.parametrize(
    ("driver_name", "total_bytes", "capability", "context_bytes"),
    [
        ("NVIDIA RTX A4000", 15985 * MIB, (8, 6), 224 * MIB),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 7806 * MIB, (8, 9), 256 * MIB),
        ("NVIDIA GeForce RTX 3070", 15800 * MIB, (8, 6), 224 * MIB),  # rebuilt with twice the memory
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864 * MIB, (8, 0), 409 * MIB),
        ("NVIDIA B200", 182000 * MIB, (10, 0), None),
    ],
)
def test_an_unknown_current_gpu_is_described_by_the_driver(
    monkeypatch, driver_name, total_bytes, capability, context_bytes
):
    install_gpu(monkeypatch, driver_name, total_bytes, capability)
    known = "unknown" if context_bytes is None else "derived from the GPUs of compute capability {}.{}"
    assert current_gpu() == Gpu(
        name=driver_name,
        memory_bytes=total_bytes,
        usable_bytes=total_bytes,
        context_bytes=context_bytes,
        compute_capability=capability,
        source=f"this machine; context: {known.format(*capability)}",
        multiprocessors=MULTIPROCESSORS,
    )


@pytest.mark.parametrize(("driver_name", "known"), [("NVIDIA L4", True), ("NVIDIA RTX 2000 Ada Generation", False)])
def test_a_context_that_can_be_measured_is(monkeypatch, driver_name, known):
    install_gpu(monkeypatch, driver_name, 22563 * MIB, (8, 9))
    guessed = current_gpu()
    asked = []
    monkeypatch.setattr(reading, "read_context", lambda device: asked.append(device) or 321 * MIB)
    measured = current_gpu()
    assert asked == [torch.device("cuda", 0)]
    assert guessed.context_bytes == (236 if known else 256) * MIB
    assert measured.source == f"context: measured on this machine; else {guessed.source}"
    assert measured == dataclasses.replace(guessed, context_bytes=321 * MIB, source=measured.source)


def test_a_context_measured_before_training_does_not_replace_a_larger_one(monkeypatch):
    install_gpu(monkeypatch, "NVIDIA L4", 22563 * MIB, (8, 9))
    known = current_gpu()
    monkeypatch.setattr(reading, "read_context", lambda device: known.context_bytes - 1)
    assert current_gpu() == known


def test_without_a_gpu_nothing_is_asked(monkeypatch):
    install_gpu(monkeypatch, "NVIDIA L4", 22563 * MIB, (8, 9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: pytest.fail("initialises CUDA"))
    assert current_gpu() is None


def test_an_amd_gpu_is_no_cuda_gpu(monkeypatch):
    install_gpu(monkeypatch, "AMD Instinct MI300X", 192 * GIB, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert current_gpu() is None


@pytest.mark.gpu
def test_the_real_gpu():
    gpu = current_gpu()
    assert gpu is not None
    assert gpu.usable_bytes == torch.cuda.get_device_properties(0).total_memory
    assert gpu.compute_capability == torch.cuda.get_device_capability(0)
    assert gpu.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
