"""A CPU that pretends to be a small GPU: what torch allocates is counted, and beyond a limit memory runs out.

Counted is the storage of each tensor that an operation returns, until it is freed, as a GPU's allocator counts it; not
counted are what a kernel of the CPU takes inside itself, and the rounding to blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # private in torch 2.6 to 2.13, and used by its own tests
from torch.utils._pytree import tree_leaves

from hf_memopt.training.techniques import Lanes


class PretendedGpu(TorchDispatchMode):
    """Counts what is allocated while it is entered, and raises out of memory as CUDA does.

    An operation whose tensors are all on the host returns tensors on the host, and these are not counted.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_bytes = self.times_out_of_memory = 0
        self._known: dict[int, Any] = {}
        self._on_host: set[int] = set()
        self._place: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler to switch it off; seen in 2.6 to 2.13
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if self._returns_on_host(args, kwargs):
            self.keep_on_host(tensors)
            return out
        try:
            self.hold(tensors)
        except torch.OutOfMemoryError as error:
            del out, tensors  # freed before anybody reads how much is free
            raise error.with_traceback(None) from None
        return out

    def _returns_on_host(self, args: Any, kwargs: Any) -> bool:
        if self._place is not None or not self._on_host:
            return self._place == "host"
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        return bool(given) and all(tensor.untyped_storage()._cdata in self._on_host for tensor in given)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages that are new, such as the weights of a model that is moved to the GPU."""
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            key, size_bytes = storage._cdata, storage.nbytes()  # private, seen in torch 2.6 to 2.13
            if key in self._known or key in self._on_host or not size_bytes:
                continue
            free_bytes = None if self.limit_bytes is None else self.limit_bytes - self.allocated_bytes
            if free_bytes is not None and size_bytes > free_bytes:
                self.times_out_of_memory += 1
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size_bytes / 2**20:.2f} MiB. GPU 0 has a total capacity "
                    f"of {self.limit_bytes / 2**20:.2f} MiB of which {free_bytes / 2**20:.2f} MiB is free."
                )
            self._known[key] = weakref.ref(storage, partial(self._free, key, size_bytes))
            self.allocated_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _free(self, key: int, size_bytes: int, _: Any) -> None:
        del self._known[key]
        self.allocated_bytes -= size_bytes

    def keep_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave tensors out of the count from now on."""
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            if storage._cdata not in self._on_host and storage._cdata not in self._known:
                self._on_host.add(storage._cdata)
                weakref.finalize(storage, self._on_host.discard, storage._cdata)

    @contextmanager
    def on(self, place: str) -> Iterator[None]:
        """Take what operations return inside as being on the ``"gpu"`` or the ``"host"``, whatever they read."""
        self._place = place
        try:
            yield
        finally:
            self._place = None


class PretendedLanes(Lanes):
    """The copies between the host and a pretended GPU, for ``stream_layers``."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__("cpu")
        self._gpu = gpu

    def fetch(self, host: torch.Tensor, *, into: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        with self._gpu.on("gpu"):  # where the copy counts
            return super().fetch(host, into=into)

    def host_like(self, tensors: Any) -> list[torch.Tensor]:
        with self._gpu.on("host"):
            return super().host_like(tensors)
