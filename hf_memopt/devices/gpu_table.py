"""The figures of GPUs, each with its source: the rows are in ``gpus.csv``.

Sizes are those of Linux: Windows reports the whole memory as usable and takes its share at run time. Newer drivers keep
more for themselves (a T4 went from 14.75 to 14.56 GiB), so the newest of several figures is listed.

- ``memory_gib`` is what the GPU is sold with, ``usable`` what torch calls its total capacity.
- ``context`` is what a process holds on the GPU besides torch's allocator: the CUDA context, the kernels loaded so far,
  handles and workspaces of cuBLAS and cuDNN. It comes from out-of-memory messages of torch 2.1 and newer, which name
  the memory of the process (by NVML) and what torch has allocated and reserved; the context is the difference, within
  0.02 GiB. It grows with the GPU: 115 MiB on an RTX 4060, 495 MiB on an RTX 4090.
- ``multiprocessors``, boost clock and bandwidth are those of the GPU's page at TechPowerUp, or NVIDIA's and AMD's own
  where the page has others (A10G, L4, RTX 2000 Ada, A100 40GB, V100, H200, B200, Instinct). A laptop's clock depends
  on the power that its maker allows: the figure is that of the reference design, and the same name can be a third
  slower or faster. Where a name covers several forms, it is the fastest in a server (a V100 or A100 for SXM).
- Rates follow from the architecture: operations of one multiprocessor in one clock (a multiplication and its addition
  are two), times multiprocessors, times boost clock. They are those of dense matrix products that accumulate in
  float32, as training does: GeForce runs these at half its advertised rate, Quadro, RTX A and data center GPUs do not.
- ``nvlink_gb`` is half of what the source of the architecture calls NVLink's total bandwidth, which counts both
  directions: of GPUs that sit on a board with NVLink in every server. All others reach each other by PCIe; bridges
  between two of them (RTX 3090, RTX A6000, A40, H100 NVL) are not counted, since few computers have one.

Limitations: of AMD only the Instinct series, where a process sees one half of an MI250 or MI250X as its GPU. Rates that
no published table confirms are None.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

__all__ = ["CAPABILITIES", "ROWS", "Architecture", "Row"]

CAPABILITIES = "https://developer.nvidia.com/cuda-gpus"
_LEGACY = "https://developer.nvidia.com/cuda-legacy-gpus"


class Architecture(NamedTuple):
    """What GPUs of one design share: operations of a multiprocessor in a clock, by the format of the operands."""

    capability: tuple[int, int]
    source: str
    fp32: int
    tf32: int | None = None
    fp16: int | None = None
    bf16: int | None = None
    capability_list: str = CAPABILITIES
    is_amd: bool = False


class Row(NamedTuple):
    """The figures of a GPU as they were found.

    ``usable`` and ``context`` come with their source; ``matrix_mhz`` is the clock of matrix products where it is
    another one; ``alias`` is a further name, the driver's, that means this GPU although it lacks the size.
    """

    name: str
    memory_gib: int
    architecture: Architecture
    multiprocessors: int
    boost_mhz: int
    bandwidth_gb: float  # 1e9 bytes per second
    page: str  # of TechPowerUp
    usable: tuple[str, str] | None = None
    context: tuple[str, str] | None = None
    alias: str = ""
    matrix_mhz: int | None = None
    nvlink_gb: int | None = None  # 1e9 bytes per second in one direction, by the architecture's source


_NVIDIA, _AMD = "https://images.nvidia.com/", "https://www.amd.com/content/dam/amd/en/documents/instinct-"
_GEFORCE = _NVIDIA + "aem-dam/Solutions/geforce/"
_PASCAL = _NVIDIA + "content/pdf/tesla/whitepaper/pascal-architecture-whitepaper.pdf"
_VOLTA = _NVIDIA + "content/volta-architecture/pdf/volta-architecture-whitepaper.pdf"
_TURING = (
    _NVIDIA + "aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_AMPERE_A100 = _NVIDIA + "aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = _GEFORCE + "ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = _GEFORCE + "blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_BLACKWELL_B200 = "https://resources.nvidia.com/en-us-blackwell-architecture"
_CDNA2 = _AMD + "business-docs/white-papers/amd-cdna2-white-paper.pdf"
_CDNA3 = _AMD + "tech-docs/white-papers/amd-cdna-3-white-paper.pdf"
_CDNA4 = _AMD + "tech-docs/white-papers/amd-cdna-4-architecture-whitepaper.pdf"
_NO_GTX_16 = "https://cvw.cac.cornell.edu/gpu-architecture/gpu-characteristics/computecap"  # as NVIDIA's list has none

# Pascal and the GTX 16 series have no tensor cores: products of fp16 operands that accumulate in float32 run at the
# rate of float32 on Pascal; what they reach on the GTX 16 series is not published.
GP100 = Architecture((6, 0), _PASCAL, 128, fp16=128, capability_list=_LEGACY)
GP10X = Architecture((6, 1), _PASCAL, 256, fp16=256, capability_list=_LEGACY)
GV100 = Architecture((7, 0), _VOLTA, 128, fp16=1024, capability_list=_LEGACY)
TU11X = Architecture((7, 5), _TURING, 128, capability_list=_NO_GTX_16)
TU10X = Architecture((7, 5), _TURING, 128, fp16=512)
TU10X_PRO = TU10X._replace(fp16=1024)
GA100 = Architecture((8, 0), _AMPERE_A100, 128, 1024, 2048, 2048)
GA10X = Architecture((8, 6), _AMPERE, 256, 256, 512, 512)
GA10X_PRO = Architecture((8, 6), _AMPERE, 256, 512, 1024, 1024)
GA10X_PRO_LAPTOP = Architecture((8, 6), _AMPERE, 256)
AD10X = Architecture((8, 9), _ADA, 256, 256, 512, 512)
AD10X_PRO = Architecture((8, 9), _ADA, 256, 512, 1024, 1024)
AD10X_PRO_LAPTOP = Architecture((8, 9), _ADA, 256)
GH100 = Architecture((9, 0), _HOPPER, 256, 2048, 4096, 4096)
GB100 = Architecture((10, 0), _BLACKWELL_B200, 256, 4096, 8192, 8192)
GB20X = Architecture((12, 0), _BLACKWELL, 256, 256, 512, 512)
GB20X_PRO = Architecture((12, 0), _BLACKWELL, 256, 512, 1024, 1024)
# Kernels of AMD's GPUs are not simulated: those of compute capability 8.0 stand in for them.
CDNA2 = Architecture((8, 0), _CDNA2, 256, None, 1024, 1024, is_amd=True)
CDNA3 = Architecture((8, 0), _CDNA3, 256, 1024, 2048, 2048, is_amd=True)
CDNA4 = Architecture((8, 0), _CDNA4, 256, None, 4096, 4096, is_amd=True)

ARCHITECTURES = {name: value for name, value in globals().items() if isinstance(value, Architecture)}


def _rows() -> Iterator[Row]:
    """Yield the rows of ``gpus.csv``, where an empty field is a figure that was not found."""
    text = resources.files("hf_memopt.devices").joinpath("gpus.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        bandwidth = float(row["bandwidth_gb"])
        yield Row(
            row["name"],
            int(row["memory_gib"]),
            ARCHITECTURES[row["architecture"]],
            int(row["multiprocessors"]),
            int(row["boost_mhz"]),
            int(bandwidth) if bandwidth.is_integer() else bandwidth,
            row["page"],
            (row["usable"], row["usable_source"]) if row["usable"] else None,
            (row["context"], row["context_source"]) if row["context"] else None,
            row["alias"],
            int(row["matrix_mhz"]) if row["matrix_mhz"] else None,
            int(row["nvlink_gb"]) if row["nvlink_gb"] else None,
        )


ROWS = tuple(_rows())
