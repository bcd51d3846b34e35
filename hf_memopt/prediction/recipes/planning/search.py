"""Search the set-ups of a method for the best that fits, by simulating few of them.

- The micro-batch: memory grows and the time of an example falls with its rows, so the largest that fits is looked for,
  by ``largest_that_fits``. All rows at once may fit where a single one does not: without accumulation, gradients
  appear while activations are freed.
- Bound: no micro-batch of a set-up is faster than all rows at once. Where another candidate that fits is as simple and
  at least as fast as these, or so much faster that it earns its place whatever it has, no smaller one is simulated.
- A technique that only saves memory is never faster than the set-up without it (``SetUp.plainer``), so it is simulated
  only with more rows than fit without it, and where those may still be fast enough.
- Offloading and expandable segments save little: they are simulated only where each set-up without one of them was
  simulated with the same rows, which are the next to those that fit.
- Weights, gradients that are not released, and optimizer state are there whatever the rows and whatever is recomputed.
  Where they alone are more than the GPU has, no other set-up with the same ones is simulated.
- Where what needs least does not fit with a single row either, nothing else is simulated.

Every verdict is a simulation's. The bounds leave out only what cannot be the best, but for that of offloading and
segments: without it 2 of the 63 plans of ``benchmarks/unchanged.py`` were faster in 0.3.0, by 2 and 9 %.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_memopt.prediction.memory import largest_that_fits
from hf_memopt.prediction.memory.step_time import SAME_FRACTION
from hf_memopt.prediction.recipes.planning.set_ups import OFFLOAD, SEGMENTS, SetUp, Technique, on_host
from hf_memopt.units import format_duration

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation

SAVES_LITTLE = {OFFLOAD, SEGMENTS}
MOST_BEYOND = 5  # techniques of one set-up that another may lack: attention, state, memory, tiles, segments


def search(set_ups: Sequence[SetUp], simulation: Simulation) -> None:
    """Simulate set-ups of one method until the best of them, each after its plainer ones, is among the candidates."""
    if simulation.left_bytes:
        set_ups = [one for one in set_ups if not on_host(one.techniques)]
    if not set_ups:
        return
    simulation.place = f"{len(set_ups)} set-ups, first whether any fits: "
    if not _can_fit(set_ups, simulation):
        return
    if simulation.goal == "memory":
        _simulate_smallest(set_ups, simulation)
    else:
        _simulate_fastest(set_ups, simulation)


def _counted(set_ups: Sequence[SetUp], simulation: Simulation) -> Iterator[SetUp]:
    """Yield the set-ups, and have ``announce`` say the number of each and what those before it took."""
    began = time.monotonic()
    for number, set_up in enumerate(set_ups):
        left = (time.monotonic() - began) / max(number, 1) * (len(set_ups) - number)
        soon = f", at most {format_duration(left)} left of this method" if number and left >= 1 else ""
        simulation.place = f"{number + 1} of {len(set_ups)}{soon}: "
        yield set_up
    simulation.place = ""


@dataclass
class _Tried:
    most: float  # rows with which it fits, or its plainer ones do; infinite where more of them are of no use
    least_cost: float  # seconds of an example at least, whatever the rows
    simulated: list[Candidate]  # candidates of the set-up, else those of its plainer ones with its smallest rows


def _simulate_fastest(set_ups: Sequence[SetUp], simulation: Simulation) -> None:
    """Simulate the fastest set-up, and the simplest of those that are as fast."""
    known: dict[tuple[Technique, ...], _Tried] = {}
    fitting: list[Candidate] = []
    too_large = set()  # what is held in any case
    for set_up in _counted(set_ups, simulation):
        if set_up.held in too_large:
            continue
        plainer = {plain: known[plain] for plain in set_up.plainer if plain in known}
        tried = known[set_up.techniques] = _Tried(
            max((one.most for one in plainer.values()), default=0),
            max((one.least_cost for one in plainer.values()), default=0.0),
            [],
        )
        counts = [rows for rows in simulation.row_counts(set_up) if rows > tried.most]
        if not counts:
            continue
        tried.simulated = [one for plain in plainer.values() for one in plain.simulated if one.rows == counts[0]]
        by_little = [plain for plain in set_up.plainer if SAVES_LITTLE & ({*set_up.techniques} - {*plain})]
        if not _may_matter(tried.least_cost, set_up, fitting) or len(tried.simulated) < len(by_little):
            tried.most = math.inf
            continue
        found = tried.simulated = most_rows(set_up, simulation, counts, fitting)
        fits = [one for one in found if one.spare_bytes >= max(one.margin_bytes, simulation.left_bytes)]
        fitting += fits
        of_no_use = (one for one in found if one in fits or not _may_matter(one.cost, set_up, fitting))
        tried.most = max([tried.most, *(one.rows for one in of_no_use)])
        if found and found[-1].rows == simulation.share:
            tried.least_cost = found[-1].cost
        if any(one.floor_bytes > one.usable_bytes for one in found):
            too_large.add(set_up.held)


def most_rows(
    set_up: SetUp, simulation: Simulation, counts: Sequence[int], fitting: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Simulate a set-up until the largest micro-batch that fits is known, and return what was simulated of it."""
    found: dict[int, Candidate] = {}

    def spare_bytes(rows: int) -> int | None:
        if (one := simulation.of(set_up, rows)) is None:
            return None
        found[rows] = one
        return one.spare_bytes - max(one.margin_bytes, simulation.left_bytes)

    def is_worth(rows: int) -> bool:
        return rows not in found or _may_matter(found[rows].cost, set_up, fitting)

    ends = [counts[0], counts[-1]]
    largest = largest_that_fits(counts, spare_bytes, first=ends[::-1] if fitting else ends, is_worth=is_worth)
    if largest is None and list(found) == counts[:1] and _bytes_as_one(found[counts[0]]) <= simulation.gpu.usable_bytes:
        spare_bytes(counts[-1])
    return [found[rows] for rows in sorted(found)]


def _simulate_smallest(set_ups: Sequence[SetUp], simulation: Simulation) -> None:
    """Simulate what needs the least memory, and what is within 5 % of it with as many rows as stay within.

    Those that save most come first, so that others are left out: where one holds more than that in tensors, so do
    those that it saves memory of.
    """
    least = math.inf
    too_much: set[tuple[Technique, ...]] = set()
    near = []
    for set_up in _counted(set_ups[::-1], simulation):
        counts, known = simulation.row_counts(set_up), []
        if set_up.techniques not in too_much:
            ends = [simulation.of(set_up, rows) for rows in dict.fromkeys((counts[0], counts[-1]))]
            known = [one for one in ends if one is not None]
            if not known:
                continue
            least = min([least, *(one.total_bytes for one in known if one.fits)])
            near.append(set_up)
        within = least / (1 - SAME_FRACTION)  # as `equally_fast` counts
        if all(one.context_bytes + sum(one.components.values()) > within for one in known):
            too_much.update(set_up.plainer)
    for set_up in near:

        def spare_bytes(rows: int, set_up: SetUp = set_up) -> int | None:
            one = simulation.of(set_up, rows)
            if one is None:
                return None
            return int(min(least / (1 - SAME_FRACTION), one.usable_bytes - one.margin_bytes)) - one.total_bytes

        counts = simulation.row_counts(set_up)
        largest_that_fits(counts, spare_bytes, first=(counts[0], counts[-1]))


def _may_matter(cost: float, set_up: SetUp, fitting: Iterable[Candidate]) -> bool:
    """Return whether a set-up that takes ``cost`` at least may be the best of those that fit, or the fastest.

    Of what fits and is as fast as one that fits only the simpler counts, so this has no more than ``MOST_BEYOND``.
    """
    beaten = cost * (1 - SAME_FRACTION) ** MOST_BEYOND
    return not any(one.cost < beaten or (one.cost <= cost and one.simplicity <= set_up.simplicity) for one in fitting)


def _bytes_as_one(least: Candidate) -> int:
    """Return what all rows at once need at least, by fewer rows, between whose passes gradients are held."""
    passing = sum(least.components.values()) - least.components["gradients"]
    return max(least.context_bytes + passing, least.floor_bytes)


def _can_fit(set_ups: Sequence[SetUp], simulation: Simulation) -> bool:
    """Return whether the simplest set-up fits, or one of those that need least; offloading, the slowest, comes last."""
    too_large = set()
    in_memory, offloaded = ([one for one in set_ups if one.recipe.offload is offload] for offload in (False, True))
    for set_up in (set_ups[0], *least_set_ups(in_memory), *least_set_ups(offloaded)):
        counts = simulation.row_counts(set_up)
        least = None if set_up.held in too_large else simulation.of(set_up, counts[0])
        if least is None:
            continue
        if least.floor_bytes > least.usable_bytes:
            too_large.add(set_up.held)
        if least.verdict != "over":
            return True
        whole = simulation.of(set_up, counts[-1]) if _bytes_as_one(least) <= least.usable_bytes else None
        if whole is not None and whole.verdict != "over":
            return True
    return False


def least_set_ups(set_ups: Sequence[SetUp]) -> list[SetUp]:
    """Return of each way to hold and compute with the weights the set-up that needs least memory."""
    kept = {}
    for one in set_ups:  # the later, the less it needs
        kept[*one.held[:-1], one.recipe.precision] = one
    return list(kept.values())
