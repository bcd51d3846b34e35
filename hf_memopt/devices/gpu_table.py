"""The figures of GPUs, each with its source.

Sizes are those of Linux: Windows reports the whole memory as usable and takes its share at run time. Newer drivers keep
more for themselves (a T4 went from 14.75 to 14.56 GiB), so the newest of several figures is listed.

- ``memory`` is what the GPU is sold with, ``usable`` what torch calls its total capacity.
- ``context`` is what a process holds on the GPU besides torch's allocator: the CUDA context, the kernels loaded so far,
  handles and workspaces of cuBLAS and cuDNN. It comes from out-of-memory messages of torch 2.1 and newer, which name
  the memory of the process (by NVML) and what torch has allocated and reserved; the context is the difference, within
  0.02 GiB. It grows with the GPU: 115 MiB on an RTX 4060, 495 MiB on an RTX 4090.
- ``cores`` are CUDA cores. A multiprocessor has 64 of them on compute capability 6.0, 7.0, 7.5 and 8.0, and 128 on 8.6,
  8.9, 9.0 and 12.0 (CUDA C++ Programming Guide, the architecture of each compute capability). Where a name covers
  several forms, the figure is that of the largest in a server (the H100 for SXM; the one for PCIe has 114
  multiprocessors) and that of a desktop computer elsewhere (the GTX 1650; a mobile one has 16 multiprocessors).

Limitations: NVIDIA's GPUs only, and no rates of arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CAPABILITIES", "ROWS", "Row"]

CAPABILITIES = "https://developer.nvidia.com/cuda-gpus"


class Row(NamedTuple):
    """The figures of a GPU as they were found.

    ``usable`` and ``context`` come with their source; ``also`` has further words that its name may contain.
    """

    name: str
    memory: str
    capability: tuple[int, int]
    bandwidth: str  # per second
    cores: int
    specification: str
    usable: tuple[str, str] | None = None
    context: tuple[str, str] | None = None
    also: str = ""
    capability_list: str = CAPABILITIES
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
ROWS = (
    # Pascal and Volta
    Row("P100", "16GiB", (6, 0), "732GB", 3584,
        _GITHUB + "fredlas/optimize_llamacpp_ngl/blob/main/optimize_llamacpp_ngl.py",
        usable=("16280MiB", _GITHUB + "karpathy/minGPT/issues/1"), capability_list=_LEGACY,
        cores_list=_PASCAL),
    Row("V100 16GB", "16GiB", (7, 0), "900GB", 5120, _DATA_CENTER,
        usable=("15.78GiB", _GITHUB + "kchengiva/Shift-GCN/issues/34"), capability_list=_LEGACY),
    Row("V100 32GB", "32GiB", (7, 0), "900GB", 5120, _DATA_CENTER,
        usable=("31.74GiB", _GITHUB + "QwenAudio/SenseVoice/issues/28"),
        context=("980MiB", _GITHUB + "QwenAudio/SenseVoice/issues/28"), capability_list=_LEGACY),
    # Turing
    Row("GTX 1650", "4GiB", (7, 5), "128GB", 896, _OLD_GEFORCE,
        usable=("3.81GiB", _GITHUB + "ultralytics/yolov5/issues/285"), capability_list=_TURING,
        cores_list="https://pcpartdb.com/gpus/compare/nvidia-geforce-gtx-1650--vs--nvidia-geforce-rtx-2060"),
    Row("GTX 1660 Ti", "6GiB", (7, 5), "288GB", 1536, _OLD_GEFORCE,
        usable=("5.81GiB", _GITHUB + "zhou13/lcnn/issues/23"), capability_list=_TURING,
        cores_list=_GITHUB + "Dr-Noob/gpufetch/issues/10"),
    Row("RTX 2060", "6GiB", (7, 5), "336GB", 1920, _OLD_GEFORCE,
        usable=("5.79GiB", _GITHUB + "facebookresearch/meshrcnn/issues/92"),
        cores_list="https://technical.city/en/video/GeForce-RTX-2060-vs-GeForce-GTX-1650-GDDR6"),
    Row("RTX 2080 Ti", "11GiB", (7, 5), "616GB", 4352, _OLD_GEFORCE,
        usable=("10.76GiB", _GITHUB + "JDAI-CV/image-captioning/issues/11"),
        cores_list="https://gist.github.com/sagnitude/c32a204dc698639e1ef54ad260f53449"),
    Row("T4", "16GiB", (7, 5), "320GB", 2560, _DATA_CENTER,
        usable=("14.56GiB", _GITHUB + "Zheng-Chong/CatVTON/issues/133"),
        context=("135MiB", _GITHUB + "Zheng-Chong/CatVTON/issues/133")),
    # Ampere
    Row("RTX 3050 4GB", "4GiB", (8, 6), "192GB", 2048, _GEFORCE, also="laptop",
        usable=("3.81GiB", _GITHUB + "NVlabs/RVT/issues/7")),
    Row("RTX 3050 6GB", "6GiB", (8, 6), "168GB", 2304, _GEFORCE),
    Row("RTX 3050 8GB", "8GiB", (8, 6), "224GB", 2560, _GEFORCE),
    Row("RTX 3060 Laptop 6GB", "6GiB", (8, 6), "336GB", 3840, _GEFORCE,
        usable=("5.80GiB", _GITHUB + "JiehongLin/SAM-6D/issues/13")),
    Row("RTX 3060 12GB", "12GiB", (8, 6), "360GB", 3584, _GEFORCE,
        usable=("11.75GiB", _GITHUB + "Kunhao-Liu/StyleGaussian/issues/12")),
    Row("RTX 3070", "8GiB", (8, 6), "448GB", 5888, _GEFORCE,
        usable=("7.78GiB", _GITHUB + "akshitac8/OW-DETR/issues/46"),
        context=("179MiB", _GITHUB + "meta-llama/codellama/issues/82")),
    Row("RTX 3080", "10GiB", (8, 6), "760GB", 8704, _GEFORCE,
        usable=("9.78GiB", _GITHUB + "zai-org/CogVideo/issues/34")),
    Row("RTX 3090", "24GiB", (8, 6), "936GB", 10496, _GEFORCE,
        usable=("23.56GiB", _GITHUB + "noonghunna/club-3090/issues/58"),
        context=("450MiB", _GITHUB + "vllm-project/vllm/issues/2140")),
    Row("A10", "24GiB", (8, 6), "600GB", 9216, _DATA_CENTER,
        usable=("21.99GiB", _GITHUB + "zai-org/CogVLM/issues/236"),
        context=("224MiB", _GITHUB + "zai-org/CogVLM/issues/236"),
        cores_list="https://sysrqmts.com/ru/gpus/compare/nvidia-a10-pcie-vs-nvidia-quadro-rtx-4000"),
    Row("A100 40GB", "40GiB", (8, 0), "1555GB", 6912, _DATA_CENTER,
        usable=("40339MiB", _GITHUB + "bottlerocket-os/bottlerocket/pull/3873"),
        context=("501MiB", _GITHUB + "TianheWu/CoSeR/issues/10")),
    Row("A100 80GB", "80GiB", (8, 0), "2039GB", 6912,
        _GITHUB + "huataihuang/cloud-atlas/blob/master/source/machine_learning/hardware/nvidia_gpu/nvidia_a100.rst",
        usable=("79.25GiB", _GITHUB + "HiDream-ai/VAREdit/issues/6"),
        context=("409MiB", _GITHUB + "HiDream-ai/VAREdit/issues/6"),
        cores_list="https://gist.github.com/gengwg/3520df2ebf8872e5ee4818367e3a4122"),
    # Ada Lovelace
    Row("RTX 4050 Laptop", "6GiB", (8, 9), "192GB", 2560, _GEFORCE),
    Row("RTX 4060", "8GiB", (8, 9), "272GB", 3072, _GEFORCE,
        usable=("7.75GiB", _GITHUB + "ESRSchao/EdgeRegNet/issues/2"),
        context=("115MiB", _GITHUB + "ESRSchao/EdgeRegNet/issues/2")),
    Row("RTX 4060 Ti 16GB", "16GiB", (8, 9), "288GB", 4352, _GEFORCE,
        usable=("15.55GiB", _GITHUB + "boson-ai/higgs-audio/issues/48"),
        context=("256MiB", _GITHUB + "boson-ai/higgs-audio/issues/48")),
    Row("RTX 4070", "12GiB", (8, 9), "504GB", 5888, _GEFORCE),
    Row("RTX 4080", "16GiB", (8, 9), "716.8GB", 9728, _GEFORCE,
        usable=("16076MiB", _GITHUB + "ollama/ollama/issues/9245")),
    Row("RTX 4090", "24GiB", (8, 9), "1008GB", 16384, _GEFORCE,
        usable=("23.49GiB", _GITHUB + "Sautenich/UAV-VLA/issues/7"),
        context=("495MiB", _GITHUB + "pytorch/torchchat/issues/1341")),
    Row("L4", "24GiB", (8, 9), "300GB", 7424, _CLOUD,
        usable=("22.03GiB", _GITHUB + "ArcInstitute/evo2/issues/190"),
        context=("236MiB", _GITHUB + "ArcInstitute/evo2/issues/190"),
        cores_list=_GITHUB + "bottlerocket-os/bottlerocket-kernel-kit/pull/139"),
    Row("L40S", "48GiB", (8, 9), "864GB", 18176, _LLM_BOOK,
        usable=("44.52GiB", _GITHUB + "huggingface/sentence-transformers/issues/3214"),
        context=("514MiB", _GITHUB + "huggingface/sentence-transformers/issues/3214"),
        cores_list="https://hmc-tech.com/gpu/nvidia-l40s-vs-nvidia-t40"),
    # Hopper
    Row("H100", "80GiB", (9, 0), "3350GB", 16896, _LLM_BOOK,
        usable=("79.11GiB", _GITHUB + "vllm-project/vllm/issues/27508"),
        context=("676MiB", _GITHUB + "ali-vilab/VACE/issues/56 (H100 NVL)"),
        cores_list="https://glennklockwood.com/garden/processors/h100"),
    Row("H200", "141GiB", (9, 0), "4800GB", 16896, _LLM_BOOK,
        cores_list="https://hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200"),
    # Blackwell
    Row("RTX 5090", "32GiB", (12, 0), "1792GB", 21760, _GEFORCE,
        usable=("31.36GiB", _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20"),
        context=("619MiB", _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20")),
)
# fmt: on
