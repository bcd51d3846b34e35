"""What decides whether a training step fits a GPU, for GPUs known by name, given by size, or present in this machine.

The figures of the GPUs known by name, and how they were found, are in ``gpu_table``. Where nothing was found for a GPU,
its context is the median of the GPUs of its compute capability, and its usable share the median of those nearest in
size; its ``source`` then says "derived".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median_low
from types import MappingProxyType

from hf_memopt.devices.gpu_table import CAPABILITIES, ROWS, Row
from hf_memopt.errors import did_you_mean
from hf_memopt.units import format_bytes, parse_bytes

__all__ = ["GPUS", "Gpu", "current_gpu", "custom_gpu", "find_gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that decide whether a training step fits.

    Attributes:
        name: of the table, or as the driver or the user calls it.
        memory_bytes: what it is sold with; for a GPU of this machine that is not in the table, the driver's figure.
        usable_bytes: what all processes together can use, contexts included.
        context_bytes: what a process holds besides torch's allocator; None where it is unknown.
        compute_capability: NVIDIA's, as (major, minor).
        source: where the figures come from.
        bandwidth_bytes_per_second: of its memory, by its specification; None where it is unknown.
        multiprocessors: their number; kernels split their work by it, so the buffers for partial results grow with it.
            None where it is unknown.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    context_bytes: int | None
    compute_capability: tuple[int, int]
    source: str
    bandwidth_bytes_per_second: int | None = None
    multiprocessors: int | None = None

    @property
    def bf16(self) -> bool:
        """Whether it computes bfloat16 natively."""
        return self.compute_capability >= (8, 0)


def _typical_context(capability: tuple[int, int]) -> tuple[int | None, str]:
    """Return the median of the contexts known for a compute capability, and the words for its source."""
    found = [parse_bytes(row.context[0]) for row in ROWS if row.context and row.capability == capability]
    if not found:
        return None, "unknown"
    return median_low(found), "derived from the GPUs of compute capability {}.{}".format(*capability)


def _typical_usable(memory_bytes: int) -> int:
    """Return how much of a GPU's memory is usable, by the median share of the GPUs nearest in size."""
    found = [(parse_bytes(row.memory), parse_bytes(row.usable[0])) for row in ROWS if row.usable]
    nearest_size = min((memory for memory, _ in found), key=lambda memory: abs(memory - memory_bytes))
    share = median_low([Fraction(usable, memory) for memory, usable in found if memory == nearest_size])
    return int(memory_bytes * share)


def _gpu_of_row(row: Row) -> Gpu:
    memory_bytes = parse_bytes(row.memory)
    usable_bytes, usable_source = _typical_usable(memory_bytes), "derived from the GPUs nearest in size"
    if row.usable:
        usable_bytes, usable_source = parse_bytes(row.usable[0]), row.usable[1]
    context_bytes, context_source = _typical_context(row.capability)
    if row.context:
        context_bytes, context_source = parse_bytes(row.context[0]), row.context[1]
    cores_of_one = 64 if row.capability <= (8, 0) else 128  # 6.1 has 128, and no GPU of the table has 6.1
    return Gpu(
        name=row.name,
        memory_bytes=memory_bytes,
        usable_bytes=usable_bytes,
        context_bytes=context_bytes,
        compute_capability=row.capability,
        source=(
            f"usable memory: {usable_source}; context: {context_source}; "
            f"size and bandwidth: {row.specification}; "
            f"multiprocessors: {row.cores} cores, {cores_of_one} in each, {row.cores_list or row.specification}; "
            f"compute capability: {row.capability_list}"
        ),
        bandwidth_bytes_per_second=parse_bytes(row.bandwidth),
        multiprocessors=row.cores // cores_of_one,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType({row.name: _gpu_of_row(row) for row in ROWS})
"""The GPUs that are known by name."""


# ---- by name

_MAKERS = {
    *("nvidia", "geforce", "tesla", "gpu", "card", "graphics"),
    *("pcie", "sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm3"),
}
_FAMILIES = {"gtx", "rtx"}


def _words(name: str) -> frozenset[str]:
    """Return the words of a name that distinguish GPUs, in one spelling: ``{"rtx", "3060", "laptop", "6gb"}``."""
    text = re.sub(r"[-_/,()]", " ", name.lower())
    text = re.sub(r"\b(\d+)\s*gi?b\b", r"\1gb", text)
    text = re.sub(r"\b([gr]tx)(?=\d)", r"\1 ", text)
    text = re.sub(r"\b(\d{4})(?=(ti|super)\b)", r"\1 ", text)
    return frozenset("laptop" if word == "mobile" else word for word in text.split()) - _MAKERS


def _model(words: frozenset[str]) -> frozenset[str]:
    """Return the words of a name that cannot be omitted: all but family, size and ``laptop``."""
    return frozenset(word for word in words - _FAMILIES - {"laptop"} if not re.fullmatch(r"\d+gb", word))


_WORDS = {row.name: _words(f"{row.name} {row.memory} {row.also}") for row in ROWS}


def _candidates(name: str) -> list[Gpu]:
    """Return the GPUs of the table that a name may mean."""
    words = _words(name)
    return [GPUS[known] for known, all_of in _WORDS.items() if words <= all_of and _model(words) == _model(all_of)]


def find_gpu(gpu: str | Gpu) -> Gpu:
    """Return a GPU of the table by its name, in any usual spelling; a ``Gpu`` is returned as it is.

    Case, spaces, dashes, the maker ("NVIDIA", "GeForce", "Tesla") and the form ("PCIe", "SXM4") are ignored. Size and
    "Laptop" may be omitted where no two GPUs of the table differ in them alone.

    Raises:
        ValueError: the table has no such GPU, or several; the message lists them.

    Example:
        >>> find_gpu("NVIDIA GeForce RTX 3050 Laptop GPU").name, find_gpu("a100-sxm4-80gb").name
        ('RTX 3050 4GB', 'A100 80GB')
    """
    if isinstance(gpu, Gpu):
        return gpu
    found = _candidates(gpu) if isinstance(gpu, str) else []
    if len(found) == 1:
        return found[0]
    if found:
        names = [known.name for known in found]
        raise ValueError(
            f"gpu={gpu!r} matches several GPUs; expected one of: {', '.join(names)}. Pass gpu={names[0]!r}."
        )
    raise ValueError(
        f"gpu={gpu!r} is not a GPU of the table; expected one of: {', '.join(GPUS)}.{did_you_mean(str(gpu), GPUS)} "
        "Pass gpu=custom_gpu('4GiB', compute_capability='7.5'), or --gpu-memory 4GiB --compute-capability 7.5."
    )


# ---- by size

_SMALLEST_BYTES = 2**20
_LARGEST_BYTES = 2**50  # the simulation's sizes have 63 bits
_OLDEST_SUPPORTED = (7, 5)  # by CUDA 13


def custom_gpu(
    memory: int | str, compute_capability: str | float | tuple[int, int] | None = None, name: str | None = None
) -> Gpu:
    """Return a GPU that is not in the table.

    Args:
        memory: what a process can use: bytes, or text such as ``"4GiB"``. All of it counts as usable.
        compute_capability: ``"8.6"``, ``8.6`` or ``(8, 6)``; None for 7.5, the oldest that CUDA 13 supports.
        name: None for a name made of its size.

    Raises:
        ValueError: ``memory`` is not an amount of memory, below 1 MiB or above 1 PiB; ``compute_capability`` is
            invalid.

    Example:
        >>> custom_gpu("4GiB", compute_capability="7.5").name
        'custom 4.00 GiB'
    """
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise ValueError(str(error).replace("size=", "memory=", 1)) from None
    if not _SMALLEST_BYTES <= memory_bytes <= _LARGEST_BYTES:
        raise ValueError(
            f"memory={memory!r} is too {'little' if memory_bytes < _SMALLEST_BYTES else 'much'} for a GPU; expected "
            f"{format_bytes(_SMALLEST_BYTES)} to {format_bytes(_LARGEST_BYTES)}. Pass memory='4GiB'."
        )
    capability = _OLDEST_SUPPORTED if compute_capability is None else _parse_capability(compute_capability)
    assumed = "; compute capability: assumed" if compute_capability is None else ""
    context_bytes, context_source = _typical_context(capability)
    return Gpu(
        name=f"custom {format_bytes(memory_bytes)}" if name is None else name,
        memory_bytes=memory_bytes,
        usable_bytes=memory_bytes,
        context_bytes=context_bytes,
        compute_capability=capability,
        source=f"given{assumed}; context: {context_source}",
    )


def _parse_capability(value: str | float | tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, tuple):
        text = ".".join(str(part) for part in value)
    else:
        text = f"{value}.0" if type(value) is int else str(value)
    match = re.fullmatch(r"([3-9]|1\d)\.(\d)", text, flags=re.ASCII)
    if match is None:
        raise ValueError(
            f"compute_capability={value!r} is not a compute capability; expected major.minor as in {CAPABILITIES}. "
            "Pass compute_capability='7.5'."
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
    same = [gpu for gpu in _candidates(name) if _is_size_of(gpu, total_bytes)]
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
