"""Cut the examples that a bucketed stream holds into groups, a batch for each process. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Entry", "cut_groups"]

Entry = tuple[int, float, int, Any]  # padded length, random tie-break, position in the pass, example


def cut_groups(
    held: list[Entry], rows_at: Callable[[int], int], world_size: int, *, full_only: bool
) -> tuple[list[list[Entry]], list[Entry]]:
    """Return the groups, each with its longest example first, and the examples that fill none.

    The groups are cut from the longest examples downwards, so that what is left over are the shortest.

    Args:
        held: examples in ascending order.
        rows_at: how many rows of a padded length a batch holds.
        world_size: batches of a group.
        full_only: whether batches with fewer rows than that are never cut.
    """
    groups, end = [], len(held)
    while end >= world_size:
        size = rows_at(held[end - 1][0]) * world_size
        if full_only and end < size:
            break
        size = min(size, end - end % world_size)
        groups.append(held[end - size : end][::-1])
        end -= size
    return groups, held[:end]
