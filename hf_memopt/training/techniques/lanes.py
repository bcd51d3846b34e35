"""Every copy between host and device, and every wait for one: nothing else in these folders knows of streams.

Streamed layers and optimizer state on the host share it.

Compute runs on the current stream of the device. Two streams of their own, the lanes, copy beside it: one in, one out.
On a CPU a copy is done when it returns, and its event is None. A double of ``Lanes`` in the tests completes each copy
as late as its event allows.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

ALIGNMENT_BYTES = 512


class Lanes:
    """Copies between the host and the device that computes."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.is_async = self.device.type == "cuda"  # ROCm calls itself cuda
        if self.is_async:
            stream: Any = torch.cuda.Stream
            self._into, self._out = stream(self.device), stream(self.device)

    def fetch(self, host: torch.Tensor, *, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Start a copy to the device; return the device tensor and the event after which it is valid.

        ``into`` is a device tensor whose storage was emptied, in place of a new one. No copy out to ``host`` may be on
        its way: a backward pass, and a step, let all of them land before they end.
        """
        if into is None:
            into = torch.empty_like(host, device=self.device)
        else:
            into.untyped_storage().resize_(host.nbytes)  # the views of it that somebody keeps are whole again
        if not self.is_async:
            into.copy_(host.detach())
            return into, None
        # the block is memory of the compute stream: what was issued there before may still read it
        self._into.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._into):
            into.copy_(host.detach(), non_blocking=True)
        return into, self._into.record_event()

    def ready(self, event: Any) -> None:
        """Let what compute issues from now on wait for a copy in."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def store(self, host: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy to the host, after what compute has issued so far; return the event that readers wait for."""
        if not self.is_async:
            host.detach().copy_(source)
            return None
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.detach().copy_(source, non_blocking=True)
        source.record_stream(self._out)  # its block is not given away before the copy is over
        return self._out.record_event()

    def landed(self, event: Any) -> None:
        """Wait until a copy out is over: the CPU is about to read what it wrote."""
        if event is not None:
            event.synchronize()

    def host_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return uninitialised tensors on the host, contiguous, of the shapes and dtypes of others.

        For a GPU all of them lie in one page-locked buffer, without which copies would not run beside compute. Each has
        a storage of its own, so that saving sees no shared ones. torch's page-locked memory would be rounded up to
        powers of two: of a layer of 550 MB to 1074.
        """
        if not self.is_async:
            return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        *starts, end = accumulate((-(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in tensors), initial=0)
        buffer = _page_locked(end)
        return [
            torch.frombuffer(buffer, dtype=t.dtype, count=t.numel(), offset=start).view(t.shape)  # keeps the buffer
            for t, start in zip(tensors, starts, strict=True)
        ]


class _Pages(mmap.mmap):
    """Pages that the GPU's copy engines reach, until the last tensor in them is gone."""

    unlock: Callable[[], Any] | None = None

    def __del__(self) -> None:
        """Give the pages back to the driver before they are unmapped; a finaliser would run after that."""
        if self.unlock is not None and not sys.is_finalizing():  # the driver unlocks by itself when Python ends
            self.unlock()


def _page_locked(size_bytes: int) -> mmap.mmap:
    """Return pages that the GPU's copy engines reach; they are given back with the last tensor in them."""
    pages = _Pages(-1, max(size_bytes, 1))
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, len(pages), 0))
    if error:
        warnings.warn(
            f"the driver refused to page-lock {size_bytes} bytes of host memory (error {error}), so copies wait for "
            "compute; expected a limit above the size of the model. Raise it: ulimit -l unlimited",
            stacklevel=2,
        )
    else:
        pages.unlock = partial(runtime.cudaHostUnregister, address)
    return pages
