"""Which optimizer state waits in host memory, and in which chunks it visits the GPU; the estimate counts by it too."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

CHUNK_BYTES = 2**27
"""Of a chunk. A copy of 16 MiB reaches the speed of the bus already; a larger chunk only takes more of the GPU."""

SMALLEST_BYTES = 4096
"""Of a tensor that waits. Smaller ones, counters and tables of constants, cost more to copy than to keep."""


def cut_into_chunks(sizes: Iterable[int], chunk_bytes: int = CHUNK_BYTES) -> list[slice]:
    """Return consecutive chunks of at most ``chunk_bytes``; what is larger is one of its own.

    Examples:
        >>> cut_into_chunks([30, 50, 40, 200], 100)
        [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    starts: list[int] = []
    end = total = 0
    for end, size in enumerate(sizes, 1):
        if not starts or total + size > chunk_bytes:
            starts.append(end - 1)
            total = 0
        total += size
    return [slice(start, stop) for start, stop in pairwise([*starts, end])]
