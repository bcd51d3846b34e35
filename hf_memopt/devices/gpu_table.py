"""The figures of GPUs, each with its source.

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

Limitations: of AMD only the Instinct series. Rates that no published table confirms are None.
"""

from __future__ import annotations

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

_GITHUB = "https://github.com/"

# fmt: off
ROWS = (
    # Pascal
    Row("GTX 1050 2GB", 2, GP10X, 5, 1455, 112.1, "geforce-gtx-1050.c2875"),
    Row("GTX 1050 3GB", 3, GP10X, 6, 1518, 84.1, "geforce-gtx-1050-3-gb.c3257"),
    Row("GTX 1050 Ti", 4, GP10X, 6, 1392, 112.1, "geforce-gtx-1050-ti.c2885"),
    Row("GTX 1060 3GB", 3, GP10X, 9, 1708, 192.2, "geforce-gtx-1060-3-gb.c2867"),
    Row("GTX 1060 6GB", 6, GP10X, 10, 1709, 192.2, "geforce-gtx-1060-6-gb.c2862"),
    Row("GTX 1070", 8, GP10X, 15, 1683, 256.3, "geforce-gtx-1070.c2840"),
    Row("GTX 1070 Ti", 8, GP10X, 19, 1683, 256.3, "geforce-gtx-1070-ti.c3010"),
    Row("GTX 1080", 8, GP10X, 20, 1733, 320.3, "geforce-gtx-1080.c2839"),
    Row("GTX 1080 Ti", 11, GP10X, 28, 1582, 484.4, "geforce-gtx-1080-ti.c2877"),
    Row("GTX 1050 Laptop", 4, GP10X, 5, 1493, 112.1, "geforce-gtx-1050-mobile.c2917"),
    Row("GTX 1050 Ti Laptop", 4, GP10X, 6, 1620, 112.1, "geforce-gtx-1050-ti-mobile.c2912"),
    Row("GTX 1060 Laptop", 6, GP10X, 10, 1671, 192.2, "geforce-gtx-1060-mobile.c3016"),
    Row("GTX 1070 Laptop", 8, GP10X, 16, 1645, 256.3, "geforce-gtx-1070-mobile.c2869"),
    Row("GTX 1080 Laptop", 8, GP10X, 20, 1734, 320.3, "geforce-gtx-1080-mobile.c2870"),
    Row("TITAN X Pascal", 12, GP10X, 28, 1531, 480.4, "titan-x-pascal.c2863"),
    Row("TITAN Xp", 12, GP10X, 30, 1582, 547.6, "titan-xp.c2948"),
    Row("Quadro P5000", 16, GP10X, 20, 1733, 288.5, "quadro-p5000.c2864"),
    Row("Quadro P6000", 24, GP10X, 30, 1645, 432.8, "quadro-p6000.c2865"),
    Row("P4", 8, GP10X, 20, 1114, 192.3, "tesla-p4.c2879"),
    Row("P40", 24, GP10X, 30, 1531, 347.1, "tesla-p40.c2878"),
    Row("P100", 16, GP100, 56, 1480, 732.2, "tesla-p100-sxm2.c3183", nvlink_gb=80,
        usable=("16280MiB", _GITHUB + "karpathy/minGPT/issues/1")),
    # Volta
    Row("V100 16GB", 16, GV100, 80, 1530, 900, "tesla-v100-sxm2-16-gb.c3018", nvlink_gb=150,
        usable=("15.78GiB", _GITHUB + "kchengiva/Shift-GCN/issues/34")),
    Row("V100 32GB", 32, GV100, 80, 1530, 900, "tesla-v100-sxm2-32-gb.c3185", nvlink_gb=150,
        usable=("31.74GiB", _GITHUB + "QwenAudio/SenseVoice/issues/28"),
        context=("980MiB", _GITHUB + "QwenAudio/SenseVoice/issues/28")),
    Row("TITAN V", 12, GV100, 80, 1455, 652.8, "titan-v.c3051"),
    # Turing
    Row("GTX 1650", 4, TU11X, 14, 1665, 128, "geforce-gtx-1650.c3366",
        usable=("3.81GiB", _GITHUB + "ultralytics/yolov5/issues/285")),
    Row("GTX 1650 Super", 4, TU11X, 20, 1725, 192, "geforce-gtx-1650-super.c3411"),
    Row("GTX 1660", 6, TU11X, 22, 1785, 192.1, "geforce-gtx-1660.c3365"),
    Row("GTX 1660 Super", 6, TU11X, 22, 1785, 336, "geforce-gtx-1660-super.c3458"),
    Row("GTX 1660 Ti", 6, TU11X, 24, 1770, 288, "geforce-gtx-1660-ti.c3364",
        usable=("5.81GiB", _GITHUB + "zhou13/lcnn/issues/23")),
    Row("GTX 1650 Laptop", 4, TU11X, 16, 1560, 128, "geforce-gtx-1650-mobile.c3367"),
    Row("GTX 1650 Ti Laptop", 4, TU11X, 16, 1485, 192, "geforce-gtx-1650-ti-mobile.c3517"),
    Row("GTX 1660 Ti Laptop", 6, TU11X, 24, 1590, 288, "geforce-gtx-1660-ti-mobile.c3369"),
    Row("RTX 2060", 6, TU10X, 30, 1680, 336, "geforce-rtx-2060.c3310",
        usable=("5.79GiB", _GITHUB + "facebookresearch/meshrcnn/issues/92")),
    Row("RTX 2060 12GB", 12, TU10X, 34, 1650, 336, "geforce-rtx-2060-12-gb.c3836"),
    Row("RTX 2060 Super", 8, TU10X, 34, 1650, 448, "geforce-rtx-2060-super.c3441"),
    Row("RTX 2070", 8, TU10X, 36, 1620, 448, "geforce-rtx-2070.c3252"),
    Row("RTX 2070 Super", 8, TU10X, 40, 1770, 448, "geforce-rtx-2070-super.c3440"),
    Row("RTX 2080", 8, TU10X, 46, 1710, 448, "geforce-rtx-2080.c3224"),
    Row("RTX 2080 Super", 8, TU10X, 48, 1815, 496, "geforce-rtx-2080-super.c3439"),
    Row("RTX 2080 Ti", 11, TU10X, 68, 1545, 616, "geforce-rtx-2080-ti.c3305",
        usable=("10.76GiB", _GITHUB + "JDAI-CV/image-captioning/issues/11")),
    Row("RTX 2060 Laptop", 6, TU10X, 30, 1200, 336, "geforce-rtx-2060-mobile.c3348"),
    Row("RTX 2070 Laptop", 8, TU10X, 36, 1440, 448, "geforce-rtx-2070-mobile.c3349"),
    Row("RTX 2070 Super Laptop", 8, TU10X, 40, 1380, 448, "geforce-rtx-2070-super-mobile.c3514"),
    Row("RTX 2080 Laptop", 8, TU10X, 46, 1590, 448, "geforce-rtx-2080-mobile.c3312"),
    Row("RTX 2080 Super Laptop", 8, TU10X, 48, 1560, 448, "geforce-rtx-2080-super-mobile.c3513"),
    Row("TITAN RTX", 24, TU10X_PRO, 72, 1770, 672, "titan-rtx.c3311"),
    Row("T1000 4GB", 4, TU11X, 14, 1395, 160, "t1000.c3797", alias="T1000"),
    Row("T1000 8GB", 8, TU11X, 14, 1395, 160, "t1000-8-gb.c3842"),
    Row("Quadro RTX 4000", 8, TU10X_PRO, 36, 1545, 416, "quadro-rtx-4000.c3336"),
    Row("Quadro RTX 5000", 16, TU10X_PRO, 48, 1815, 448, "quadro-rtx-5000.c3308"),
    Row("Quadro RTX 6000", 24, TU10X_PRO, 72, 1770, 672, "quadro-rtx-6000.c3307"),
    Row("Quadro RTX 8000", 48, TU10X_PRO, 72, 1770, 672, "quadro-rtx-8000.c3306"),
    Row("T4", 16, TU10X_PRO, 40, 1590, 320, "tesla-t4.c3316",
        usable=("14.56GiB", _GITHUB + "Zheng-Chong/CatVTON/issues/133"),
        context=("135MiB", _GITHUB + "Zheng-Chong/CatVTON/issues/133")),
    # Ampere
    Row("RTX 2050 Laptop", 4, GA10X, 16, 1245, 112, "geforce-rtx-2050-mobile.c3859"),
    Row("RTX 3050 4GB", 4, GA10X, 16, 1343, 192, "geforce-rtx-3050-mobile.c3788", alias="RTX 3050 Laptop",
        usable=("3.81GiB", _GITHUB + "NVlabs/RVT/issues/7")),
    Row("RTX 3050 6GB", 6, GA10X, 18, 1470, 168, "geforce-rtx-3050-6-gb.c4188"),
    Row("RTX 3050 8GB", 8, GA10X, 20, 1777, 224, "geforce-rtx-3050-8-gb.c3858"),
    Row("RTX 3050 Laptop 6GB", 6, GA10X, 20, 1492, 168, "geforce-rtx-3050-mobile-refresh-6-gb.c3971"),
    Row("RTX 3050 Ti Laptop", 4, GA10X, 20, 1035, 192, "geforce-rtx-3050-ti-mobile.c3778"),
    Row("RTX 3060 Laptop 6GB", 6, GA10X, 30, 1425, 336, "geforce-rtx-3060-mobile.c3757",
        usable=("5.80GiB", _GITHUB + "JiehongLin/SAM-6D/issues/13")),
    Row("RTX 3060 8GB", 8, GA10X, 28, 1777, 240, "geforce-rtx-3060-8-gb.c3937"),
    Row("RTX 3060 12GB", 12, GA10X, 28, 1777, 360, "geforce-rtx-3060-12-gb.c3682",
        usable=("11.75GiB", _GITHUB + "Kunhao-Liu/StyleGaussian/issues/12")),
    Row("RTX 3060 Ti", 8, GA10X, 38, 1665, 448, "geforce-rtx-3060-ti.c3681"),
    Row("RTX 3070", 8, GA10X, 46, 1725, 448, "geforce-rtx-3070.c3674",
        usable=("7.78GiB", _GITHUB + "akshitac8/OW-DETR/issues/46"),
        context=("179MiB", _GITHUB + "meta-llama/codellama/issues/82")),
    Row("RTX 3070 Ti", 8, GA10X, 48, 1770, 608.3, "geforce-rtx-3070-ti.c3675"),
    Row("RTX 3070 Laptop", 8, GA10X, 40, 1560, 448, "geforce-rtx-3070-mobile.c3712"),
    Row("RTX 3070 Ti Laptop", 8, GA10X, 46, 1410, 448, "geforce-rtx-3070-ti-mobile.c3852"),
    Row("RTX 3080", 10, GA10X, 68, 1710, 760.3, "geforce-rtx-3080.c3621",
        usable=("9.78GiB", _GITHUB + "zai-org/CogVideo/issues/34")),
    Row("RTX 3080 12GB", 12, GA10X, 70, 1710, 912.4, "geforce-rtx-3080-12-gb.c3834"),
    Row("RTX 3080 Ti", 12, GA10X, 80, 1665, 912.4, "geforce-rtx-3080-ti.c3735"),
    Row("RTX 3080 Laptop 8GB", 8, GA10X, 48, 1545, 448, "geforce-rtx-3080-mobile.c3684"),
    Row("RTX 3080 Laptop 16GB", 16, GA10X, 48, 1545, 448, "geforce-rtx-3080-mobile.c3684"),
    Row("RTX 3080 Ti Laptop", 16, GA10X, 58, 1260, 512, "geforce-rtx-3080-ti-mobile.c3840"),
    Row("RTX 3090", 24, GA10X, 82, 1695, 936.2, "geforce-rtx-3090.c3622",
        usable=("23.56GiB", _GITHUB + "noonghunna/club-3090/issues/58"),
        context=("450MiB", _GITHUB + "vllm-project/vllm/issues/2140")),
    Row("RTX 3090 Ti", 24, GA10X, 84, 1860, 1008, "geforce-rtx-3090-ti.c3829"),
    Row("RTX A1000", 8, GA10X_PRO, 18, 1462, 192, "rtx-a1000.c4211"),
    Row("RTX A2000 6GB", 6, GA10X_PRO, 26, 1200, 288, "rtx-a2000.c3820", alias="RTX A2000"),
    Row("RTX A2000 12GB", 12, GA10X_PRO, 26, 1200, 288, "rtx-a2000-12-gb.c3853"),
    Row("RTX A4000", 16, GA10X_PRO, 48, 1560, 448, "rtx-a4000.c3756"),
    Row("RTX A4500", 20, GA10X_PRO, 56, 1650, 640, "rtx-a4500.c3849"),
    Row("RTX A5000", 24, GA10X_PRO, 64, 1695, 768, "rtx-a5000.c3748"),
    Row("RTX A5500", 24, GA10X_PRO, 80, 1665, 768, "rtx-a5500.c3901"),
    Row("RTX A6000", 48, GA10X_PRO, 84, 1800, 768, "rtx-a6000.c3686"),
    Row("RTX A1000 Laptop", 4, GA10X_PRO_LAPTOP, 16, 1140, 176, "rtx-a1000-mobile.c3920"),
    Row("RTX A2000 Laptop 4GB", 4, GA10X_PRO_LAPTOP, 20, 1687, 192, "rtx-a2000-mobile.c3827", alias="RTX A2000 Laptop"),
    Row("RTX A2000 Laptop 8GB", 8, GA10X_PRO_LAPTOP, 20, 1612, 224, "rtx-a2000-mobile-8-gb.c4287"),
    Row("RTX A3000 Laptop 6GB", 6, GA10X_PRO_LAPTOP, 32, 1230, 264, "rtx-a3000-mobile.c3806", alias="RTX A3000 Laptop"),
    Row("RTX A3000 Laptop 12GB", 12, GA10X_PRO_LAPTOP, 32, 1440, 336, "rtx-a3000-mobile-12-gb.c3903"),
    Row("RTX A4000 Laptop", 8, GA10X_PRO_LAPTOP, 40, 1680, 384, "rtx-a4000-mobile.c3804"),
    Row("RTX A5000 Laptop", 16, GA10X_PRO_LAPTOP, 48, 1575, 448, "rtx-a5000-mobile.c3805"),
    Row("A2", 16, GA10X_PRO, 10, 1770, 200.1, "a2.c3848"),
    Row("A10", 24, GA10X_PRO, 72, 1695, 600.2, "a10-pcie.c3793",
        usable=("21.99GiB", _GITHUB + "zai-org/CogVLM/issues/236"),
        context=("224MiB", _GITHUB + "zai-org/CogVLM/issues/236")),
    Row("A10G", 24, GA10X, 80, 1710, 600.2, "a10g.c3798"),  # 80 by the driver; 70 TFLOP/s by AWS: GeForce's rate
    Row("A16", 16, GA10X_PRO, 10, 1755, 200.1, "a16-pcie.c3794"),  # one of the four on the board
    Row("A30", 24, GA100, 56, 1440, 933.1, "a30-pcie.c3792"),
    Row("A40", 48, GA10X_PRO, 84, 1740, 695.8, "a40-pcie.c3700"),
    Row("A100 40GB", 40, GA100, 108, 1410, 1555, "a100-sxm4-40-gb.c3506", nvlink_gb=300,
        usable=("40339MiB", _GITHUB + "bottlerocket-os/bottlerocket/pull/3873"),
        context=("501MiB", _GITHUB + "TianheWu/CoSeR/issues/10")),
    Row("A100 80GB", 80, GA100, 108, 1410, 2039, "a100-sxm4-80-gb.c3746", nvlink_gb=300,
        usable=("79.25GiB", _GITHUB + "HiDream-ai/VAREdit/issues/6"),
        context=("409MiB", _GITHUB + "HiDream-ai/VAREdit/issues/6")),
    # Ada Lovelace
    Row("RTX 4050 Laptop", 6, AD10X, 20, 1755, 192, "geforce-rtx-4050-mobile.c3953"),
    Row("RTX 4060", 8, AD10X, 24, 2460, 272, "geforce-rtx-4060.c4107",
        usable=("7.75GiB", _GITHUB + "ESRSchao/EdgeRegNet/issues/2"),
        context=("115MiB", _GITHUB + "ESRSchao/EdgeRegNet/issues/2")),
    Row("RTX 4060 Laptop", 8, AD10X, 24, 1890, 256, "geforce-rtx-4060-mobile.c3946"),
    Row("RTX 4060 Ti 8GB", 8, AD10X, 34, 2535, 288, "geforce-rtx-4060-ti-8-gb.c3890"),
    Row("RTX 4060 Ti 16GB", 16, AD10X, 34, 2535, 288, "geforce-rtx-4060-ti-16-gb.c4155",
        usable=("15.55GiB", _GITHUB + "boson-ai/higgs-audio/issues/48"),
        context=("256MiB", _GITHUB + "boson-ai/higgs-audio/issues/48")),
    Row("RTX 4070", 12, AD10X, 46, 2475, 504, "geforce-rtx-4070.c3924"),
    Row("RTX 4070 Super", 12, AD10X, 56, 2475, 504, "geforce-rtx-4070-super.c4186"),
    Row("RTX 4070 Ti", 12, AD10X, 60, 2610, 504, "geforce-rtx-4070-ti.c3950"),
    Row("RTX 4070 Ti Super", 16, AD10X, 66, 2610, 672, "geforce-rtx-4070-ti-super.c4187"),
    Row("RTX 4070 Laptop", 8, AD10X, 36, 1695, 256, "geforce-rtx-4070-mobile.c3944"),
    Row("RTX 4080", 16, AD10X, 76, 2505, 716.8, "geforce-rtx-4080.c3888",
        usable=("16076MiB", _GITHUB + "ollama/ollama/issues/9245")),
    Row("RTX 4080 Super", 16, AD10X, 80, 2550, 736, "geforce-rtx-4080-super.c4182"),
    Row("RTX 4080 Laptop", 12, AD10X, 58, 1665, 432, "geforce-rtx-4080-mobile.c3947"),
    Row("RTX 4090", 24, AD10X, 128, 2520, 1008, "geforce-rtx-4090.c3889",
        usable=("23.49GiB", _GITHUB + "Sautenich/UAV-VLA/issues/7"),
        context=("495MiB", _GITHUB + "pytorch/torchchat/issues/1341")),
    Row("RTX 4090 D", 24, AD10X, 114, 2520, 1008, "geforce-rtx-4090-d.c4189"),
    Row("RTX 4090 Laptop", 16, AD10X, 76, 1695, 576, "geforce-rtx-4090-mobile.c3949"),
    Row("RTX 2000 Ada", 16, AD10X_PRO, 22, 2130, 224, "rtx-2000-ada-generation.c4199"),
    Row("RTX 4000 Ada", 20, AD10X_PRO, 48, 2175, 360, "rtx-4000-ada-generation.c4171"),
    Row("RTX 4000 SFF Ada", 20, AD10X_PRO, 48, 1560, 280, "rtx-4000-sff-ada-generation.c4139"),
    Row("RTX 4500 Ada", 24, AD10X_PRO, 60, 2580, 432, "rtx-4500-ada-generation.c4172"),
    Row("RTX 5000 Ada", 32, AD10X_PRO, 100, 2550, 576, "rtx-5000-ada-generation.c4152"),
    Row("RTX 6000 Ada", 48, AD10X_PRO, 142, 2505, 960, "rtx-6000-ada-generation.c3933"),
    Row("RTX 2000 Ada Laptop", 8, AD10X_PRO_LAPTOP, 24, 2115, 256, "rtx-2000-mobile-ada-generation.c4093"),
    Row("RTX 3000 Ada Laptop", 8, AD10X_PRO_LAPTOP, 36, 1695, 256, "rtx-3000-mobile-ada-generation.c4095"),
    Row("RTX 3500 Ada Laptop", 12, AD10X_PRO_LAPTOP, 40, 1545, 432, "rtx-3500-mobile-ada-generation.c4098"),
    Row("RTX 4000 Ada Laptop", 12, AD10X_PRO_LAPTOP, 58, 1665, 432, "rtx-4000-mobile-ada-generation.c4096"),
    Row("RTX 5000 Ada Laptop", 16, AD10X_PRO_LAPTOP, 76, 2115, 576, "rtx-5000-mobile-ada-generation.c4097"),
    Row("L4", 24, AD10X_PRO, 58, 2040, 300, "l4.c4091",
        usable=("22.03GiB", _GITHUB + "ArcInstitute/evo2/issues/190"),
        context=("236MiB", _GITHUB + "ArcInstitute/evo2/issues/190")),
    Row("L40", 48, AD10X, 142, 2490, 864, "l40.c3959"),
    Row("L40S", 48, AD10X_PRO, 142, 2520, 864, "l40s.c4173",
        usable=("44.52GiB", _GITHUB + "huggingface/sentence-transformers/issues/3214"),
        context=("514MiB", _GITHUB + "huggingface/sentence-transformers/issues/3214")),
    # Hopper
    Row("H100", 80, GH100, 132, 1980, 3350, "h100-sxm5-80-gb.c3900", matrix_mhz=1830, nvlink_gb=450,
        usable=("79.11GiB", _GITHUB + "vllm-project/vllm/issues/27508"),
        context=("676MiB", _GITHUB + "ali-vilab/VACE/issues/56 (H100 NVL)")),
    Row("H100 PCIe", 80, GH100, 114, 1755, 2039, "h100-pcie-80-gb.c3899", matrix_mhz=1620),
    Row("H100 NVL", 94, GH100, 132, 1785, 3938, "h100-nvl-94-gb.c4327", matrix_mhz=1545),
    Row("H200", 141, GH100, 132, 1980, 4800, "h200-sxm-141-gb.c4255", matrix_mhz=1830, nvlink_gb=450),
    Row("H200 NVL", 141, GH100, 132, 1785, 4800, "h200-nvl.c4254", matrix_mhz=1545),
    # Blackwell
    Row("B200", 180, GB100, 148, 1965, 7700, "b200.c4210", matrix_mhz=1856, nvlink_gb=900),
    Row("RTX 5050", 8, GB20X, 20, 2572, 320, "geforce-rtx-5050.c4220"),
    Row("RTX 5060", 8, GB20X, 30, 2497, 448, "geforce-rtx-5060.c4219"),
    Row("RTX 5060 Ti 8GB", 8, GB20X, 36, 2572, 448, "geforce-rtx-5060-ti-8-gb.c4246"),
    Row("RTX 5060 Ti 16GB", 16, GB20X, 36, 2572, 448, "geforce-rtx-5060-ti-16-gb.c4292"),
    Row("RTX 5070", 12, GB20X, 48, 2512, 672, "geforce-rtx-5070.c4218"),
    Row("RTX 5070 Ti", 16, GB20X, 70, 2452, 896, "geforce-rtx-5070-ti.c4243"),
    Row("RTX 5080", 16, GB20X, 84, 2617, 960, "geforce-rtx-5080.c4217"),
    Row("RTX 5090", 32, GB20X, 170, 2407, 1792, "geforce-rtx-5090.c4216",
        usable=("31.36GiB", _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20"),
        context=("619MiB", _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20")),
    Row("RTX 5090 D", 32, GB20X, 170, 2407, 1792, "geforce-rtx-5090-d.c4253"),
    Row("RTX 5050 Laptop", 8, GB20X, 20, 1500, 384, "geforce-rtx-5050-mobile.c4239"),
    Row("RTX 5060 Laptop", 8, GB20X, 26, 1455, 384, "geforce-rtx-5060-mobile.c4230"),
    Row("RTX 5070 Laptop", 8, GB20X, 36, 1425, 384, "geforce-rtx-5070-mobile.c4237"),
    Row("RTX 5070 Ti Laptop", 12, GB20X, 46, 1447, 672, "geforce-rtx-5070-ti-mobile.c4238"),
    Row("RTX 5080 Laptop", 16, GB20X, 60, 1500, 896, "geforce-rtx-5080-mobile.c4236"),
    Row("RTX 5090 Laptop", 24, GB20X, 82, 1515, 896, "geforce-rtx-5090-mobile.c4235"),
    Row("RTX PRO 2000", 16, GB20X_PRO, 34, 1957, 288, "rtx-pro-2000-blackwell.c4330"),
    Row("RTX PRO 4000", 24, GB20X_PRO, 70, 2055, 672, "rtx-pro-4000-blackwell.c4279"),
    Row("RTX PRO 4500", 32, GB20X_PRO, 82, 2407, 896, "rtx-pro-4500-blackwell.c4278"),
    Row("RTX PRO 5000 48GB", 48, GB20X_PRO, 110, 2377, 1344, "rtx-pro-5000-blackwell.c4276", alias="RTX PRO 5000"),
    Row("RTX PRO 5000 72GB", 72, GB20X_PRO, 110, 2377, 1344, "rtx-pro-5000-72-gb-blackwell.c4357"),
    Row("RTX PRO 6000", 96, GB20X_PRO, 188, 2617, 1792, "rtx-pro-6000-blackwell.c4272"),
    # AMD Instinct; a process sees one half of an MI250 or MI250X as its GPU
    Row("MI210", 64, CDNA2, 104, 1700, 1638.4, "radeon-instinct-mi210.c3857"),
    Row("MI250", 64, CDNA2, 104, 1700, 1638.4, "radeon-instinct-mi250.c3847"),
    Row("MI250X", 64, CDNA2, 110, 1700, 1638.4, "radeon-instinct-mi250x.c3837", alias="MI250X/MI250"),
    Row("MI300X", 192, CDNA3, 304, 2100, 5300, "radeon-instinct-mi300x.c4179"),
    Row("MI325X", 256, CDNA3, 304, 2100, 6000, "radeon-instinct-mi325x.c4231"),
    Row("MI350X", 288, CDNA4, 256, 2200, 8000, "radeon-instinct-mi350x.c4308"),
    Row("MI355X", 288, CDNA4, 256, 2400, 8000, "radeon-instinct-mi355x.c4309",
        usable=("287.98GiB", _GITHUB + "ROCm/TheRock/issues/2118 (gfx950)")),
)
# fmt: on
