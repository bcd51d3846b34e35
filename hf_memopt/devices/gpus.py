"""What decides whether a training step fits a GPU, for GPUs known by name, given by size, or present in this machine.

The figures of the GPUs known by name, and how they were found, are in ``gpu_table``. Where nothing was found for a GPU,
its context is the median of the GPUs of its compute capability, and its usable share the median of those nearest in
size; its ``source`` then says "derived".
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from hf_memopt.devices.gpu_table import CAPABILITIES, ROWS, Architecture, Row
from hf_memopt.plain_data import FixedMapping, check_value, shown
from hf_memopt.units import format_bytes, parse_bytes

__all__ = ["GPUS", "Gpu", "PeakRates", "current_gpu", "custom_gpu", "find_gpu"]


@dataclass(frozen=True, slots=True)
class PeakRates:
    """Floating-point operations per second of dense matrix products that accumulate in float32, by the operands.

    They are what a GPU's specification promises, without sparsity; None where it is unknown or the GPU lacks the
    format. ``fp16`` and ``bf16`` of a GeForce are half of what is advertised, which accumulates in float16.
    """

    fp32: int | None = None
    tf32: int | None = None
    fp16: int | None = None
    bf16: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that decide whether a training step fits.

    Attributes:
        name: of the table, or as the driver or the user calls it.
        memory_bytes: what it is sold with; for a GPU of this machine that is not in the table, the driver's figure.
        usable_bytes: what all processes together can use, contexts included.
        context_bytes: what a process holds besides torch's allocator; None where it is unknown.
        compute_capability: NVIDIA's, as (major, minor); of an AMD GPU that of the kernels that are simulated for it.
        source: where the figures come from.
        bandwidth_bytes_per_second: of its memory, by its specification; None where it is unknown.
        multiprocessors: their number; kernels split their work by it, so the buffers for partial results grow with it.
            None where it is unknown.
        peak_flops_per_second: of matrix products, by the format of their operands.
        notes: what was assumed of it; an estimate for this GPU says so too.
        nvlink_bytes_per_second: to the other GPUs of its server in one direction, all links together; None where they
            are joined by PCIe, or by a bridge that not every computer has.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    context_bytes: int | None
    compute_capability: tuple[int, int]
    source: str
    bandwidth_bytes_per_second: int | None = None
    multiprocessors: int | None = None
    peak_flops_per_second: PeakRates = PeakRates()
    notes: tuple[str, ...] = ()
    nvlink_bytes_per_second: int | None = None

    @property
    def bf16(self) -> bool:
        """Whether it computes bfloat16 natively."""
        return self.compute_capability >= (8, 0)

    @property
    def pcie_generation(self) -> int:
        """Its generation of PCIe: 3 up to Turing, 4 of Ampere and Ada, 5 from Hopper on."""
        return 3 if self.compute_capability < (8, 0) else 4 if self.compute_capability < (9, 0) else 5

    @property
    def pcie_bytes_per_second(self) -> int:
        """Of 16 lanes in one direction; a computer may have fewer."""
        return (16 << (self.pcie_generation - 3)) * 10**9

    @property
    def link(self) -> str:
        """What joins it to other GPUs, in words."""
        return "NVLink" if self.nvlink_bytes_per_second else f"PCIe {self.pcie_generation}.0 x16"

    @property
    def link_bytes_per_second(self) -> int:
        """Of that, in one direction."""
        return self.nvlink_bytes_per_second or self.pcie_bytes_per_second


def _typical_context(capability: tuple[int, int]) -> tuple[int | None, str]:
    """Return the median of the contexts known for a compute capability, and the words for its source."""
    found = [parse_bytes(row.context[0]) for row in ROWS if row.context and row.architecture.capability == capability]
    if not found:
        return None, "unknown"
    return median_low(found), "derived from the GPUs of compute capability {}.{}".format(*capability)


def _typical_usable(memory_bytes: int) -> int:
    """Return how much of a GPU's memory is usable, by the median share of the GPUs nearest in size."""
    known = [row for row in ROWS if row.usable]
    nearest = min((row.memory_gib for row in known), key=lambda gib: abs(gib * GIB - memory_bytes))
    usable = median_low([parse_bytes(row.usable[0]) for row in known if row.usable and row.memory_gib == nearest])
    return memory_bytes * usable // (nearest * GIB)


def _peak_rates(row: Row) -> PeakRates:
    """Return operations per clock of all multiprocessors times the clock that a specification counts with."""
    per_clock = row.architecture
    matrix_hz = (row.matrix_mhz or row.boost_mhz) * 10**6

    def rate(operations: int | None, hz: int = matrix_hz) -> int | None:
        return None if operations is None else row.multiprocessors * operations * hz

    return PeakRates(
        fp32=rate(per_clock.fp32, row.boost_mhz * 10**6),
        tf32=rate(per_clock.tf32),
        fp16=rate(per_clock.fp16),
        bf16=rate(per_clock.bf16),
    )


def _gpu_of_row(row: Row) -> Gpu:
    memory_bytes = row.memory_gib * GIB
    architecture = row.architecture
    if row.usable:
        usable_bytes, usable_source = parse_bytes(row.usable[0]), row.usable[1]
    else:
        usable_bytes, usable_source = _typical_usable(memory_bytes), "derived from the GPUs nearest in size"
    context_bytes, context_source = (
        (None, "unknown") if architecture.is_amd else _typical_context(architecture.capability)
    )
    if row.context:
        context_bytes, context_source = parse_bytes(row.context[0]), row.context[1]
    return Gpu(
        name=row.name,
        memory_bytes=memory_bytes,
        usable_bytes=usable_bytes,
        context_bytes=context_bytes,
        compute_capability=architecture.capability,
        source=(
            f"usable memory: {usable_source}; context: {context_source}; "
            f"size, bandwidth, multiprocessors and clock: {PAGES}{row.page}; "
            f"operations per clock: {architecture.source}; "
            f"compute capability: {_capability_source(architecture)}"
        ),
        bandwidth_bytes_per_second=round(row.bandwidth_gb * 10**9),
        multiprocessors=row.multiprocessors,
        peak_flops_per_second=_peak_rates(row),
        notes=(f"{row.name} is an AMD GPU: {STANDS_IN}",) if architecture.is_amd else (),
        nvlink_bytes_per_second=None if row.nvlink_gb is None else row.nvlink_gb * 10**9,
    )


def _capability_source(architecture: Architecture) -> str:
    return "that of the simulated kernels" if architecture.is_amd else architecture.capability_list


GIB = 2**30
PAGES = "https://www.techpowerup.com/gpu-specs/"
STANDS_IN = "kernels and workspaces of compute capability 8.0 stand in for those of ROCm"

GPUS: Mapping[str, Gpu] = FixedMapping({row.name: _gpu_of_row(row) for row in ROWS})
"""The GPUs that are known by name."""


# ---- by name

_NOISE = {
    *("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "gpu", "card", "graphics", "oam", "vf"),
    *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    *("pascal", "blackwell", "generation", "workstation", "server", "edition", "max", "q"),
}
_FAMILIES = {"gtx", "rtx", "quadro", "ada", "pro"}


def _spelling(name: str) -> list[str]:
    """Return the words of a name that distinguish GPUs, in one spelling: ``["rtx", "3060", "laptop", "6gb"]``."""
    text = re.sub(r"with max-?q design|mobile|notebook", "laptop", name.lower())
    text = re.sub(r"[-_/,()]", " ", text)
    text = re.sub(r"\b(\d+)\s*gi?b\b", r"\1gb", text)
    text = re.sub(r"\b([gr]tx)(?=\d)", r"\1 ", text)
    text = re.sub(r"\b(\d{4})(?=(ti|super)\b)", r"\1 ", text)
    return [word for word in text.split() if word not in _NOISE]


def _words(name: str) -> frozenset[str]:
    return frozenset(_spelling(name))


def _model(words: frozenset[str]) -> frozenset[str]:
    """Return the words of a name that cannot be omitted: all but family, size and ``laptop``."""
    return frozenset(word for word in words - _FAMILIES - {"laptop"} if not re.fullmatch(r"\d+gb", word))


_SIZE = re.compile(r"\s*[0-9]+(\.[0-9]+)?\s*[mg]i?b\s*", flags=re.IGNORECASE | re.ASCII)
_OF_APPLE = re.compile(r"\s*(apple\b|mps\b|m[1-9]\b)", flags=re.IGNORECASE)


def _whole(name: str) -> frozenset[str]:
    return _words(name) - {"gtx", "rtx"}


_NAMES = [(row, name) for row in ROWS for name in (row.name, row.alias) if name]
_WHOLE_NAMES = {_whole(name): row.name for row, name in _NAMES}
_WORDS = [(row.name, _words(f"{name} {row.memory_gib}GB")) for row, name in _NAMES]


def _candidates(name: str) -> list[Gpu]:
    """Return the GPUs of the table that a name may mean, the larger first."""
    words = _words(name)
    known = dict.fromkeys(row for row, all_of in _WORDS if words <= all_of and _model(words) == _model(all_of))
    if not known and "pcie" in words:  # only the H100 has a row of its own for it
        return _candidates(" ".join(words - {"pcie"}))
    return sorted((GPUS[row] for row in known), key=lambda gpu: -gpu.memory_bytes)


def _narrowed(found: list[Gpu], name: str) -> list[Gpu]:
    """Return the one GPU that a name means by itself: its whole name, or the only one that is not of a laptop."""
    for gpu in found:
        if _WHOLE_NAMES.get(_whole(name)) == gpu.name:
            return [gpu]
    desktop = [gpu for gpu in found if "laptop" not in _words(gpu.name)]
    return desktop if len(desktop) == 1 and "laptop" not in _words(name) else found


def find_gpu(gpu: str | Gpu) -> Gpu:
    """Return a GPU of the table by its name, in any usual spelling; a ``Gpu`` is returned as it is.

    Case, spaces, dashes, the maker ("NVIDIA", "GeForce", "Tesla") and the form ("PCIe", "SXM4") are ignored, so that
    names may be those of ``nvidia-smi``. Size and "Laptop" may be omitted where the rest means one GPU; without
    "Laptop", a GPU of a desktop has priority. An amount of memory such as ``"8GB"`` is a GPU of that size
    (``custom_gpu``).

    Raises:
        ValueError: the table has no such GPU, or several; the message lists them, the larger first.

    Examples:
        >>> find_gpu("NVIDIA GeForce RTX 4060 Laptop GPU").name, find_gpu("a100-sxm4-80gb").name
        ('RTX 4060 Laptop', 'A100 80GB')
        >>> find_gpu("8GB").name
        'custom 8.00 GiB'
    """
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str) and _SIZE.fullmatch(gpu):
        return custom_gpu(_gpu_bytes("gpu", gpu))
    found = _narrowed(_candidates(gpu), gpu) if isinstance(gpu, str) else []
    if len(found) == 1:
        return found[0]
    if found:
        names = [known.name for known in found]
        raise ValueError(
            f"gpu={gpu!r} matches several GPUs; expected one of: {', '.join(names)}. Pass gpu={names[0]!r}."
        )
    if isinstance(gpu, str) and _OF_APPLE.match(gpu):
        raise ValueError(
            f"gpu={gpu!r} is one of Apple's GPUs, for which neither memory nor time is predicted; expected an NVIDIA "
            "GPU. Pass gpu='RTX 3060 12GB'"
        )
    raise ValueError(
        f"gpu={shown(gpu)} is not a GPU of the table; expected one of its {len(GPUS)} names, which "
        f"list(hf_memopt.GPUS) shows.{_nearest(gpu)} Pass its size: gpu='8GB' (--gpu 8GB), or custom_gpu('8GB', "
        "compute_capability='8.6')."
    )


def _nearest(name: object) -> str:
    """Return the three GPUs whose names are nearest as a hint for an error text, or an empty string."""
    if not isinstance(name, str):
        return ""
    spelled: dict[str, list[str]] = {}
    for known in GPUS:
        spelled.setdefault(_without_size(known), []).append(known)
    matches = difflib.get_close_matches(_without_size(name), spelled, n=3, cutoff=0.6)
    found = [known for match in matches for known in spelled[match]][:3]
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


def _without_size(name: str) -> str:
    return " ".join(word for word in _spelling(name) if not re.fullmatch(r"\d+gb", word))


# ---- by size

_SMALLEST_BYTES = 2**20
_LARGEST_BYTES = 2**50  # the simulation's sizes have 63 bits
_ASSUMED_CAPABILITY = (8, 6)  # the GPUs of 4 to 24 GB that most people have are of 8.6 or newer


def custom_gpu(
    memory: int | str, compute_capability: str | float | tuple[int, int] | None = None, name: str | None = None
) -> Gpu:
    """Return a GPU that is not in the table.

    Args:
        memory: what a process can use: bytes, or text such as ``"8GB"``, which for a GPU is 8 GiB. All of it counts as
            usable.
        compute_capability: ``"8.6"``, ``8.6`` or ``(8, 6)``; None assumes 8.6, and an estimate says so.
        name: None for a name made of its size.

    Raises:
        ValueError: ``memory`` is not an amount of memory, below 1 MiB or above 1 PiB; ``compute_capability`` is
            invalid.

    Examples:
        >>> custom_gpu("4GB", compute_capability="7.5").name
        'custom 4.00 GiB'
    """
    memory_bytes = _gpu_bytes("memory", memory)
    capability = _ASSUMED_CAPABILITY if compute_capability is None else _parse_capability(compute_capability)
    context_bytes, context_source = _typical_context(capability)
    check_value("name", name, str | None, "my GPU")
    name = f"custom {format_bytes(memory_bytes)}" if name is None else name
    assumed = ""
    notes: tuple[str, ...] = ()
    if compute_capability is None:
        assumed = "; compute capability: assumed"
        text = "assumed of {}: compute capability {}.{} (its kernels, bf16 and context), all of {} usable"
        notes = (text.format(name, *capability, format_bytes(memory_bytes)),)
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        usable_bytes=memory_bytes,
        context_bytes=context_bytes,
        compute_capability=capability,
        source=f"given{assumed}; context: {context_source}",
        notes=notes,
    )


def _gpu_bytes(argument: str, memory: int | str) -> int:
    in_gib = re.sub(r"(?i)(?<=[kmgt])b\s*$", "iB", memory) if isinstance(memory, str) else memory
    try:
        memory_bytes = parse_bytes(in_gib)
    except ValueError as error:
        raise ValueError(str(error).replace(f"size={shown(in_gib)}", f"{argument}={shown(memory)}", 1)) from None
    if not _SMALLEST_BYTES <= memory_bytes <= _LARGEST_BYTES:
        raise ValueError(
            f"{argument}={memory!r} is too {'little' if memory_bytes < _SMALLEST_BYTES else 'much'} for a GPU; "
            f"expected {format_bytes(_SMALLEST_BYTES)} to {format_bytes(_LARGEST_BYTES)}. Pass {argument}='4GiB'."
        )
    return memory_bytes


def _parse_capability(value: str | float | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, tuple):
        text = ".".join(str(part) for part in value)
    else:
        text = f"{value}.0" if type(value) is int else str(value) if isinstance(value, str | float) else ""
    match = re.fullmatch(r"([3-9]|1\d)\.(\d)", text, flags=re.ASCII)
    if match is None:
        raise ValueError(
            f"compute_capability={shown(value)} is not a compute capability; expected major.minor as in "
            f"{CAPABILITIES}. Pass compute_capability='7.5'."
        )
    return int(match.group(1)), int(match.group(2))


# ---- of this machine


def current_gpu() -> Gpu | None:
    """Return torch's current CUDA device, or None without one; creates no CUDA context.

    Size, compute capability and multiprocessors are the driver's. The context is measured where this process has one
    already and NVML reports it (``memory_reading.read_context``), unless the table's is larger: that one is of
    processes in mid-training, and a process that has not trained yet will hold more. The rest comes from the table's
    GPU of the same name and size; without one, the context comes from the GPUs of the same compute capability.
    """
    import torch

    # ROCm calls itself cuda, but its compute capabilities are not NVIDIA's.
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    from hf_memopt.devices.memory_reading import read_context, read_memory

    reading = read_memory()
    if reading.device_total_bytes is None:
        return None
    properties = torch.cuda.get_device_properties(reading.device)
    gpu = _described(reading.device_name, reading.device_total_bytes, (properties.major, properties.minor))
    gpu = replace(gpu, multiprocessors=properties.multi_processor_count)
    context_bytes = read_context(torch.device(reading.device))
    if context_bytes is None or context_bytes < (gpu.context_bytes or 0):
        return gpu
    return replace(gpu, context_bytes=context_bytes, source=f"context: measured on this machine; else {gpu.source}")


def _described(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return the GPU that a driver describes; the rest comes from the table, if it is there."""
    same = _narrowed([gpu for gpu in _candidates(name) if _is_size_of(gpu, total_bytes)], name)
    if len(same) == 1:
        source = f"usable memory and multiprocessors: this machine; else {same[0].source}"
        return replace(same[0], usable_bytes=total_bytes, source=source)
    context_bytes, context_source = _typical_context(capability)
    return Gpu(
        name=name,
        memory_bytes=total_bytes,
        usable_bytes=total_bytes,
        context_bytes=context_bytes,
        compute_capability=capability,
        source=f"this machine; context: {context_source}",
    )


def _is_size_of(gpu: Gpu, total_bytes: int) -> bool:
    """Return whether a driver may report ``total_bytes`` for the GPU; those that were seen keep up to 9 %."""
    return gpu.memory_bytes * 85 <= total_bytes * 100 <= gpu.memory_bytes * 100
