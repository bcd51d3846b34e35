"""The GPUs that are known by name, and what decides whether a training step fits one of them.

The figures are in ``gpus.csv``, each with its source; an empty field was not found. Where nothing was found for a GPU,
its context is the median of the GPUs of its compute capability, or of the nearest one, and its usable share the median
of those nearest in size, GeForce apart from others; its ``source`` then says "derived". Sizes are those of Linux:
Windows reports the whole memory as usable and takes its share at run time. Newer drivers keep more for themselves (a T4
went from 14.75 to 14.56 GiB), so the newest of several figures is listed.

- ``memory_gib`` is what the GPU is sold with, ``usable`` what torch calls its total capacity. ``alias`` is a further
  name, the driver's, that means this GPU although it lacks the size. ``usual`` marks the one that a name without a
  size means, and says why: the one that was sold first (by the dates of the pages), or the smaller of two of one year.
- ``context`` is what a process holds on the GPU besides torch's allocator: the CUDA context, the kernels loaded so far,
  handles and workspaces of cuBLAS and cuDNN. It comes from out-of-memory messages of torch 2.1 and newer, which name
  the memory of the process (by NVML) and what torch has allocated and reserved; the context is the difference, within
  0.02 GiB. It grows with the GPU: 115 MiB on an RTX 4060, 495 MiB on an RTX 4090.
- ``multiprocessors``, boost clock and bandwidth are those of the GPU's page at TechPowerUp, or NVIDIA's and AMD's own
  where the page has others (A10G, L4, RTX 2000 Ada, A100 40GB, V100, H200, B200, Instinct). A laptop's clock depends
  on the power that its maker allows: the figure is that of the reference design, and the same name can be a third
  slower or faster. Where a name covers several forms, it is the fastest in a server (a V100 or A100 for SXM).
  ``matrix_mhz`` is the clock of matrix products where it is another one.
- ``sustained_mhz`` is what the power limit leaves of the clock in a long row of matrix products, where somebody
  measured it: the clock at which 0.77 of the rate (``HALF_FRACTION`` of ``memory/step_time``) is what was measured. A
  T4 of 70 W gave 24 of its 65 TFLOPS in 100 products of 4096 x 4096, which NVIDIA's answer calls power capping. Empty
  where no such figure was found; other GPUs of at most 75 W and laptops may keep less than their boost clock too.
- Rates follow from the design, ``architectures.csv``: operations of one multiprocessor in one clock (a multiplication
  and its addition are two), times multiprocessors, times clock. They are those of dense matrix products that accumulate
  in float32, as training does: GeForce runs these at half its advertised rate, Quadro, RTX A and data center GPUs do
  not. Pascal and the GTX 16 series have no tensor cores: products of fp16 operands run at the rate of float32 on
  Pascal; what they reach on the GTX 16 series is not published.
- ``pcie`` is the bus interface of the same page: generation and lanes. The chips of smaller cards and laptops have
  eight (GA107, AD106, AD107, GB206, GB207), and a computer may offer fewer or an older generation.

Limitations: of AMD only the Instinct series, where a process sees one half of an MI250 or MI250X as its GPU; their
kernels are not simulated, those of compute capability 8.0 stand in for them. Rates that no published table confirms are
None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median_low
from typing import Any

from hf_memopt.plain_data import FixedMapping, packaged_rows
from hf_memopt.units import parse_bytes

GIB = 2**30
PAGES = "https://www.techpowerup.com/gpu-specs/"
STANDS_IN = "kernels and workspaces of compute capability 8.0 stand in for those of ROCm"


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
        sustained_fraction: the share of the rates that it keeps under a long load; 1 where no power limit is known to
            bind.
        pcie: generation and lanes of its bus; None where they are unknown.
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
    sustained_fraction: float = 1.0
    pcie: tuple[int, int] | None = None

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
    def bus(self) -> tuple[int, int]:
        """Generation and lanes of its own bus; 16 lanes where they are unknown."""
        return self.pcie or (self.pcie_generation, 16)

    @property
    def bus_bytes_per_second(self) -> int:
        """Of its own lanes in one direction, which copies of streamed layers are counted with."""
        generation, lanes = self.bus
        return (lanes << (generation - 3)) * 10**9


_ROWS = packaged_rows("hf_memopt.training.devices", "gpus.csv")
_OVERFLOWING = {row["name"]: row for row in packaged_rows("hf_memopt.training.devices", "float16_overflow.csv")}
_DESIGNS = {row["name"]: row for row in packaged_rows("hf_memopt.training.devices", "architectures.csv")}


def _capability(row: Mapping[str, str]) -> tuple[int, int]:
    major, minor = _DESIGNS[row["architecture"]]["compute_capability"].split(".")
    return int(major), int(minor)


def _is_amd(row: Mapping[str, str]) -> bool:
    return _DESIGNS[row["architecture"]]["maker"] == "AMD"


def typical_context(capability: tuple[int, int]) -> tuple[int, str]:
    """Return the median context of the GPUs of a compute capability, or the nearest, and the words for its source."""
    known = [(_capability(row), parse_bytes(row["context"])) for row in _ROWS if row["context"]]
    major, minor = min((own for own, _ in known), key=lambda own: abs(_number(own) - _number(capability)))
    other = "" if (major, minor) == capability else ", the nearest that is known"
    context_bytes = median_low(context for own, context in known if own == (major, minor))
    return context_bytes, f"derived from the GPUs of compute capability {major}.{minor}{other}"


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def against_float16(gpu_name: str = "", config: Any = None) -> str:
    """Return why a GPU or a model, or the language model in it, should not compute in float16, with a source; or ""."""
    inside = getattr(config, "get_text_config", lambda: None)()
    names = (getattr(config, "model_type", ""), getattr(inside, "model_type", ""), "GTX 16" * ("GTX 16" in gpu_name))
    row = next((_OVERFLOWING[name] for name in names if name in _OVERFLOWING), None)
    return "" if row is None else f"{row['name']} is unsafe in float16: {row['what']} ({row['source']})"


def _is_geforce(row: Mapping[str, str]) -> bool:
    """Return whether a GPU is one without error correction, for which others keep up to 9 % of their memory."""
    return row["page"].startswith(("geforce", "titan"))


def _typical_usable(row: Mapping[str, str]) -> int:
    """Return how much of a GPU's memory is usable, by the median share of its maker's GPUs nearest in size.

    Of these GeForce has it from GeForce and others from others, where both have that size.
    """
    memory_gib, is_geforce = int(row["memory_gib"]), _is_geforce(row)
    known = [one for one in _ROWS if one["usable"] and _is_amd(one) == _is_amd(row)]
    nearest = min((int(one["memory_gib"]) for one in known), key=lambda gib: abs(gib - memory_gib))
    same = [one for one in known if int(one["memory_gib"]) == nearest]
    alike = [one for one in same if _is_geforce(one) == is_geforce] or same
    return memory_gib * median_low(parse_bytes(one["usable"]) for one in alike) // nearest


def _peak_rates(row: Mapping[str, str]) -> PeakRates:
    """Return operations per clock of all multiprocessors times the clock that a specification counts with."""
    design, multiprocessors = _DESIGNS[row["architecture"]], int(row["multiprocessors"])
    matrix_hz, boost_hz = (int(mhz) * 10**6 for mhz in (row["matrix_mhz"] or row["boost_mhz"], row["boost_mhz"]))
    clocks = {"fp32": boost_hz, "tf32": matrix_hz, "fp16": matrix_hz, "bf16": matrix_hz}
    known = {name: hz for name, hz in clocks.items() if design[name]}
    return PeakRates(**{name: int(design[name]) * multiprocessors * hz for name, hz in known.items()})


def _gpu(row: Mapping[str, str]) -> Gpu:
    name, memory_gib, design = row["name"], int(row["memory_gib"]), _DESIGNS[row["architecture"]]
    usable_bytes, usable_source = _typical_usable(row), "derived from the GPUs nearest in size"
    if row["usable"]:
        usable_bytes, usable_source = parse_bytes(row["usable"]), row["usable_source"]
    context_bytes: int | None
    context_bytes, context_source = (None, "unknown") if _is_amd(row) else typical_context(_capability(row))
    generation, lanes = map(int, row["pcie"].split(".0 x"))
    if row["context"]:
        context_bytes, context_source = parse_bytes(row["context"]), row["context_source"]
    return Gpu(
        name=name,
        memory_bytes=memory_gib * GIB,
        usable_bytes=usable_bytes,
        context_bytes=context_bytes,
        compute_capability=_capability(row),
        source=(
            f"usable memory: {usable_source}; context: {context_source}; "
            f"size, bandwidth, bus, multiprocessors and clock: {PAGES}{row['page']}; "
            f"operations per clock: {design['operations_source']}; "
            + (f"clock under a long load: {row['sustained_source']}; " if row["sustained_mhz"] else "")
            + f"compute capability: {design['capability_source']}"
        ),
        bandwidth_bytes_per_second=round(float(row["bandwidth_gb"]) * 10**9),
        multiprocessors=int(row["multiprocessors"]),
        peak_flops_per_second=_peak_rates(row),
        notes=(f"{name} is an AMD GPU: {STANDS_IN}",) if _is_amd(row) else (),
        sustained_fraction=int(row["sustained_mhz"] or row["boost_mhz"]) / int(row["boost_mhz"]),
        pcie=(generation, lanes),
    )


GPUS: Mapping[str, Gpu] = FixedMapping({row["name"]: _gpu(row) for row in _ROWS})
"""The GPUs that are known by name."""

NAMES = [(row["name"], name) for row in _ROWS for name in (row["name"], row["alias"]) if name]
"""Each name of a GPU in the table, after the name of its row."""

USUAL = {row["name"]: row["usual"] for row in _ROWS if row["usual"]}
"""Of several GPUs of one name and design the one that is meant without a size, and why."""


# ---- chips

_MOST_ELSEWHERE = {  # of capabilities that no GPU of the table has
    (5, 0): 5,  # GTX 750 Ti, 640 cores: https://github.com/PointCloudLibrary/pcl/issues/880
    (5, 2): 24,  # Titan X, report: https://github.com/gpgpu-sim/gpgpu-sim_distribution/issues/169
    (8, 7): 16,  # Jetson AGX Orin, report: https://github.com/tmcdonell/cuda/issues/77
}


@cache
def _most_multiprocessors(capability: tuple[int, int]) -> int:
    """Return the multiprocessors of the largest GPU of a compute capability; of all GPUs where none is known."""
    known = [(int(row["multiprocessors"]), _capability(row)) for row in _ROWS if not _is_amd(row)]
    largest = max(known)[0]
    return max((count for count, own in known if own == capability), default=_MOST_ELSEWHERE.get(capability, largest))


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a GPU by which kernels split their work; a ``Gpu`` has more, and may lack the count."""

    capability: tuple[int, int]
    multiprocessors: int

    @classmethod
    def of(cls, capability: tuple[int, int], multiprocessors: int | None = None) -> Chip:
        """Return a chip; without a count, the largest of its capability, or of all if that one is unknown."""
        return cls(capability, _most_multiprocessors(capability) if multiprocessors is None else multiprocessors)

    @property
    def threads_per_multiprocessor(self) -> int:
        """The number of threads that may be resident on a multiprocessor.

        Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; torch's own copy,
        torch/headeronly/macros/Macros.h, ``CUDA_MAX_THREADS_PER_SM``, has no 11.0 and no 12.1.
        """
        if self.capability == (7, 5):
            return 1024
        fewer = self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability[0] in (11, 12)
        return 1536 if fewer else 2048

    @property
    def wide_shared_memory(self) -> bool:
        """Whether tiles of 128 queries fit a block's shared memory in memory-efficient attention.

        Assumed of the chips whose blocks may have 96 KB (7.0, 7.2), 163 KB (8.0, 8.7) or 227 KB (9.0, 10.x), and not of
        those with 64 KB (7.5) or 99 KB (8.6, 8.9, 12.x): generate_kernels.py names 7.5 and 8.6 as too small. torch
        compares the size of the kernel's own struct, which only a compiler knows.

        Source: CUDA C++ Programming Guide, the same table (older editions for 7.x); generate_kernels.py.
        """
        return self.capability in ((7, 0), (7, 2), (8, 0), (8, 7)) or self.capability[0] in (9, 10)
