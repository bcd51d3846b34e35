"""The caching allocator of a GPU in four numbers, in the place of ``torch.cuda``'s."""

from __future__ import annotations

from typing import Any

__all__ = ["PlayedAllocator"]


class PlayedAllocator:
    """Bytes that are held and reserved, and the most of each since the last reset."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def hold(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, size: int) -> None:
        self.allocated -= size

    def touch(self, size: int) -> None:
        """Allocate and free: only the peak remembers."""
        self.hold(size)
        self.free(size)

    def stats(self, device: Any) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak_allocated}, "small_pool": {}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.peak_reserved}, "small_pool": {}},
            "num_ooms": 0,
        }

    def reset(self, device: Any) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
