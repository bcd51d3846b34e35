"""Recognise an out-of-memory error, and free what the failed step holds.

Only allocators of torch raise ``torch.OutOfMemoryError``. A driver, a math library or torch's allocator on the host
raises a plain ``RuntimeError`` that is recognised by the beginning of its text. ``out_of_memory.csv`` lists these, each
with its origin and where it was seen. An error that quotes such a text later (a log, the report of another process) is
another error.

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
from collections.abc import Iterator
from types import TracebackType

import torch

from hf_memopt.plain_data import packaged_rows

_TABLE = packaged_rows("hf_memopt.training.devices.readings", "out_of_memory.csv")
_TEXTS = "|".join(re.escape(row["text"]).replace(r"\ ", " +") for row in _TABLE)
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
