"""GPUs by name, by size, and the one in this machine; the figures of those known by name are in ``gpu_table``."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable
from ctypes import CDLL
from dataclasses import replace

from hf_memopt.errors import nearest
from hf_memopt.notices import quoted
from hf_memopt.plain_data import check_value, packaged_rows, shown
from hf_memopt.training.devices.gpu_table import GIB, GPUS, NAMES, USUAL, Gpu, PeakRates, typical_context
from hf_memopt.units import format_bytes, parse_bytes

__all__ = ["GPUS", "Gpu", "PeakRates", "current_gpu", "current_os", "custom_gpu", "find_gpu"]

CAPABILITIES = "https://developer.nvidia.com/cuda-gpus"


# ---- by name

_NOISE = {
    *("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "gpu", "card", "graphics", "oam", "vf"),
    *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"),
    *("pascal", "blackwell", "generation", "workstation", "server", "edition", "max", "q"),
    *("colab", "kaggle", "google", "aws", "gcp", "azure", "runpod", "cloud"),
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


# a number alone is no size, but a message says so; 0 is a device
_SIZE = re.compile(r"\s*(?!0\s*$)[0-9]+(\.[0-9]+)?\s*([mg](i?b)?)?\s*", flags=re.IGNORECASE | re.ASCII)
_SEVERAL = re.compile(
    r"\s*(?:(\d\d?)\s*[x*][\s-]*)?(.+?)(?:[\s-]*[x*]\s*(\d\d?))?\s*", re.IGNORECASE | re.DOTALL
)  # "2x T4", "T4 x2"
_OF_OTHERS = re.compile(r"\s*(apple|mps|m[1-9]|intel|arc)\b|.*\b(radeon|rx)\b", flags=re.IGNORECASE)


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
    """Return the one GPU that a name means: by its whole name, else the only or the usual one, not of a laptop."""
    for gpu in found:
        if _WHOLE_NAMES.get(_whole(name)) == gpu.name:
            return [gpu]
    desktop = [gpu for gpu in found if "laptop" not in _words(gpu.name)]
    meant = desktop if desktop and "laptop" not in _words(name) else found
    usual = meant if len(meant) == 1 else [gpu for gpu in meant if gpu.name in USUAL]
    return usual if len(usual) == 1 else found


def find_gpu(gpu: str | Gpu) -> Gpu:
    """Return a GPU of the table by its name, in any usual spelling; a ``Gpu`` is returned as it is.

    Case, spaces, dashes, the maker ("NVIDIA", "GeForce", "Tesla"), who lends it ("Colab", "Kaggle") and the form
    ("PCIe", "SXM4") are ignored, so that names may be those of ``nvidia-smi``. Size and "Laptop" may be omitted: a GPU
    of a desktop has priority, then the one that was sold first under the name; where others of that name have another
    size, its ``notes`` say so. An amount of memory such as ``"8GB"`` is a GPU of that size (``custom_gpu``),
    of which as much is usable as of the GPU of the table that has least of that size.

    Raises:
        ValueError: the table has no such GPU, several of different designs, or the name says how many there are.

    Examples:
        >>> find_gpu("NVIDIA GeForce RTX 4060 Laptop GPU").name, find_gpu("a100-sxm4-80gb").name
        ('RTX 4060 Laptop', 'A100 80GB')
        >>> find_gpu("8GB").name, find_gpu("RTX 3060").name
        ('custom 8.00 GiB', 'RTX 3060 12GB')
    """
    if isinstance(gpu, Gpu):
        return gpu
    of_name = _candidates(gpu) if isinstance(gpu, str) else []
    found = _narrowed(of_name, gpu) if of_name else []
    if len(found) == 1:
        return _noted(found[0], of_name, gpu)
    if found:
        names = [known.name for known in found]
        raise ValueError(
            f"gpu={gpu!r} matches several GPUs; expected one of: {', '.join(names)}. Pass gpu={names[0]!r}."
        )
    text = str(gpu) if isinstance(gpu, str | int) else ""
    if _SIZE.fullmatch(text) and not _candidates(_in_full(text)):
        return _of_size(_gpu_bytes("gpu", text))
    raise _unknown(gpu, text)


def _in_full(name: str) -> str:
    """Return a name with the "m" of a laptop's GPU in full: "4060m" as "4060 laptop"."""
    return re.sub(r"(?<=\d)\s*m\b", " laptop", name, flags=re.IGNORECASE)


def _noted(chosen: Gpu, of_name: Iterable[Gpu], name: str) -> Gpu:
    """Return the GPU with a note about those of another size that the same name may mean."""
    others = [_sized(gpu) for gpu in of_name if gpu.memory_bytes != chosen.memory_bytes]
    is_alias = _WHOLE_NAMES.get(_whole(name)) == chosen.name and _whole(name) != _whole(chosen.name)
    if not others or is_alias:  # which the driver gives to this size alone
        return chosen
    why = USUAL.get(chosen.name, "the one of a desktop")
    note = f"gpu={name!r} is taken as {_sized(chosen)}, {why}; others of that name: {', '.join(others)}"
    return replace(chosen, notes=(*chosen.notes, note))


def _sized(gpu: Gpu) -> str:
    return gpu.name if gpu.name.endswith("GB") else f"{gpu.name} ({gpu.memory_bytes // GIB} GB)"


def _unknown(gpu: object, text: str) -> ValueError:
    """Return the error for a name that is not in the table."""
    count, name, count_after = _SEVERAL.fullmatch(f" {text}").groups()  # type: ignore[union-attr]  # any text matches
    if (count or count_after) and _candidates(name):
        return ValueError(
            f"gpu={gpu!r} is the name of {count or count_after} GPUs; expected that of one. Pass gpu={name!r}, or "
            f"rehearse all: hf-memopt rehearse --gpus {count or count_after} --gpu {quoted(name)} train.py"
        )
    spelled = {_without_size(known): known for known in sorted(GPUS, key=lambda known: "Laptop" in known)}
    near = nearest(_without_size(text), spelled) if re.search(r"\d", text) else None
    of_name = _narrowed(_candidates(_in_full(text)), text)
    meant = of_name[0] if of_name else GPUS[spelled[near]] if near else None
    said, squashed = re.search(r"(\d+)\s*gi?b", text, re.IGNORECASE), re.sub(r"[\s_-]", "", text.lower())
    other = max((one for one in _OTHERS if re.search(rf"{one}(?!\d)", squashed)), key=len, default="")
    size = f"{said[1] if said else _OTHERS.get(other) or (meant.memory_bytes // GIB if meant else 8)}GB"
    if _OF_OTHERS.match(text):
        return ValueError(
            f"gpu={gpu!r} is a GPU of Apple, Intel or AMD's Radeon series, for which nothing is predicted; expected "
            f"one of NVIDIA or an Instinct. Pass the size of one with as much memory: gpu={size!r}"
        )
    if re.fullmatch(r"cpu|auto|cuda(:\d+)?|0", text, re.IGNORECASE):
        return ValueError(
            f"gpu={shown(gpu)} names a device, not a kind of GPU; expected a name such as 'RTX 3060 12GB', or a size. "
            "Leave it out to take the GPU of this machine"
        )
    question = f" Did you mean {meant.name!r}?" if meant else ""
    return ValueError(
        f"gpu={shown(gpu)} is not a GPU of the table; expected one of its {len(GPUS)} names, which hf-memopt gpus "
        f"lists, or a size.{question} Pass its size: gpu={size!r}"
    )


_OTHERS = {row["name"]: row["memory_gib"] for row in packaged_rows("hf_memopt.training.devices", "other_gpus.csv")}
"""GiB that GPUs outside the table are sold with at least, for messages alone."""


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
    in_gib = re.sub(r"(?i)(?<=[kmgt])(i?b)?\s*$", "iB", memory) if isinstance(memory, str) else memory
    try:
        memory_bytes = parse_bytes(in_gib, argument)
    except ValueError as error:
        raise ValueError(str(error).replace(shown(in_gib), shown(memory), 1)) from None
    if not _SMALLEST_BYTES <= memory_bytes <= _LARGEST_BYTES:
        raise ValueError(
            f"{argument}={memory!r} is too {'little' if memory_bytes < _SMALLEST_BYTES else 'much'} for a GPU; "
            f"expected {format_bytes(_SMALLEST_BYTES)} to {format_bytes(_LARGEST_BYTES)}. "
            f"Pass {argument}='{memory if isinstance(memory, int) and 0 < memory < 1024 else 4}GiB'."
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
    if "torch" not in sys.modules and not _has_driver():
        return None
    import torch

    # ROCm calls itself cuda, but its compute capabilities are not NVIDIA's.
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    from hf_memopt.training.devices.readings import read_context, read_memory

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


def _has_driver() -> bool:
    """Return whether CUDA's driver is installed, without which torch need not be imported to look for a GPU."""
    try:
        CDLL("nvcuda.dll" if current_os() == "windows" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _described(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return the GPU that a driver describes; the rest comes from the table, if it is there."""
    same = _narrowed([gpu for gpu in _candidates(name) if _is_size_of(gpu, total_bytes)], name)
    if len(same) == 1:
        source = f"usable memory and multiprocessors: this machine; else {same[0].source}"
        return replace(same[0], usable_bytes=total_bytes, source=source)
    gpu = custom_gpu(total_bytes, capability, name)
    return replace(gpu, source=gpu.source.replace("given", "this machine", 1))


def _is_size_of(gpu: Gpu, total_bytes: int) -> bool:
    """Return whether a driver may report ``total_bytes`` for the GPU; those that were seen keep up to 9 %."""
    return gpu.memory_bytes * 85 <= total_bytes * 100 <= gpu.memory_bytes * 100
