"""Build the library of a GPU without silicon for the installed torch, once, in the user's cache.

``stand_in.cpp`` has what must be written by hand. Whatever else the installed libraries ask CUDA for is generated:
functions that return 0 and count their calls, or hand out a number where something is created.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hf_memopt.prediction.rehearsal.requirements import RehearsalError, TorchBuild, compiler, installed_torch

SOURCE = Path(__file__).with_name("stand_in.cpp")
NAME = "libhf_memopt_gpu.so"
LINKS = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")  # names by which it is opened at run time
# Of CUDA 13, of CUDA 12, and what neither has: the wheels of CUDA 13 lack the folder crt.
HEADERS = ("nvidia/cu13/include", "nvidia/cuda_runtime/include", "triton/backends/nvidia/include")
LIBRARIES = (  # in a folder of Python's path
    *("torch/lib/*.so*", "bitsandbytes/libbitsandbytes_cuda*.so", "flash_attn_2_cuda*.so"),
    *("torchvision/*.so", "torchaudio/**/*.so"),
)
OF_CUDA = re.compile(
    r"(__cuda[A-Z]|cuda[A-Z]|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cuFile|nvrtc|nvJitLink|cupti|cu[A-Z]|nvml)\w*"
)
# NVIDIA's own are used where they work without a GPU: compilers, profilers, and what only says versions and texts.
NVIDIAS = re.compile(
    r"(nvrtc|nvJitLink|cupti)\w*|(cudnn|cublas|cublasLt|nccl)Get(Version|Property|CudartVersion|ErrorString|StatusString)"
)
CREATES = re.compile(r"(cublas|cudnn|cusparse|cusolver)\w*[cC]reate(?!Identity)\w*")  # by their first parameter
# Through pointers to int or size_t they say what torch then allocates.
SIZES = re.compile(r"(?i)buffersize|workspacesize|reservespacesize|workestimation|_compute$|makeplan")
# No library lists these: Triton compiles its launchers at run time, and ctypes asks by name.
BY_NAME = {
    *("cuCtxPopCurrent_v2", "cuCtxPushCurrent_v2", "cuCtxSetCurrent", "cuCtxSetLimit", "cuCtxSynchronize", "cuInit"),
    *("cuDevicePrimaryCtxRelease_v2", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuMemcpyHtoDAsync_v2", "cuMemMap"),
    *("cuMemSetAccess", "cuModuleUnload", "cuStreamSynchronize", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"),
    *("ncclCommDestroy", "nvmlDeviceGetUtilizationRates", "nvmlInit", "nvmlInitWithFlags", "nvmlInit_v2"),
    "nvmlShutdown",
}


def built_library() -> Path:
    """Return the library, built if this torch has none yet.

    Two processes may build at once: each does in a folder of its own, and the first to end gives it its name. A library
    is never built over, since g++ would rewrite it under the processes that have loaded it.

    Raises:
        RehearsalError: the machine or torch cannot rehearse (``requirements``), or the compiler fails.
    """
    torch = installed_torch()
    libraries = sorted({path for folder in sys.path for pattern in LIBRARIES for path in Path(folder).glob(pattern)})
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_memopt" / "rehearsal"
    library = cache / cache_key(torch, libraries) / NAME
    if not library.exists():
        command = compiler()
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as unfinished:
            build(Path(unfinished), command, torch, libraries)
            try:
                Path(unfinished).rename(library.parent)
            except OSError:
                if not library.exists():  # else another process was faster
                    raise
    return library


def cache_key(torch: TorchBuild, libraries: Iterable[Path]) -> str:
    """Return a name for all that the library is built from."""
    names_and_sizes = [(path.name, path.stat().st_size) for path in libraries]
    sources = SOURCE.read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(repr((*sources, torch.version, torch.cuda, names_and_sizes)).encode()).hexdigest()[:16]


def build(folder: Path, command: list[str], torch: TorchBuild, libraries: Iterable[Path]) -> None:
    """Compile the library in a folder, with its links."""
    (major, minor), site = torch.cuda, torch.folder.parent
    command = [*command, "-O1", "-fPIC", "-std=c++17", f"-DTORCH_CUDA={major * 1000 + minor * 10}"]
    command += [f"-I{site / headers}" for headers in HEADERS]
    by_hand, generated = folder / "stand_in.o", folder / "generated.cpp"
    _run([*command, "-c", str(SOURCE), "-o", str(by_hand)])
    names = set(BY_NAME)
    for path in libraries:
        names |= set(re.findall(r"\bU (\w+)", _run(["nm", "-D", "--undefined-only", str(path)])))
        if path.name == "libc10_cuda.so":  # asks dlsym at its first out-of-memory error: names among its strings
            names |= set(re.findall(r"\0(nvml[A-Z]\w+|cu[A-Z][a-z]\w+)(?=\0)", path.read_bytes().decode("latin-1")))
    names -= set(re.findall(r" T (\w+)", _run(["nm", str(by_hand)])))
    asked = sorted(name for name in names if OF_CUDA.fullmatch(name) and not NVIDIAS.fullmatch(name))
    declarations = "".join(header.read_text(encoding="utf-8") for header in site.glob("nvidia/*/include/cu*.h"))
    generated.write_text(generated_functions(asked, declarations), encoding="utf-8")
    _run([*command, "-shared", str(by_hand), str(generated), "-o", str(folder / NAME), "-ldl", "-lpthread"])
    for link in LINKS:
        (folder / link).symlink_to(NAME)


def generated_functions(names: list[str], declarations: str) -> str:
    """Return C++ for functions of which at most a number or a size comes back; a size, always 0, as declared."""
    api = 'extern "C" __attribute__((visibility("default")))'
    quoted = ", ".join(f'"{name}"' for name in names)
    lines = [
        "#include <atomic>\n#include <cstddef>",
        f"static std::atomic<unsigned long> calls[{len(names) + 1}], handles{{0x1000}};",
        f"static const char* names[] = {{{quoted}, nullptr}};",
        f"{api} const char* hf_memopt_gpu_generated(int number) {{ return names[number]; }}",
        f"{api} unsigned long hf_memopt_gpu_calls(int number) {{ return calls[number]; }}",
    ]
    for number, name in enumerate(names):
        parameters, statement = "", ""
        if CREATES.fullmatch(name):
            parameters, statement = "unsigned long* made", "*made = handles += 16; "
        elif SIZES.search(name) and (declared := re.search(rf"\b{name}\s*\(([^)]*)\)", declarations)):
            kinds = [re.match(r"\s*(int|size_t)\s*\*", parameter) for parameter in declared[1].split(",")]
            parameters = ", ".join(f"{kind[1]}* p{i}" if kind else f"long p{i}" for i, kind in enumerate(kinds))
            statement = "".join(f"*p{i} = 0; " for i, kind in enumerate(kinds) if kind)
        lines.append(f"{api} long {name}({parameters}) {{ calls[{number}]++; {statement}return 0; }}")
    return "\n".join([*lines, ""])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RehearsalError(
            f"command={command[0]!r} failed with {done.returncode}; expected it to build the stand-in of a GPU with "
            f"the headers in the wheels of torch or Triton. Call: pip install triton\n{done.stderr[:2000]}"
        )
    return done.stdout
