"""Limits of the operating system for a block of a test: the largest size of a file, of the memory, and the like."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def resource_limit(kind: int, most: int) -> Iterator[None]:
    """Lower the soft limit of this kind, such as ``resource.RLIMIT_FSIZE``, for a block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
