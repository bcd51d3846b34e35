"""GPUs by name, by size, and the one in this machine; the figures of those known by name are in ``gpu_table``."""

from __future__ import annotations

import difflib
import platform
import re
from dataclasses import replace

from hf_memopt.devices.gpu_table import GIB, GPUS, NAMES, Gpu, PeakRates, typical_context
from hf_memopt.plain_data import check_value, shown
from hf_memopt.units import format_bytes, parse_bytes

__all__ = ["GPUS", "Gpu", "PeakRates", "current_gpu", "current_os", "custom_gpu", "find_gpu"]

CAPABILITIES = "https://developer.nvidia.com/cuda-gpus"


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


_WHOLE_NAMES = {_whole(name): row for row, name in NAMES}
_WORDS = [(row, _words(f"{name} {GPUS[row].memory_bytes // GIB}GB")) for row, name in NAMES]


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
    (``custom_gpu``), of which as much is usable as of the GPU of the table that has least of that size.

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
        return _of_size(_gpu_bytes("gpu", gpu))
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
    context_bytes, context_source = typical_context(capability)
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


def _of_size(memory_bytes: int) -> Gpu:
    """Return a GPU that is sold with so much, with the least that is usable of those in the table."""
    same = [known.usable_bytes for known in GPUS.values() if known.memory_bytes == memory_bytes]
    gpu = custom_gpu(memory_bytes)
    told = f"{format_bytes(min(same, default=0))} usable, the least of the table's"
    notes = tuple(note.replace(f"all of {format_bytes(memory_bytes)} usable", told) for note in gpu.notes)
    return replace(gpu, usable_bytes=min(same), notes=notes) if same else gpu


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


def current_os() -> str:
    """Return "windows", "wsl", or "linux", which stands for every other system too."""
    if platform.system() == "Windows":
        return "windows"
    return "wsl" if "microsoft" in platform.release().lower() else "linux"  # of the kernel of WSL 1 and 2


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
    from hf_memopt.devices.readings import read_context, read_memory

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
    context_bytes, context_source = typical_context(capability)
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
