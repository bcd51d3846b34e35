"""The buffer of a bucketed stream: examples sorted by padded length, and how they are cut into groups. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["Entry", "StreamBuffer"]

Entry = tuple[int, float, int, Any]  # padded length, random tie-break, position in the pass, example


class StreamBuffer:
    """The examples that are held, sorted by padded length, and how they are cut into groups.

    Args:
        rows_at: how many rows of a padded length a batch holds.
        world_size: batches of a group.
        generator: draws the group to hand out.
        full_only: whether batches with fewer rows than that are never cut.
    """

    def __init__(
        self, rows_at: Callable[[int], int], world_size: int, generator: np.random.Generator, *, full_only: bool
    ) -> None:
        self.held: list[Entry] = []
        self.rows_at, self.world_size, self.generator, self.full_only = rows_at, world_size, generator, full_only

    def take(self) -> list[Entry]:
        """Remove one group, drawn at random, and return it, longest example first."""
        cuts = self._cuts()
        drawn = int(self.generator.integers(len(cuts)))
        # The last cut has what the others left, so it is drawn as a full group of the shortest instead.
        start, end = (0, self._shortest_group()) if drawn == len(cuts) - 1 else cuts[drawn]
        group = self.held[start:end][::-1]
        del self.held[start:end]
        return group

    def drain(self) -> Iterator[list[Entry]]:
        """Yield all groups in random order and leave what fills none."""
        cuts = self._cuts()
        for i in self.generator.permutation(len(cuts)):
            start, end = cuts[i]
            yield self.held[start:end][::-1]
        del self.held[cuts[-1][0] if cuts else len(self.held) :]

    def _cuts(self) -> list[tuple[int, int]]:
        """Return where the groups begin and end, from the longest examples downwards."""
        cuts, end = [], len(self.held)
        while end >= self.world_size:
            size = self.rows_at(self.held[end - 1][0]) * self.world_size
            if self.full_only and end < size:
                break
            size = min(size, end - end % self.world_size)
            cuts.append((end - size, end))
            end -= size
        return cuts

    def _shortest_group(self) -> int:
        """Return how many of the shortest examples fill one group."""
        size = self.world_size
        while size + self.world_size <= len(self.held):
            if size // self.world_size + 1 > self.rows_at(self.held[size + self.world_size - 1][0]):
                break
            size += self.world_size
        return size
