"""Recognise an out-of-memory error, and free what the failed step holds.

Only allocators of torch raise ``torch.OutOfMemoryError``. A driver, a math library or torch's allocator on the host
raises a plain ``RuntimeError`` that is recognised by the beginning of its text, listed in ``OUT_OF_MEMORY_TEXTS``. An
error that quotes such a text later (a log, the report of another process) is another error.

Not recognised, since a smaller batch does not help or the process cannot continue: Python's ``MemoryError``,
``CUDNN_STATUS_NOT_SUPPORTED`` and "unable to find an engine" (a layout or a size that cuDNN has no kernel for),
``CUFFT_INTERNAL_ERROR`` (also a driver that does not know the GPU), shared memory that a Triton kernel lacks,
NCCL's "Cuda failure 'out of memory'" (the other ranks wait forever), and bitsandbytes' own kernels, which print and
exit.
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch

__all__ = ["OUT_OF_MEMORY_TEXTS", "free_failed_step", "is_out_of_memory"]

OUT_OF_MEMORY_TEXTS: Mapping[str, str] = {
    "CUDA out of memory": "torch's CUDA allocator (c10/cuda/CUDACachingAllocator.cpp)",
    "CUDA error: out of memory": "a call of the CUDA runtime (c10/cuda/CUDAException.cpp)",
    "CUDA driver error: out of memory": "expandable segments (c10/cuda/driver_api.h)",
    "CUBLAS_STATUS_ALLOC_FAILED": "cuBLAS' workspace (aten/src/ATen/cuda/Exceptions.cpp)",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate": (
        "cuBLAS' handle on a full GPU (https://discuss.pytorch.org/t/125450). After a failed assertion on the device "
        "cuBLAS says the same, but then whatever is run next fails with that assertion"
    ),
    "CUDNN_STATUS_NOT_INITIALIZED": "cuDNN's handle on a full GPU (https://github.com/haotian-liu/LLaVA/issues/392)",
    "CUDNN_STATUS_ALLOC_FAILED": "cuDNN 8 (docs.nvidia.com/deeplearning/cudnn, cudnnStatus_t)",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "cuDNN 9 (the same page)",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "cuDNN 9 (the same page)",
    "CUSOLVER_STATUS_ALLOC_FAILED": "cuSOLVER's workspace (aten/src/ATen/cuda/Exceptions.cpp)",
    "CUDA error: resource allocation failed when calling `cusparse": (
        "cuSPARSE (TORCH_CUDASPARSE_CHECK in aten/src/ATen/cuda/Exceptions.h, text of cusparseGetErrorString)"
    ),
    "CUDA error: insufficient resources when calling `cusparse": (
        "cuSPARSE's workspace (https://github.com/pytorch/pytorch/issues/104108)"
    ),
    "CUFFT_ALLOC_FAILED": "cuFFT's workspace (aten/src/ATen/native/cuda/CuFFTUtils.h)",
    "HIPFFT_ALLOC_FAILED": "the same on ROCm, translated",
    "Triton Error [CUDA]: out of memory": "a kernel's launch (third_party/nvidia/backend/driver.c of triton)",
    "Triton Error [HIP]: Code: 2,": "the same on ROCm (third_party/amd/backend/driver.c); 2 is hipErrorOutOfMemory",
    "HIP out of memory": "torch's allocator on ROCm, whose sources are translated from CUDA's",
    "HIP error: out of memory": "a call of the HIP runtime (c10/hip/HIPException.cpp, translated)",
    "HIPBLAS_STATUS_ALLOC_FAILED": "hipBLAS' workspace (aten/src/ATen/cuda/Exceptions.cpp)",
    "XPU out of memory": "torch's XPU allocator (c10/xpu/XPUCachingAllocator.cpp)",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY": "Level Zero (https://github.com/intel/torch-xpu-ops/issues/5432)",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY": "Level Zero (ur_api.h)",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES": "Level Zero (https://github.com/pytorch/pytorch/issues/190972)",
    "NPU out of memory": "torch_npu's allocator (torch_npu/csrc/core/npu/NPUCachingAllocator.cpp)",
    "MPS backend out of memory": "torch's MPS allocator (aten/src/ATen/mps/MPSAllocator.mm)",
    "Invalid buffer size: ": "the same, for a tensor larger than one Metal buffer may be",
    "DefaultCPUAllocator: can't allocate memory": "the host on Linux and macOS (c10/core/impl/alloc_cpu.cpp)",
    "DefaultCPUAllocator: not enough memory": "the host on Windows (the same file)",
}
"""Texts of a ``RuntimeError`` that mean out of memory, each with its origin and where it was seen."""

_TEXTS = "|".join(re.escape(text).replace(r"\ ", " +") for text in OUT_OF_MEMORY_TEXTS)
_BEGINNING = re.compile(
    r"(?:(?:CUDA|cuDNN|cusolver|cuFFT|HIP) error: |cuDNN Frontend error: .*?(?=CUDNN_)|\[enforce fail at [^]]*\] .*?"
    rf"|(?:level_zero|UR) backend .*?\d+ \()?(?:{_TEXTS})"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out: on the accelerator, in a math library, or in torch's allocator on the host.

    True also for an error raised ``from`` such an error, but not for one raised while such an error was handled.

    Examples:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("worker 3 said: CUDA error: out of memory"))
        False
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        if isinstance(cause, RuntimeError) and _BEGINNING.match(str(cause)):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def free_failed_step() -> None:
    """Free what a failed step holds; call it after the ``except`` block that caught the error.

    An exception keeps the frames it passed through, and they keep their tensors. The caught exception is freed with its
    ``except`` block; one that ended a notebook's cell or a line of the interpreter is kept in ``sys``, and one that a
    caller is handling is kept until the caller's block ends. The local variables of their finished frames are dropped,
    whatever the errors were: type, text and lines remain, but a debugger finds no variables any more. Then reference
    cycles are collected and the caches of the accelerators' allocators emptied.
    """
    for kept in _kept_tracebacks():
        traceback.clear_frames(kept)  # skips frames that still run
    gc.collect()
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            module.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _kept_tracebacks() -> Iterator[TracebackType]:
    """Yield the tracebacks of the last uncaught errors and of the one being handled, with their causes."""
    last = getattr(sys, "last_traceback", None)
    if last is not None:
        yield last
    waiting = [getattr(sys, "last_exc", None), getattr(sys, "last_value", None), sys.exception()]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        waiting += [error.__cause__, error.__context__]
        if error.__traceback__ is not None:
            yield error.__traceback__
