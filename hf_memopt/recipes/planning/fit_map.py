"""What fits at other lengths and batches with the techniques of one set-up, from few simulations.

More rows and longer rows need more memory, as long as gradients are accumulated. So a cell that fits settles those with
fewer and shorter rows, and one that does not settles those with more and longer ones. The next cell to simulate is the
one that settles most others whichever way it turns out. All rows at once, without accumulation, are a map of their
own: gradients appear while activations are freed, so that this may need less than a half of the rows.

Limitations: the order holds for allocated bytes. Reserved ones are rounded to the allocator's blocks, so that a settled
cell which nearly fills the GPU may be tight where it says that it fits, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hf_memopt.recipes.planning.candidates import Verdict, verdict_of
from hf_memopt.recipes.planning.texts import MULTIPLE
from hf_memopt.reports.plan_file import CellData, FitMapData

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.candidates import Candidate
    from hf_memopt.recipes.planning.simulation import Simulation

__all__ = ["fit_map", "settle"]

MOST_ROWS = 7
PARTS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the planned length
SHORTEST = 16
ORDER: tuple[Verdict, ...] = ("fits", "tight", "over")


def fit_map(one: Candidate, known: Sequence[Candidate], simulation: Simulation, most_tokens: int | None) -> FitMapData:
    """Return the map of a set-up, its cells one for each of its rows and, within it, each of its lengths.

    Args:
        one: the set-up whose techniques are kept.
        known: candidates that were simulated; those of the same set-up are not simulated again.
        simulation: of the model on the GPU.
        most_tokens: that the model has positions for; None for no limit.
    """
    share = one.recipe.effective_batch_size // simulation.world_size
    lengths, rows = _lengths(one.seq_len, most_tokens), _rows(one, share)
    found = {(same.rows, same.seq_len): same.total_bytes for same in known if same.name == one.name}

    def total_bytes(count: int, length: int | None) -> int:
        if (count, length) not in found:
            simulation.announce(f"what fits: {count} rows" + ("" if length is None else f" of {length} tokens"))
            recipe = one.recipe.replace(per_device_train_batch_size=count)
            if recipe.gradient_release:
                recipe = recipe.replace(effective_batch_size=count)
            found[count, length] = simulation.estimate(recipe, length).total_bytes
        return found[count, length]

    def simulated(count: int, length: int | None) -> CellData:
        needed = total_bytes(count, length)
        return {"verdict": verdict_of(one.usable_bytes - needed, one.margin_bytes), "total_bytes": needed}

    accumulated = rows if one.recipe.gradient_release else [count for count in rows if count < share]
    cells: list[list[CellData]] = []
    for part in (accumulated, [count for count in rows if count not in accumulated]):
        cells += settle(part, lengths, simulated)
    return {"lengths": lengths, "rows": rows, "cells": cells}


def settle(
    rows: Sequence[int], lengths: Sequence[int | None], simulate: Callable[[int, int | None], CellData]
) -> list[list[CellData]]:
    """Return a cell for each of ``rows`` and ``lengths``, both ascending, of verdicts that get worse along both."""
    places = [(i, j) for i in range(len(rows)) for j in range(len(lengths))]
    found: dict[tuple[int, int], CellData] = {}
    while open_places := [place for place in places if place not in found]:

        def settles(place: tuple[int, int], among: Sequence[tuple[int, int]] = tuple(open_places)) -> tuple[int, int]:
            i, j = place
            below = sum(r <= i and c <= j for r, c in among)
            above = sum(r >= i and c >= j for r, c in among)
            return min(below, above), max(below, above)

        i, j = max(open_places, key=settles)
        found[i, j] = simulate(rows[i], lengths[j])
        for place in open_places:
            if place not in found and (verdict := _implied(place, found)) is not None:
                found[place] = {"verdict": verdict, "total_bytes": None}
    return [[found[i, j] for j in range(len(lengths))] for i in range(len(rows))]


def _implied(place: tuple[int, int], found: dict[tuple[int, int], CellData]) -> Verdict | None:
    """Return the verdict that is the worst of smaller cells and the best of larger ones; None where they differ."""
    i, j = place
    smaller = [ORDER.index(cell["verdict"]) for (r, c), cell in found.items() if r <= i and c <= j]
    larger = [ORDER.index(cell["verdict"]) for (r, c), cell in found.items() if r >= i and c >= j]
    least, most = max(smaller, default=0), min(larger, default=len(ORDER) - 1)
    return ORDER[least] if least == most else None


def _lengths(seq_len: int | None, most: int | None) -> list[int | None]:
    if seq_len is None:
        return [None]
    rounded = {max(round(part * seq_len / MULTIPLE) * MULTIPLE, SHORTEST) for part in PARTS if part != 1}
    fitting = [length for length in rounded if most is None or length <= most]
    return [*sorted({seq_len, *fitting})]


def _rows(one: Candidate, share: int) -> list[int]:
    """Return the micro-batches of the map, near to powers of two, those of the set-up and all rows among them."""
    if one.recipe.gradient_release:  # the batch as one: the effective batch itself is what can change
        return sorted({count for count in (share // 4, share // 2, share, 2 * share, 4 * share) if count})
    counts = [count for count in range(1, share + 1) if share % count == 0]
    wanted = {1, one.rows, share}
    for count in sorted(counts, key=lambda count: (count & (count - 1) != 0, count)):  # powers of two first
        if len(wanted) < MOST_ROWS:
            wanted.add(count)
    return sorted(wanted)
