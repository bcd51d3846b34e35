"""Card facts: what of a card decides whether a training step fits, by name, each figure with its source.

Sizes are those of Linux: Windows reports the whole memory as usable and takes its share at run time. Newer drivers keep
more for themselves (a T4 went from 14.75 to 14.56 GiB), so where several figures were found the newest stands here.

``usable_bytes`` is what torch calls a card's total capacity. ``context_bytes`` is what a process holds on the card
beside torch's allocator: the CUDA context, the kernels loaded so far, handles and workspaces of cuBLAS and cuDNN. It
comes from out-of-memory messages of torch 2.1 and newer, which tell the memory of the process (by NVML) and what of it
torch has allocated and reserved; the context is the difference, within 0.02 GiB. It grows with the card: 115 MiB on an
RTX 4060, 495 MiB on an RTX 4090.

``multiprocessors`` is a card's number of CUDA cores over those of a multiprocessor, which are 64 on compute capability
6.0, 7.0, 7.5 and 8.0, and 128 on 8.6, 8.9, 9.0 and 12.0 (CUDA C++ Programming Guide, the architecture of each compute
capability). Where a name stands for several forms of a card it is the largest in a server (the H100 for SXM; the one
for PCIe has 114) and that of a desktop computer elsewhere (the GTX 1650; a mobile one has 16).

Where nothing was found for a card, its context is the median of the cards of its compute capability, and its usable
share the median of the cards nearest in size; its ``source`` then says "derived".

Left out: rates of arithmetic, and cards that are no NVIDIA cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median_low
from types import MappingProxyType
from typing import NamedTuple

from hf_memopt.errors import did_you_mean
from hf_memopt.units import format_bytes, parse_bytes

__all__ = ["GPUS", "Gpu", "custom_gpu", "find_gpu", "gpu_at_hand"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card: what of it decides whether a training step fits.

    Attributes:
        name: of the table, or as the driver or the user calls it.
        memory_bytes: what it is sold with; for the card at hand, if it is in no table, what the driver gives.
        usable_bytes: what all processes together can get of it, contexts included.
        context_bytes: what a process holds beside torch's allocator; None where nobody told.
        compute_capability: NVIDIA's, as (major, minor).
        source: where the figures come from.
        bandwidth_bytes_per_second: of its memory, by its specification; None where that is unknown.
        multiprocessors: how many it has; kernels split their work by it, and so the buffers for partial results grow
            with it. None where that is unknown.
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


_CAPABILITIES = "https://developer.nvidia.com/cuda-gpus"


class _Card(NamedTuple):
    """A card as it was found; ``usable`` and ``context`` with their source, ``also`` for words its name may have."""

    name: str
    memory: str
    capability: tuple[int, int]
    bandwidth: str  # per second
    cores: int
    specification: str
    usable: tuple[str, str] | None = None
    context: tuple[str, str] | None = None
    also: str = ""
    capability_list: str = _CAPABILITIES
    cores_list: str = ""  # the specification, if empty


_LEGACY = "https://developer.nvidia.com/cuda-legacy-gpus"
_TURING = "https://cvw.cac.cornell.edu/gpu-architecture/gpu-characteristics/computecap"  # NVIDIA's list has no GTX 1660
_GITHUB = "https://github.com/"
_GEFORCE = _GITHUB + "CYBIRD-D/How-to-Choose-your-LLM-Model-for-translation/blob/main/Nvidia_GPU_Specification.md"
_OLD_GEFORCE = "https://gist.github.com/vassvik/300a9b921f69a58ff2f422ae8f010c43"
_DATA_CENTER = "https://huggingface.co/RajBhope/gpu-runtime-predictor/blob/main/gpu_catalog.json"
_CLOUD = "https://huggingface.co/spaces/Elfsong/gcp_allocator/commit/3a1a5af88c8fd7c36675800b52069eaf40fed2b4"
_PASCAL = (
    "https://www.techrival.com/nvidia-volta-tesla-v100-cards-detailed-150w-single-slot-300w-dual-slot-gv100-powered-"
    "pcie-accelerators/"
)
_LLM_BOOK = "http://llmbook.apartsin.com/appendices/appendix-g-hardware-compute/section-g.1.html"

# fmt: off
_CARDS = (
    # Pascal and Volta
    _Card("P100", "16GiB", (6, 0), "732GB", 3584,
          _GITHUB + "fredlas/optimize_llamacpp_ngl/blob/main/optimize_llamacpp_ngl.py",
          usable=("16280MiB", _GITHUB + "karpathy/minGPT/issues/1"), capability_list=_LEGACY,
          cores_list=_PASCAL),
    _Card("V100 16GB", "16GiB", (7, 0), "900GB", 5120, _DATA_CENTER,
          usable=("15.78GiB", _GITHUB + "kchengiva/Shift-GCN/issues/34"), capability_list=_LEGACY),
    _Card("V100 32GB", "32GiB", (7, 0), "900GB", 5120, _DATA_CENTER,
          usable=("31.74GiB", _GITHUB + "QwenAudio/SenseVoice/issues/28"),
          context=("980MiB", _GITHUB + "QwenAudio/SenseVoice/issues/28"), capability_list=_LEGACY),
    # Turing
    _Card("GTX 1650", "4GiB", (7, 5), "128GB", 896, _OLD_GEFORCE,
          usable=("3.81GiB", _GITHUB + "ultralytics/yolov5/issues/285"), capability_list=_TURING,
          cores_list="https://pcpartdb.com/gpus/compare/nvidia-geforce-gtx-1650--vs--nvidia-geforce-rtx-2060"),
    _Card("GTX 1660 Ti", "6GiB", (7, 5), "288GB", 1536, _OLD_GEFORCE,
          usable=("5.81GiB", _GITHUB + "zhou13/lcnn/issues/23"), capability_list=_TURING,
          cores_list=_GITHUB + "Dr-Noob/gpufetch/issues/10"),
    _Card("RTX 2060", "6GiB", (7, 5), "336GB", 1920, _OLD_GEFORCE,
          usable=("5.79GiB", _GITHUB + "facebookresearch/meshrcnn/issues/92"),
          cores_list="https://technical.city/en/video/GeForce-RTX-2060-vs-GeForce-GTX-1650-GDDR6"),
    _Card("RTX 2080 Ti", "11GiB", (7, 5), "616GB", 4352, _OLD_GEFORCE,
          usable=("10.76GiB", _GITHUB + "JDAI-CV/image-captioning/issues/11"),
          cores_list="https://gist.github.com/sagnitude/c32a204dc698639e1ef54ad260f53449"),
    _Card("T4", "16GiB", (7, 5), "320GB", 2560, _DATA_CENTER,
          usable=("14.56GiB", _GITHUB + "Zheng-Chong/CatVTON/issues/133"),
          context=("135MiB", _GITHUB + "Zheng-Chong/CatVTON/issues/133")),
    # Ampere
    _Card("RTX 3050 4GB", "4GiB", (8, 6), "192GB", 2048, _GEFORCE, also="laptop",
          usable=("3.81GiB", _GITHUB + "NVlabs/RVT/issues/7")),
    _Card("RTX 3050 6GB", "6GiB", (8, 6), "168GB", 2304, _GEFORCE),
    _Card("RTX 3050 8GB", "8GiB", (8, 6), "224GB", 2560, _GEFORCE),
    _Card("RTX 3060 Laptop 6GB", "6GiB", (8, 6), "336GB", 3840, _GEFORCE,
          usable=("5.80GiB", _GITHUB + "JiehongLin/SAM-6D/issues/13")),
    _Card("RTX 3060 12GB", "12GiB", (8, 6), "360GB", 3584, _GEFORCE,
          usable=("11.75GiB", _GITHUB + "Kunhao-Liu/StyleGaussian/issues/12")),
    _Card("RTX 3070", "8GiB", (8, 6), "448GB", 5888, _GEFORCE,
          usable=("7.78GiB", _GITHUB + "akshitac8/OW-DETR/issues/46"),
          context=("179MiB", _GITHUB + "meta-llama/codellama/issues/82")),
    _Card("RTX 3080", "10GiB", (8, 6), "760GB", 8704, _GEFORCE,
          usable=("9.78GiB", _GITHUB + "zai-org/CogVideo/issues/34")),
    _Card("RTX 3090", "24GiB", (8, 6), "936GB", 10496, _GEFORCE,
          usable=("23.56GiB", _GITHUB + "noonghunna/club-3090/issues/58"),
          context=("450MiB", _GITHUB + "vllm-project/vllm/issues/2140")),
    _Card("A10", "24GiB", (8, 6), "600GB", 9216, _DATA_CENTER,
          usable=("21.99GiB", _GITHUB + "zai-org/CogVLM/issues/236"),
          context=("224MiB", _GITHUB + "zai-org/CogVLM/issues/236"),
          cores_list="https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000"),
    _Card("A100 40GB", "40GiB", (8, 0), "1555GB", 6912, _DATA_CENTER,
          usable=("40339MiB", _GITHUB + "bottlerocket-os/bottlerocket/pull/3873"),
          context=("501MiB", _GITHUB + "TianheWu/CoSeR/issues/10")),
    _Card("A100 80GB", "80GiB", (8, 0), "2039GB", 6912,
          _GITHUB + "huataihuang/cloud-atlas/blob/master/source/machine_learning/hardware/nvidia_gpu/nvidia_a100.rst",
          usable=("79.25GiB", _GITHUB + "HiDream-ai/VAREdit/issues/6"),
          context=("409MiB", _GITHUB + "HiDream-ai/VAREdit/issues/6"),
          cores_list="https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122"),
    # Ada Lovelace
    _Card("RTX 4050 Laptop", "6GiB", (8, 9), "192GB", 2560, _GEFORCE),
    _Card("RTX 4060", "8GiB", (8, 9), "272GB", 3072, _GEFORCE,
          usable=("7.75GiB", _GITHUB + "ESRSchao/EdgeRegNet/issues/2"),
          context=("115MiB", _GITHUB + "ESRSchao/EdgeRegNet/issues/2")),
    _Card("RTX 4060 Ti 16GB", "16GiB", (8, 9), "288GB", 4352, _GEFORCE,
          usable=("15.55GiB", _GITHUB + "boson-ai/higgs-audio/issues/48"),
          context=("256MiB", _GITHUB + "boson-ai/higgs-audio/issues/48")),
    _Card("RTX 4070", "12GiB", (8, 9), "504GB", 5888, _GEFORCE),
    _Card("RTX 4080", "16GiB", (8, 9), "716.8GB", 9728, _GEFORCE,
          usable=("16076MiB", _GITHUB + "ollama/ollama/issues/9245")),
    _Card("RTX 4090", "24GiB", (8, 9), "1008GB", 16384, _GEFORCE,
          usable=("23.49GiB", _GITHUB + "Sautenich/UAV-VLA/issues/7"),
          context=("495MiB", _GITHUB + "pytorch/torchchat/issues/1341")),
    _Card("L4", "24GiB", (8, 9), "300GB", 7424, _CLOUD,
          usable=("22.03GiB", _GITHUB + "ArcInstitute/evo2/issues/190"),
          context=("236MiB", _GITHUB + "ArcInstitute/evo2/issues/190"),
          cores_list=_GITHUB + "bottlerocket-os/bottlerocket-kernel-kit/pull/139"),
    _Card("L40S", "48GiB", (8, 9), "864GB", 18176, _LLM_BOOK,
          usable=("44.52GiB", _GITHUB + "huggingface/sentence-transformers/issues/3214"),
          context=("514MiB", _GITHUB + "huggingface/sentence-transformers/issues/3214"),
          cores_list="https://hmc-tech.com/gpu/nvidia-l40s-vs-nvidia-t40"),
    # Hopper
    _Card("H100", "80GiB", (9, 0), "3350GB", 16896, _LLM_BOOK,
          usable=("79.11GiB", _GITHUB + "vllm-project/vllm/issues/27508"),
          context=("676MiB", _GITHUB + "ali-vilab/VACE/issues/56 (H100 NVL)"),
          cores_list="https://glennklockwood.com/garden/processors/h100"),
    _Card("H200", "141GiB", (9, 0), "4800GB", 16896, _LLM_BOOK,
          cores_list="https://hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200"),
    # Blackwell
    _Card("RTX 5090", "32GiB", (12, 0), "1792GB", 21760, _GEFORCE,
          usable=("31.36GiB", _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20"),
          context=("619MiB", _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20")),
)
# fmt: on


def _typical_context(capability: tuple[int, int]) -> tuple[int | None, str]:
    """Return the median context of the cards of a compute capability whose context was found, and the words for it."""
    found = [parse_bytes(card.context[0]) for card in _CARDS if card.context and card.capability == capability]
    if not found:
        return None, "unknown"
    return median_low(found), "derived from the cards of compute capability {}.{}".format(*capability)


def _typical_usable(memory_bytes: int) -> int:
    """Return what of a card's memory is usable, by the median share of the cards nearest in size."""
    found = [(parse_bytes(card.memory), parse_bytes(card.usable[0])) for card in _CARDS if card.usable]
    nearest_size = min((memory for memory, _ in found), key=lambda memory: abs(memory - memory_bytes))
    share = median_low([Fraction(usable, memory) for memory, usable in found if memory == nearest_size])
    return int(memory_bytes * share)


def _row(card: _Card) -> Gpu:
    memory_bytes = parse_bytes(card.memory)
    usable_bytes, usable_source = _typical_usable(memory_bytes), "derived from the cards nearest in size"
    if card.usable:
        usable_bytes, usable_source = parse_bytes(card.usable[0]), card.usable[1]
    context_bytes, context_source = _typical_context(card.capability)
    if card.context:
        context_bytes, context_source = parse_bytes(card.context[0]), card.context[1]
    cores_of_one = 64 if card.capability <= (8, 0) else 128  # 6.1 has 128, and no card of the table has 6.1
    return Gpu(
        name=card.name,
        memory_bytes=memory_bytes,
        usable_bytes=usable_bytes,
        context_bytes=context_bytes,
        compute_capability=card.capability,
        source=(
            f"usable memory: {usable_source}; context: {context_source}; "
            f"size and bandwidth: {card.specification}; "
            f"multiprocessors: {card.cores} cores, {cores_of_one} in each, {card.cores_list or card.specification}; "
            f"compute capability: {card.capability_list}"
        ),
        bandwidth_bytes_per_second=parse_bytes(card.bandwidth),
        multiprocessors=card.cores // cores_of_one,
    )


GPUS: Mapping[str, Gpu] = MappingProxyType({card.name: _row(card) for card in _CARDS})
"""The cards that are known by name."""


# ---- by name

_MAKERS = {
    *("nvidia", "geforce", "tesla", "gpu", "card", "graphics"),
    *("pcie", "sxm", "sxm2", "sxm4", "sxm5", "hbm2", "hbm3"),
}
_FAMILIES = {"gtx", "rtx"}


def _words(name: str) -> frozenset[str]:
    """Return what of a card's name tells cards apart, in one spelling: ``{"rtx", "3060", "laptop", "6gb"}``."""
    text = re.sub(r"[-_/,()]", " ", name.lower())
    text = re.sub(r"\b(\d+)\s*gi?b\b", r"\1gb", text)
    text = re.sub(r"\b([gr]tx)(?=\d)", r"\1 ", text)
    text = re.sub(r"\b(\d{4})(?=(ti|super)\b)", r"\1 ", text)
    return frozenset("laptop" if word == "mobile" else word for word in text.split()) - _MAKERS


def _model(words: frozenset[str]) -> frozenset[str]:
    """Return the words of a name that may not be left out: all but family, size and ``laptop``."""
    return frozenset(word for word in words - _FAMILIES - {"laptop"} if not re.fullmatch(r"\d+gb", word))


_WORDS = {card.name: _words(f"{card.name} {card.memory} {card.also}") for card in _CARDS}


def _candidates(name: str) -> list[Gpu]:
    """Return the cards of the table that a name may mean."""
    words = _words(name)
    return [GPUS[known] for known, all_of in _WORDS.items() if words <= all_of and _model(words) == _model(all_of)]


def find_gpu(gpu: str | Gpu) -> Gpu:
    """Return the facts of a card by its name, in any usual spelling; a ``Gpu`` is returned as it is.

    Case, spaces, dashes, the maker ("NVIDIA", "GeForce", "Tesla") and the form ("PCIe", "SXM4") do not count. Size and
    "Laptop" may be left out where no two cards of the table differ in them alone.

    Raises:
        ValueError: no such card in the table, or several; the message lists them.

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
        names = [card.name for card in found]
        raise ValueError(
            f"gpu={gpu!r} is more than one card; expected one of: {', '.join(names)}. Pass gpu={names[0]!r}."
        )
    raise ValueError(
        f"gpu={gpu!r} is not a card of the table; expected one of: {', '.join(GPUS)}.{did_you_mean(str(gpu), GPUS)} "
        "Pass gpu=custom_gpu('4GiB', compute_capability='7.5'), or --gpu-memory 4GiB --compute-capability 7.5."
    )


# ---- by size

_SMALLEST_BYTES = 2**20
_LARGEST_BYTES = 2**50  # the simulation's sizes have 63 bits
_OLDEST_SUPPORTED = (7, 5)  # by CUDA 13


def custom_gpu(
    memory: int | str, compute_capability: str | float | tuple[int, int] | None = None, name: str | None = None
) -> Gpu:
    """Return a card that is in no table.

    Args:
        memory: what a process can get of it: bytes, or text such as ``"4GiB"``. All of it counts as usable.
        compute_capability: ``"8.6"``, ``8.6`` or ``(8, 6)``; None for 7.5, the oldest that CUDA 13 supports.
        name: None for its size.

    Raises:
        ValueError: ``memory`` is no amount of memory, below 1 MiB or above 1 PiB; ``compute_capability`` is none.

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
            f"memory={memory!r} is too {'little' if memory_bytes < _SMALLEST_BYTES else 'much'} for a card; expected "
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
            f"compute_capability={value!r} is no compute capability; expected major.minor as in {_CAPABILITIES}. "
            "Pass compute_capability='7.5'."
        )
    return int(match.group(1)), int(match.group(2))


# ---- at hand


def gpu_at_hand() -> Gpu | None:
    """Return the CUDA card of this process (its current device), or None without one; makes no CUDA context.

    Its size, compute capability and multiprocessors are the driver's. Its context is measured where this process has
    one already and NVML tells (``memory_reading.read_context``); where that is less than the table's, which is of
    processes in mid-training, the table's counts: a process that has not trained yet will hold more. The rest comes
    from the row of the table with its name and size; for a card that is in no table, a context that is not measured
    comes from the cards of its compute capability.
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
    card = _described(reading.device_name, reading.device_total_bytes, (properties.major, properties.minor))
    card = replace(card, multiprocessors=properties.multi_processor_count)
    context_bytes = read_context(torch.device(reading.device))
    if context_bytes is None or context_bytes < (card.context_bytes or 0):
        return card
    return replace(card, context_bytes=context_bytes, source=f"context: measured on this machine; else {card.source}")


def _described(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return the card that a driver describes so: with the rest from its row of the table, if it has one."""
    same = [card for card in _candidates(name) if _is_size_of(card, total_bytes)]
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


def _is_size_of(card: Gpu, total_bytes: int) -> bool:
    """Whether a driver may report ``total_bytes`` for the card; the ones that were seen keep up to 9 % of it."""
    return card.memory_bytes * 85 <= total_bytes * 100 <= card.memory_bytes * 100
