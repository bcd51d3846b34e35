"""Search the set-ups of a method for the best that fits, by simulating few of them.

- The micro-batch: memory grows and the time of an example falls with its rows. All rows at once are simulated, and if
  they do not fit a single one; the line through both tells where to look, and two neighbours prove the largest that
  fits. Every verdict is a simulation's, none that of the line. All rows at once may fit where a single one does not:
  without accumulation, gradients appear while activations are freed.
- Bound: no micro-batch of a set-up is faster than all rows at once, which is simulated first. Where that is slower than
  the best so far, only a single row is simulated besides, for the table.
- Weights, gradients that are not released, and optimizer state are there whatever the rows and whatever is recomputed.
  Where they alone are more than the GPU has, no other set-up with the same ones is simulated.
- Offloading the inputs of checkpointed layers is never faster than keeping them. It is simulated where checkpointing
  alone does not fit with all rows, and may still be faster than the best so far.
- Where the set-up that needs least does not fit with a single row, only the simplest is simulated besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hf_memopt.memory.step_time.prices import equally_fast

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.candidates import Candidate
    from hf_memopt.recipes.planning.set_ups import SetUp
    from hf_memopt.recipes.planning.simulation import Simulation
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["best_of", "explore", "least_set_ups", "row_counts", "search"]


def row_counts(set_up: SetUp, share: int) -> list[int]:
    """Return the micro-batches that a step's examples of one GPU can be cut into; a released gradient needs all."""
    if set_up.recipe.gradient_release:
        return [share]
    return [rows for rows in range(1, share + 1) if share % rows == 0]


def search(set_ups: Sequence[SetUp], simulation: Simulation, share: int, goal: str = "speed") -> list[Candidate]:
    """Return the candidates that were simulated, in the order of the set-ups.

    Args:
        set_ups: of one method.
        simulation: of the model on the GPU.
        share: examples of a step on each GPU.
        goal: as for ``plan``.
    """
    allowed = [one for one in set_ups if set(one.consents) <= set(simulation.allow)]
    found: list[Candidate] = []
    if allowed and not _can_fit(allowed, simulation, share, found):
        found += _simulated([simulation.of(allowed[0], row_counts(allowed[0], share)[0])])
    elif goal == "memory":
        found += _smallest(allowed, simulation, share)
    else:
        best: Candidate | None = None
        too_large: set[Recipe] = set()  # of what is there in any case
        for set_up in allowed:
            if _held(set_up) in too_large:
                continue
            if set_up.recipe.offload and not _needs_offload(set_up, simulation, share, best):
                continue
            explored = explore(set_up, simulation, share, best=best)
            found += explored
            if any(_floor_bytes(one) > one.usable_bytes for one in explored):
                too_large.add(_held(set_up))
            best = best_of([*explored, *([] if best is None else [best])], goal)
    if not any(candidate.fits for candidate in found):
        for set_up in _asking(set_ups, simulation):
            least = simulation.of(set_up, row_counts(set_up, share)[0])
            found += _simulated([least])
            if least is not None and least.verdict == "fits":
                found += explore(set_up, simulation, share)
    return list({id(candidate): candidate for candidate in found}.values())


def _smallest(set_ups: Sequence[SetUp], simulation: Simulation, share: int) -> list[Candidate]:
    """Return every set-up with one and with all rows, and those within 5 % of the least with as many as stay within."""
    found = [(set_up, simulation.of(set_up, row_counts(set_up, share)[0])) for set_up in set_ups]
    known = _simulated(first for _, first in found)
    known += _simulated(simulation.of(set_up, row_counts(set_up, share)[-1]) for set_up in set_ups)
    least = min((candidate.total_bytes for candidate in known if candidate.fits), default=0)
    more = []
    for set_up, first in found:
        for rows in row_counts(set_up, share)[1:]:
            if first is None or not first.fits or not equally_fast(first.total_bytes, least):
                break
            first = simulation.of(set_up, rows)
            more.append(first)
    return [*known, *_simulated(more)]


def explore(set_up: SetUp, simulation: Simulation, share: int, best: Candidate | None = None) -> list[Candidate]:
    """Return the set-up with the micro-batches that were simulated: the largest that fits, and its neighbours.

    Args:
        set_up: without its micro-batch.
        simulation: of the model on the GPU.
        share: examples of a step on each GPU.
        best: the best so far, which a smaller micro-batch has to be faster than; None to find the largest in any case.
    """
    counts = row_counts(set_up, share)
    least = None
    if best is None:
        least = simulation.of(set_up, counts[0])
        if least is None or _floor_bytes(least) > least.usable_bytes:
            return _simulated([least])
    whole = simulation.of(set_up, counts[-1])
    if whole is None or whole.verdict == "fits" or len(counts) == 1:
        return _simulated([whole] if least is whole else [least, whole])
    least = simulation.of(set_up, counts[0])
    if best is not None and best.fits and not _may_beat(whole, best):
        return _simulated([least, whole])
    if least is None or least.verdict != "fits" or len(counts) == 2:
        return _simulated([least, whole])
    found = {counts[0]: least, counts[-1]: whole}
    low, high = 0, len(counts) - 1  # counts[low] fits, counts[high] does not
    while high - low > 1:
        guess = _guess(found[counts[low]], found[counts[high]], counts[low + 1 : high])
        between = simulation.of(set_up, guess)
        if between is None:
            break
        found[guess] = between
        if between.verdict == "fits":
            low = counts.index(guess)
        else:
            high = counts.index(guess)
    return [found[rows] for rows in sorted(found)]


def best_of(candidates: Iterable[Candidate], goal: str = "speed") -> Candidate | None:
    """Return the best candidate that fits, or None: by the goal, and of those within 5 % of it the simplest.

    Of two with the same techniques the faster one is the better.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        return None
    if goal == "longest":
        longest = max(candidate.seq_len or 0 for candidate in fitting)
        fitting = [candidate for candidate in fitting if (candidate.seq_len or 0) == longest]
    if goal == "memory":
        least = min(candidate.total_bytes for candidate in fitting)
        fitting = [candidate for candidate in fitting if equally_fast(candidate.total_bytes, least)]
    fastest = min(candidate.cost for candidate in fitting)
    equal = [candidate for candidate in fitting if equally_fast(candidate.cost, fastest)]
    return min(equal, key=lambda candidate: (candidate.simplicity, candidate.cost))


def _held(set_up: SetUp) -> Recipe:
    """Return what decides how weights, gradients and state are held."""
    return set_up.recipe.replace(checkpointing=False, offload=False, autocast_cache=True, reasons={})


def _floor_bytes(one: Candidate) -> int:
    """Return the bytes that are there whatever the rows, with the context."""
    parts = ["weights", "optimizer state", *([] if one.recipe.gradient_release else ["gradients"])]
    return one.context_bytes + sum(one.components[name] for name in parts)


def _may_beat(whole: Candidate, best: Candidate) -> bool:
    """Return whether a set-up that takes ``whole.cost`` at least may be chosen instead of ``best``."""
    if equally_fast(whole.cost, best.cost):
        return whole.simplicity < best.simplicity or whole.cost < best.cost
    return whole.cost < best.cost


def _guess(fits: Candidate, does_not: Candidate, between: Sequence[int]) -> int:
    """Return the largest of the row counts that the line through two candidates says to fit, or the smallest."""
    slope = (does_not.total_bytes - fits.total_bytes) / (does_not.rows - fits.rows)
    room = fits.spare_bytes - fits.margin_bytes
    if slope <= 0:
        return between[len(between) // 2]
    most = fits.rows + room / slope
    return max((rows for rows in between if rows <= most), default=between[0])


def _can_fit(set_ups: Sequence[SetUp], simulation: Simulation, share: int, found: list[Candidate]) -> bool:
    """Return whether one of those that need least fits with a single row; offloading, which costs most, comes last."""
    too_large: set[Recipe] = set()
    for offload in (False, True):
        for set_up in least_set_ups([one for one in set_ups if one.recipe.offload is offload]):
            if _held(set_up) in too_large:
                continue
            counts = row_counts(set_up, share)
            for rows in dict.fromkeys((counts[0], counts[-1])):
                least = simulation.of(set_up, rows)
                if least is None:
                    break
                found.append(least)
                if least.verdict != "over":
                    return True
                if _floor_bytes(least) > least.usable_bytes:
                    too_large.add(_held(set_up))
                    break
    return False


def _needs_offload(set_up: SetUp, simulation: Simulation, share: int, best: Candidate | None) -> bool:
    """Return whether offloading may help where checkpointing alone is not enough."""
    kept = set_up.without_offload()
    whole = simulation.of(kept, row_counts(kept, share)[-1])
    if whole is None or whole.fits:
        return False
    return best is None or _may_beat(whole, best)


def least_set_ups(set_ups: Sequence[SetUp]) -> list[SetUp]:
    """Return of each way to hold weights and gradients the set-up that needs least memory."""
    kept = {}
    for one in set_ups:  # the later, the less it needs
        kept[_held(one).replace(optim="adamw_torch_fused")] = one
    return list(reversed(kept.values()))


def _asking(set_ups: Sequence[SetUp], simulation: Simulation) -> list[SetUp]:
    """Return one set-up for each set of words of ``allow`` that is missing: the one that needs least memory."""
    missing = [one for one in set_ups if not set(one.consents) <= set(simulation.allow)]
    asking = [one for one in missing if not one.recipe.offload]
    return list({one.consents: one for one in asking}.values())


def _simulated(candidates: Iterable[Candidate | None]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate is not None]
