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

from hf_memopt.devices import GPUS, Gpu, PeakRates, current_gpu, custom_gpu, find_gpu, gpus

GIB = 2**30
MIB = 2**20

# https://developer.nvidia.com/cuda-gpus and https://developer.nvidia.com/cuda-legacy-gpus, by the beginnings of names.
NVIDIA_SAYS = {
    "6.0": ["P100"],
    "6.1": ["GTX 10", "TITAN X", "Quadro P", "P4"],
    "7.0": ["V100", "TITAN V"],
    "7.5": ["T4", "T1000", "GTX 16", "RTX 20", "TITAN RTX", "Quadro RTX"],
    "8.0": ["A100", "A30"],
    "8.6": ["A2", "A10", "A16", "A40", "RTX 2050", "RTX 30", "RTX A"],
    "8.9": [
        "L4",
        "RTX 40",
        "RTX 4500 Ada",
        "RTX 2000 Ada",
        "RTX 3000 Ada",
        "RTX 3500 Ada",
        "RTX 5000 Ada",
        "RTX 6000 Ada",
    ],
    "9.0": ["H100", "H200"],
    "10.0": ["B200"],
    "12.0": ["RTX 50", "RTX PRO"],
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
    "A10G": 80,  # torch.cuda.get_device_properties(0) of an AWS g5 instance
    "A100 80GB": 108,  # https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122
    "RTX 4090": 128,  # https://github.com/pc2/GPUInspector.jl/issues/11
    "L4": 58,  # https://github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139
    "RTX 5090": 170,  # https://github.com/aikitoria/open-gpu-kernel-modules/issues/1
}

# As counts, not as cores: NVIDIA's own table for P100 and V100, the sources that ``gpu_table.py`` names; L40S by
# NVIDIA's whitepaper, whose RTX 6000 Ada has the same cores (https://github.com/NVIDIA/cudnn-frontend/pull/1164).
PUBLISHED_MULTIPROCESSORS = {"P100": 56, "V100 16GB": 80, "V100 32GB": 80, "A10": 72, "L40S": 142, "H100": 132}

# TFLOP/s of dense products as data sheets and whitepapers of NVIDIA and AMD print them: half of the figure where they
# print that of sparse operands.
PUBLISHED_TFLOPS = {
    ("GTX 1080", "fp32"): 8.873,
    ("V100 16GB", "fp32"): 15.7,
    ("V100 16GB", "fp16"): 125,
    ("T4", "fp32"): 8.1,
    ("T4", "fp16"): 65,
    ("RTX 2080 Ti", "fp16"): 53.8,
    ("Quadro RTX 8000", "fp16"): 130.5,
    ("TITAN RTX", "fp16"): 130.5,
    ("A100 80GB", "fp32"): 19.5,
    ("A100 80GB", "tf32"): 156,
    ("A100 80GB", "bf16"): 312,
    ("A30", "tf32"): 82,
    ("A30", "bf16"): 165,
    ("RTX 3070", "bf16"): 40.6,
    ("RTX 3080", "bf16"): 59.5,
    ("RTX 3090", "fp32"): 35.6,
    ("RTX 3090", "tf32"): 35.6,
    ("RTX 3090", "bf16"): 71,
    ("A2", "bf16"): 18,
    ("A10", "tf32"): 62.5,
    ("A10", "bf16"): 125,
    ("A10G", "bf16"): 70,
    ("A16", "bf16"): 17.9,
    ("A40", "tf32"): 74.8,
    ("A40", "fp16"): 149.7,
    ("RTX A2000 6GB", "fp16"): 63.9 / 2,
    ("RTX A4000", "fp16"): 153.4 / 2,
    ("RTX A5000", "fp16"): 222.2 / 2,
    ("RTX A6000", "fp16"): 309.7 / 2,
    ("RTX 4080", "bf16"): 97.5,
    ("RTX 4090", "fp32"): 82.6,
    ("RTX 4090", "tf32"): 82.6,
    ("RTX 4090", "bf16"): 165.2,
    ("L4", "fp32"): 30.3,
    ("L4", "bf16"): 242 / 2,
    ("L40", "bf16"): 181.05,
    ("L40S", "bf16"): 733 / 2,
    ("RTX 2000 Ada", "bf16"): 191.9 / 4,  # printed for sparse fp8
    ("RTX 4000 SFF Ada", "bf16"): 306.8 / 4,
    ("RTX 5000 Ada", "bf16"): 1044.4 / 4,
    ("RTX 6000 Ada", "bf16"): 1457 / 4,
    ("H100", "fp32"): 67,
    ("H100", "tf32"): 989 / 2,
    ("H100", "bf16"): 1979 / 2,
    ("H100 PCIe", "fp32"): 51,
    ("H100 PCIe", "bf16"): 1513 / 2,
    ("H100 NVL", "bf16"): 1671 / 2,
    ("H200", "bf16"): 1979 / 2,
    ("B200", "bf16"): 2250,
    ("RTX 5080", "bf16"): 112.6,
    ("RTX 5090", "fp32"): 104.8,
    ("RTX 5090", "tf32"): 104.8,
    ("RTX 5090", "bf16"): 209.5,
    ("RTX PRO 2000", "bf16"): 545 / 8,  # printed for sparse fp4
    ("RTX PRO 4000", "bf16"): 1178 / 8,
    ("RTX PRO 6000", "fp32"): 126,
    ("MI210", "fp32"): 45.3,
    ("MI210", "bf16"): 181,
    ("MI250X", "bf16"): 383 / 2,  # of one of its two GPUs
    ("MI300X", "fp32"): 163.4,
    ("MI300X", "tf32"): 653.7,
    ("MI300X", "bf16"): 1307.4,
    ("MI355X", "fp32"): 157.3,
    ("MI355X", "bf16"): 2516.6,
}


def unknown(name: object, hint: str = "") -> str:
    return (
        f"gpu={name!r} is not a GPU of the table; expected one of its {len(GPUS)} names, which hf-memopt gpus lists, "
        f"or a size.{hint} Pass its size: gpu='8GB'"
    )


@pytest.mark.parametrize("name", ["Apple M2", "mps", "M3 Max", "Radeon RX 6700 XT", "RX 5700", "Intel Arc A770"])
def test_gpus_of_others_are_refused_without_a_suggestion(name: str) -> None:
    with pytest.raises(ValueError) as error:
        find_gpu(name)
    assert str(error.value) == (
        f"gpu={name!r} is a GPU of Apple, Intel or AMD's Radeon series, for which nothing is predicted; expected "
        "one of NVIDIA or an Instinct. Pass gpu='RTX 3060 12GB'"
    )


def is_amd(gpu: Gpu) -> bool:
    return gpu.name.startswith("MI")


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
    assert 80e9 <= gpu.bandwidth_bytes_per_second <= 8e12
    size = re.search(r"(\d+)GB", gpu.name)
    assert size is None or int(size.group(1)) * GIB == gpu.memory_bytes
    assert bool(gpu.notes) == is_amd(gpu)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_figure_has_a_source(gpu):
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


def test_multiprocessors_are_those_that_drivers_report_and_whitepapers_give():
    for name, count in (REPORTED_MULTIPROCESSORS | PUBLISHED_MULTIPROCESSORS).items():
        assert GPUS[name].multiprocessors == count, name
    assert all(5 <= gpu.multiprocessors <= 304 for gpu in GPUS.values())


@pytest.mark.parametrize(("name", "dtype"), PUBLISHED_TFLOPS)
def test_rates_of_multiprocessors_times_clock_are_the_published_ones(name, dtype):
    rate = getattr(GPUS[name].peak_flops_per_second, dtype)
    assert rate / 1e12 == pytest.approx(PUBLISHED_TFLOPS[name, dtype], rel=0.013)  # printed with two or three digits


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_rates_are_in_the_ratios_of_their_formats(gpu):
    rates = gpu.peak_flops_per_second
    assert 1e12 < rates.fp32 < 200e12
    assert rates.bf16 in (None, rates.fp16)
    assert (rates.bf16 is None) == (
        not gpu.bf16 or ("Laptop" in gpu.name and re.search(r"RTX A\d|Ada", gpu.name) is not None)
    )
    assert rates.tf32 is None or rates.fp16 == 2 * rates.tf32
    assert rates.fp16 is None or rates.fp16 >= rates.fp32


def test_a_laptop_has_another_row_than_its_desktop_namesake():
    for name, gpu in GPUS.items():
        desktop = GPUS.get(name.removesuffix(" Laptop"))
        if desktop is not None and desktop is not gpu:
            assert desktop.peak_flops_per_second.fp32 != gpu.peak_flops_per_second.fp32, name


def test_a_rate_that_nobody_published_is_none():
    assert GPUS["GTX 1650"].peak_flops_per_second == PeakRates(fp32=14 * 128 * 1665 * 10**6)
    assert GPUS["T4"].peak_flops_per_second.tf32 is GPUS["T4"].peak_flops_per_second.bf16 is None
    assert custom_gpu("8GB").peak_flops_per_second == PeakRates()


def test_compute_capabilities_are_those_of_nvidia():
    beginnings = {beginning: capability for capability, names in NVIDIA_SAYS.items() for beginning in names}
    for gpu in GPUS.values():
        if is_amd(gpu):
            continue
        longest = max((name for name in beginnings if gpu.name.startswith(name)), key=len)
        assert "{}.{}".format(*gpu.compute_capability) == beginnings[longest], gpu.name


def test_bf16_begins_with_ampere():
    without = {gpu.name for gpu in GPUS.values() if not gpu.bf16}
    old = r"GTX .*|P4|P40|P100|V100 .*|TITAN .*|T4|T1000 .*|Quadro .*|RTX 20[6-8]0.*"
    assert without == {name for name in GPUS if re.fullmatch(old, name)}


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
    assert GPUS["RTX 4060 Laptop"].usable_bytes == GPUS["RTX 4060"].usable_bytes
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
        ("4060", "RTX 4060"),  # of a desktop, as nvidia-smi calls it
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX 4060 Laptop"),
        ("rtx 4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "RTX 3050 Laptop 6GB"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080"),
        ("RTX 3080 12GB", "RTX 3080 12GB"),
        ("NVIDIA GeForce RTX 2080 with Max-Q Design", "RTX 2080 Laptop"),
        ("NVIDIA TITAN Xp", "TITAN Xp"),
        ("TITAN X (Pascal)", "TITAN X Pascal"),
        ("Quadro RTX 8000", "Quadro RTX 8000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX A2000 12GB", "RTX A2000 12GB"),
        ("NVIDIA RTX A2000", "RTX A2000 6GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX 3500 Ada Generation Laptop GPU", "RTX 3500 Ada Laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Colab T4", "T4"),
        ("Kaggle P100", "P100"),
        ("Google Colab A100 80GB", "A100 80GB"),
        ("t4 16GB", "T4"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("mi250", "MI250"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_usual_spellings_are_found(spelling, name):
    assert dataclasses.replace(find_gpu(spelling), notes=GPUS[name].notes) == GPUS[name]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3050 Laptop GPU",
        "NVIDIA T1000",
        "NVIDIA RTX A2000",
        "RTX 3060 12GB",
        "T4",
        "RTX 4060",
        "3090",
    ],
)
def test_a_name_that_means_one_size_alone_has_no_note(name):
    assert find_gpu(name).notes == ()


@given(st.sampled_from(sorted(GPUS)), st.booleans(), st.sampled_from(["", "NVIDIA ", "nvidia geforce "]))
def test_case_separators_and_maker_do_not_count(name, dashes, maker):
    assert find_gpu(maker + name).name == name
    assert find_gpu(name.lower().replace(" ", "-" if dashes else "  ")).name == name


def test_a_gpu_is_returned_as_it_is():
    gpu = custom_gpu("4GiB")
    assert find_gpu(gpu) is gpu


SMALLER = "so that what fits it fits both"


@pytest.mark.parametrize(
    ("name", "taken", "why", "others"),
    [
        ("RTX 3050", "RTX 3050 8GB", "(2022; that of 6 GB: 2024)", "RTX 3050 6GB, RTX 3050 Laptop 6GB, RTX 3050 4GB"),
        ("3060", "RTX 3060 12GB", "(2021; that of 8 GB: 2022)", "RTX 3060 8GB, RTX 3060 Laptop 6GB"),
        ("NVIDIA GeForce RTX 3060", "RTX 3060 12GB", "(2021; that of 8 GB: 2022)", "RTX 3060 8GB, RTX 3060 Laptop 6GB"),
        (
            "RTX 3080",
            "RTX 3080 (10 GB)",
            "(2020; that of 12 GB: 2022)",
            "RTX 3080 Laptop 16GB, RTX 3080 12GB, RTX 3080 Laptop 8GB",
        ),
        ("RTX 2060", "RTX 2060 (6 GB)", "(2019; that of 12 GB: 2021)", "RTX 2060 12GB"),
        ("V100-SXM2", "V100 16GB", "(2017; that of 32 GB: 2018)", "V100 32GB"),
        ("Colab A100", "A100 40GB", SMALLER, "A100 80GB"),
        ("rtx 4060 ti", "RTX 4060 Ti 8GB", SMALLER, "RTX 4060 Ti 16GB"),
        ("rtx 5060 ti", "RTX 5060 Ti 8GB", SMALLER, "RTX 5060 Ti 16GB"),
        ("3080 laptop", "RTX 3080 Laptop 8GB", SMALLER, "RTX 3080 Laptop 16GB"),
        ("RTX 4070", "RTX 4070 (12 GB)", "the one of a desktop", "RTX 4070 Laptop (8 GB)"),
        ("RTX 4090", "RTX 4090 (24 GB)", "the one of a desktop", "RTX 4090 Laptop (16 GB)"),
    ],
)
def test_a_name_of_several_sizes_is_the_usual_one_and_says_so(name, taken, why, others):
    found = find_gpu(name)
    [note] = found.notes
    assert note.startswith(f"gpu={name!r} is taken as {taken}, ")
    assert note.endswith(f"{why}; others of that name: {others}")
    assert found == dataclasses.replace(GPUS[taken.partition(" (")[0]], notes=(note,))


def test_a_name_of_several_designs_lists_them_with_the_larger_first():
    with pytest.raises(ValueError) as error:
        find_gpu("RTX 6000")
    assert str(error.value) == (
        "gpu='RTX 6000' matches several GPUs; expected one of: RTX PRO 6000, RTX 6000 Ada, Quadro RTX 6000. "
        "Pass gpu='RTX PRO 6000'."
    )


@pytest.mark.parametrize(
    ("name", "one", "count"),
    [
        ("2x T4", "T4", 2),
        ("2 x RTX 3090", "RTX 3090", 2),
        ("GPU T4 x2", "GPU T4", 2),
        ("4x-H100", "H100", 4),
        ("A100*8", "A100", 8),
    ],
)
def test_a_number_of_gpus_is_not_part_of_a_name(name, one, count):
    with pytest.raises(ValueError) as error:
        find_gpu(name)
    assert str(error.value) == (
        f"gpu={name!r} is the name of {count} GPUs; expected that of one, and their number. Pass gpu={one!r} and "
        f"world_size={count}"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RTX 3065", " Did you mean 'RTX 3060 12GB'?"),
        ("NVIDIA GeForce RTX 4060 Lap", " Did you mean 'RTX 4060 Laptop'?"),
        ("GTX 4090", " Did you mean 'RTX 4090'?"),
        ("MX450", ""),
        ("GTX 970", ""),
        ("RTX 6090", ""),
        ("NVIDIA", ""),
        ("RTX", ""),
        ("2x\nMX450", ""),
        ("", ""),
        (4090, ""),
        (None, ""),
    ],
)
def test_an_unknown_name_gets_the_nearest_or_none(name, hint):
    with pytest.raises(ValueError) as error:
        find_gpu(name)
    assert str(error.value) == unknown(name, hint)


# ---- by size


@pytest.mark.parametrize("text", ["8GB", "8 GB", "8gb", "8G", "8 g", "8GiB", " 8 gib ", "8192MiB", "8192 MB"])
def test_a_size_alone_is_a_gpu_of_so_many_gib(text):
    assert find_gpu(text).memory_bytes == custom_gpu(text).usable_bytes == 8 * GIB
    of_size = [known.usable_bytes for known in GPUS.values() if known.memory_bytes == 8 * GIB]
    assert find_gpu(text).usable_bytes == min(of_size) == round(7.75 * GIB)


def test_of_a_size_that_is_not_sold_all_is_usable():
    assert find_gpu("7.5GiB") == custom_gpu("7.5GiB")


def test_a_size_alone_says_what_it_assumes():
    assert find_gpu("8GB").notes == (
        "assumed of custom 8.00 GiB: compute capability 8.6 (its kernels, bf16 and context), 7.75 GiB usable, the "
        "least of the table's",
    )
    assert custom_gpu("8GB", "8.6").notes == ()


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
    assert (gpu.name, gpu.usable_bytes, gpu.compute_capability) == ("mine", 6_000_000_000, (8, 6))
    assert gpu.source == (
        "given; compute capability: assumed; context: derived from the GPUs of compute capability 8.6"
    )
    assert gpu.notes == (
        "assumed of mine: compute capability 8.6 (its kernels, bf16 and context), all of 5.59 GiB usable",
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
        ("NVIDIA GeForce RTX 4060", 7940 * MIB, "RTX 4060"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 7806 * MIB, "RTX 4060 Laptop"),
        ("NVIDIA GeForce RTX 4060 Ti", 7840 * MIB, "RTX 4060 Ti 8GB"),
        ("NVIDIA GeForce RTX 3080", 12040 * MIB, "RTX 3080 12GB"),
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
        ("NVIDIA RTX A4500 Embedded", 15985 * MIB, (8, 6), 224 * MIB),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 11900 * MIB, (8, 9), 256 * MIB),  # rebuilt with more memory
        ("NVIDIA GeForce RTX 3070", 15800 * MIB, (8, 6), 224 * MIB),  # rebuilt with twice the memory
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864 * MIB, (8, 0), 409 * MIB),
        ("NVIDIA GB300", 282000 * MIB, (10, 3), None),
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


@pytest.mark.parametrize(("driver_name", "known"), [("NVIDIA L4", True), ("NVIDIA RTX 2500 Ada Generation", False)])
def test_a_context_that_can_be_measured_is(monkeypatch, driver_name, known):
    install_gpu(monkeypatch, driver_name, 22563 * MIB, (8, 9))
    guessed = current_gpu()
    asked = []
    monkeypatch.setattr("hf_memopt.devices.readings.read_context", lambda device: asked.append(device) or 321 * MIB)
    measured = current_gpu()
    assert asked == [torch.device("cuda", 0)]
    assert guessed.context_bytes == (236 if known else 256) * MIB
    assert measured.source == f"context: measured on this machine; else {guessed.source}"
    assert measured == dataclasses.replace(guessed, context_bytes=321 * MIB, source=measured.source)


def test_a_context_measured_before_training_does_not_replace_a_larger_one(monkeypatch):
    install_gpu(monkeypatch, "NVIDIA L4", 22563 * MIB, (8, 9))
    known = current_gpu()
    monkeypatch.setattr("hf_memopt.devices.readings.read_context", lambda device: known.context_bytes - 1)
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


def test_the_bus_is_that_of_the_card() -> None:
    """Half of 16 lanes on the chips of small cards and laptops; of a GPU by its size 16."""
    lanes = {name: GPUS[name].bus for name in ("T4", "RTX 4060", "RTX 4090", "RTX 4070 Laptop", "RTX 5060", "H100")}
    assert lanes == {
        "T4": (3, 16),
        "RTX 4060": (4, 8),
        "RTX 4090": (4, 16),
        "RTX 4070 Laptop": (4, 8),
        "RTX 5060": (5, 8),
        "H100": (5, 16),
    }
    assert GPUS["RTX 4060"].bus_bytes_per_second == 16 * 10**9
    assert custom_gpu("8GB", "8.6").bus == (4, 16)
