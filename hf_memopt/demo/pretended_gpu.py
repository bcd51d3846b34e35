"""A CPU that pretends to be a small GPU: what torch allocates is counted, and beyond a limit memory runs out.

Counted is the storage of each tensor that an operation returns, until it is freed, as a GPU's allocator counts it; not
counted are what a kernel of the CPU takes inside itself, and the rounding to blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private in torch 2.6 to 2.13, and used by its own tests
from torch.utils._pytree import tree_leaves

from hf_memopt.techniques.streaming import Lanes


class PretendedGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Counts what is allocated while it is entered, and raises out of memory as CUDA does.

    An operation whose tensors are all on the host returns tensors on the host, and these are not counted.

    Args:
        limit_bytes: the size of the memory; None for no limit.

    Attributes:
        allocated_bytes: at this moment.
        peak_bytes: the most so far.
        times_out_of_memory: how often an allocation was refused.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_bytes = self.times_out_of_memory = 0
        self._known: dict[int, Any] = {}
        self._on_host: set[int] = set()
        self._place: Literal["gpu", "host"] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler to switch it off around each operation; seen in torch 2.6 to 2.13."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        if self._returns_on_host(args, kwargs):
            self.keep_on_host(tensors)
            return out
        for one in tensors:
            size_bytes = self._size_of_new(one)
            if size_bytes and self._is_too_much(size_bytes):
                del out, one, tensors  # freed before anybody reads how much is free
                self._run_out(size_bytes)
            self._count(one, size_bytes)
        return out

    def _returns_on_host(self, args: Any, kwargs: Any) -> bool:
        if self._place is not None or not self._on_host:
            return self._place == "host"
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        return bool(given) and all(one.untyped_storage()._cdata in self._on_host for one in given)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before, such as the weights of a model that is moved to the GPU.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        for one in tensors:
            size_bytes = self._size_of_new(one)
            if self._is_too_much(size_bytes):
                self._run_out(size_bytes)
            self._count(one, size_bytes)

    def keep_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave tensors out of the count from now on."""
        for one in tensors:
            storage = one.untyped_storage()
            key = storage._cdata  # private, seen in torch 2.6 to 2.13
            if key not in self._on_host and key not in self._known:
                self._on_host.add(key)
                weakref.finalize(storage, self._on_host.discard, key)

    @contextmanager
    def on(self, place: Literal["gpu", "host"]) -> Iterator[None]:
        """Take what operations return inside as being there, whatever they read."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def _size_of_new(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        return 0 if key in self._known or key in self._on_host else storage.nbytes()

    def _is_too_much(self, size_bytes: int) -> bool:
        return self.limit_bytes is not None and self.allocated_bytes + size_bytes > self.limit_bytes

    def _count(self, tensor: torch.Tensor, size_bytes: int) -> None:
        if not size_bytes:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata

        def freed(_: Any) -> None:
            del self._known[key]
            self.allocated_bytes -= size_bytes

        self._known[key] = weakref.ref(storage, freed)
        self.allocated_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _run_out(self, size_bytes: int) -> None:
        assert self.limit_bytes is not None
        self.times_out_of_memory += 1
        free = self.limit_bytes - self.allocated_bytes
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size_bytes / 2**20:.2f} MiB. GPU 0 has a total capacity of "
            f"{self.limit_bytes / 2**20:.2f} MiB of which {free / 2**20:.2f} MiB is free."
        )


class PretendedLanes(Lanes):
    """The copies between the host and a pretended GPU, for ``stream_layers``."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__("cpu")
        self._gpu = gpu

    def fetch(self, host: torch.Tensor, *, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Copy to the pretended GPU, where the copy counts."""
        with self._gpu.on("gpu"):
            return super().fetch(host, into=into)

    def host_like(self, tensors: Any) -> list[torch.Tensor]:
        """Return tensors on the host, which do not count."""
        with self._gpu.on("host"):
            return super().host_like(tensors)
