"""The GPU that stands in: what it is like, the environment of a process that uses it, and what it counted there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_memopt.prediction.rehearsal.library import built_library
from hf_memopt.prediction.rehearsal.requirements import RehearsalError
from hf_memopt.training.devices import Gpu, find_gpu

HOOK = Path(__file__).with_name("hook")
COUNTED = ("used_bytes", "peak_bytes", "pinned_bytes", "pinned_peak_bytes", "launches", "refused")


@dataclass(frozen=True, slots=True)
class StandIn:
    """A GPU without silicon.

    Attributes:
        name: as torch and NVML call it.
        memory_bytes: of the whole GPU; CUDA's context is a part of it.
        context_bytes: what CUDA itself holds, from the beginning.
        compute_capability: decides which kernels torch chooses.
        multiprocessors: their number, which the buffers of some kernels depend on.
    """

    name: str = "Stand-in GPU"
    memory_bytes: int = 12 * 2**30
    context_bytes: int = 0
    compute_capability: tuple[int, int] = (8, 6)
    multiprocessors: int = 28

    @classmethod
    def of(cls, gpu: str | Gpu) -> StandIn:
        """Return what stands in for a GPU of the table, by its name or its size (``devices.find_gpu``)."""
        gpu = find_gpu(gpu)
        context_bytes, multiprocessors = gpu.context_bytes or 0, gpu.multiprocessors or 28
        return cls(gpu.name, gpu.usable_bytes, context_bytes, gpu.compute_capability, multiprocessors)

    def environment(self, base: Mapping[str, str] = os.environ, *, values: bool = True) -> dict[str, str]:
        """Return the environment of a process that finds this GPU, as do the processes that it starts.

        Compiled kernels are kept apart from the user's: which of them is fastest, was not measured.

        Args:
            base: what to add to; the real GPUs that it chooses are not meant.
            values: whether small tensors get their values from the CPU.

        Raises:
            RehearsalError: this machine cannot rehearse.
        """
        library = built_library()
        folder, (major, minor) = library.parent, self.compute_capability
        gpu = {"NAME": self.name, "MEMORY": self.memory_bytes, "CONTEXT": self.context_bytes}
        gpu |= {"CAPABILITY": major * 10 + minor, "PROCESSORS": self.multiprocessors}
        gpu |= {} if values else {"VALUES": 0}
        first = {"LD_PRELOAD": library, "LD_LIBRARY_PATH": folder, "PYTHONPATH": HOOK}
        return {
            **{name: value for name, value in base.items() if name != "CUDA_VISIBLE_DEVICES"},
            **{name: ":".join(filter(None, (str(path), base.get(name)))) for name, path in first.items()},
            "TRITON_LIBCUDA_PATH": str(folder),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            **{f"HF_MEMOPT_GPU_{name}": str(value) for name, value in gpu.items()},
        }


def read_counters() -> dict[str, int]:
    """Return what the first GPU counted in this process: ``COUNTED``, described in the folder's README.

    Raises:
        RehearsalError: no GPU stands in in this process.
    """
    library, found = _loaded(), {}
    for name in COUNTED:
        function = getattr(library, f"hf_memopt_gpu_{name}")
        function.restype = ctypes.c_ulonglong
        found[name] = int(function(0))  # the number of the GPU, where it matters
    return found


def read_generated_calls() -> dict[str, int]:
    """Return how often this process called functions of CUDA that do nothing here, by their name."""
    library, calls = _loaded(), list[tuple[str, int]]()
    library.hf_memopt_gpu_generated.restype = ctypes.c_char_p
    while name := library.hf_memopt_gpu_generated(len(calls)):
        calls.append((name.decode(), library.hf_memopt_gpu_calls(len(calls))))
    return {name: count for name, count in calls if count}


def _loaded() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "hf_memopt_gpu_launches"):
        raise RehearsalError(
            "no GPU stands in in this process; expected one. Start it by: "
            "python -m hf_memopt.prediction.rehearsal -- COMMAND"
        )
    return library
