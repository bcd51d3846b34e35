"""What fits at other lengths and batches with the techniques of one set-up, from few simulations.

More rows and longer rows need more memory, as long as gradients are accumulated. So of each length the largest batch
that fits is looked for, no larger than that of the shorter length before it, and fewer rows fit too. All rows at once,
without accumulation, are a map of their own: gradients appear while activations are freed, so that this may need less
than a half of the rows.

Limitations: the order holds for allocated bytes. Reserved ones are rounded to the allocator's blocks, so that a cell
that was not simulated and nearly fills the GPU may be tight where it says that it fits, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hf_memopt.components import Verdict
from hf_memopt.memory import largest_that_fits
from hf_memopt.recipes.planning.model_and_rows import MULTIPLE

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.simulated import Candidate, Simulation
    from hf_memopt.reports.plan import CellData, FitMapData

MOST_ROWS = 7
MORE = (1, 2, 3, 4)  # powers of two of the effective batch, where all of it fits at once
PARTS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the planned length
SHORTEST = 16


def fit_map(one: Candidate, known: Sequence[Candidate], simulation: Simulation) -> FitMapData:
    """Return the map of a set-up: a cell for each of its rows of a micro-batch and, within these, each of its lengths.

    A cell has bytes where it was simulated, and none where others prove its verdict.
    """
    share = simulation.share
    lengths, rows = _lengths(one.seq_len, simulation.facts.most_tokens), _rows(one, share)
    found = {(same.rows, same.seq_len): same.total_bytes for same in known if same.techniques == one.techniques}
    found[one.rows, one.seq_len] = one.total_bytes

    def spare_bytes(count: int, length: int | None) -> int:
        if (count, length) not in found:
            simulation.announce(f"what fits: {count} rows" + ("" if length is None else f" of {length} tokens"))
            recipe = one.recipe.replace(per_device_train_batch_size=count)
            if not recipe.accumulates or count > share:
                recipe = recipe.replace(effective_batch_size=count)
            found[count, length] = simulation.estimate(recipe, length).total_bytes
        return one.usable_bytes - found[count, length]

    accumulated = [count for count in rows if count < share] if one.recipe.accumulates else rows
    cells: list[list[CellData]] = []
    for part in (accumulated, [count for count in rows if count not in accumulated]):
        for count, verdicts in zip(part, settle(part, lengths, spare_bytes, one.margin_bytes), strict=True):
            totals = [found.get((count, length)) for length in lengths]
            pairs = zip(verdicts, totals, strict=True)
            cells.append([{"verdict": verdict, "total_bytes": total} for verdict, total in pairs])
    return {"lengths": lengths, "rows": rows, "cells": cells}


def settle(
    rows: Sequence[int],
    lengths: Sequence[int | None],
    spare_bytes: Callable[[int, int | None], int],
    margin_bytes: int,
) -> list[list[Verdict]]:
    """Return a verdict for each of ``rows`` and ``lengths``, both ascending, which gets worse along both."""
    columns: list[list[Verdict]] = []
    held = len(rows)  # how many of them fit, with the margin or without, with the length before
    for length in lengths:

        def spare(count: int, length: int | None = length) -> int:
            return spare_bytes(count, length) - margin_bytes

        fewer = rows[:held]
        most = largest_that_fits(fewer, spare, first=(*fewer[-1:], *fewer[-2:-1]))
        fitting = 0 if most is None else rows.index(most) + 1
        held = next((at for at in range(fitting, held) if spare_bytes(rows[at], length) < 0), held)
        columns.append(["fits" if at < fitting else "tight" if at < held else "over" for at in range(len(rows))])
    return [list(row) for row in zip(*columns, strict=True)]


def _lengths(seq_len: int | None, most: int | None) -> list[int | None]:
    if seq_len is None:
        return [None]
    rounded = {max(round(part * seq_len / MULTIPLE) * MULTIPLE, SHORTEST) for part in PARTS if part != 1}
    fitting = [length for length in rounded if most is None or length <= most]
    return [*sorted({seq_len, *fitting})]


def _rows(one: Candidate, share: int) -> list[int]:
    """Return the micro-batches of the map, near to powers of two, those of the set-up and all rows among them."""
    if not one.recipe.accumulates or one.rows == share:  # the batch as one: what can grow is the effective batch
        return sorted({count for count in (share // 4, share // 2, share, *(2**n * share for n in MORE)) if count})
    counts = [count for count in range(1, share + 1) if share % count == 0]
    wanted = {1, one.rows, share}
    for count in sorted(counts, key=lambda count: (count & (count - 1) != 0, count)):  # powers of two first
        if len(wanted) < MOST_ROWS:
            wanted.add(count)
    return sorted(wanted)
