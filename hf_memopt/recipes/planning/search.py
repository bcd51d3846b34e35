"""Search the set-ups of a method for the best that fits, by simulating few of them.

- The micro-batch: memory grows and the time of an example falls with its rows. All rows at once are simulated, and if
  they do not fit a single one; the line through both tells where to look, and two neighbours prove the largest that
  fits. Every verdict is a simulation's, none that of the line. All rows at once may fit where a single one does not:
  without accumulation, gradients appear while activations are freed.
- Bound: no micro-batch of a set-up is faster than a larger one, and all rows at once are simulated first. Where another
  candidate that fits is as simple and at least as fast, or more than 5 % faster, no smaller one is simulated but a
  single row, for the table.
- Weights, gradients that are not released, and optimizer state are there whatever the rows and whatever is recomputed.
  Where they alone are more than the GPU has, no other set-up with the same ones is simulated.
- So are weights alone, whatever else a set-up does with them. All rows at once need what a single one needs between its
  passes, without the gradients that it holds there.
- A technique that only saves memory is never faster than the set-up without it (``SetUp.plainer``): partial
  checkpointing, offloading, expandable segments, less optimizer state of adapters. It is simulated with more rows than
  fit without it, where those may still be fast enough; partial checkpointing also only where it fits with more layers.
- Where the set-up that needs least does not fit with a single row, only the simplest is simulated besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hf_memopt.memory.step_time.prices import SAME_FRACTION, equally_fast
from hf_memopt.recipes.planning.set_ups import CHECKPOINTING

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


def search(
    set_ups: Sequence[SetUp],
    simulation: Simulation,
    share: int,
    goal: str = "speed",
) -> list[Candidate]:
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
        found += _best_and_rivals(allowed, simulation, share)
    if not any(candidate.fits for candidate in found):
        for set_up in _asking(set_ups, simulation):
            if _weights_too_large(set_up, found):
                continue
            least = simulation.of(set_up, row_counts(set_up, share)[0])
            found += _simulated([least])
            if least is not None and least.verdict == "fits":
                found += explore(set_up, simulation, row_counts(set_up, share))
    return list({id(candidate): candidate for candidate in found}.values())


def _best_and_rivals(set_ups: Sequence[SetUp], simulation: Simulation, share: int) -> list[Candidate]:
    """Return the candidates among which the fastest and the simplest of the fast are."""
    found: dict[str, list[Candidate]] = {}
    fitting: list[Candidate] = []
    too_large: set[Recipe] = set()  # of what is there in any case
    by_name = {set_up.name: set_up for set_up in set_ups}
    for set_up in set_ups:
        counts = row_counts(set_up, share)
        if _held(set_up) in too_large:
            continue
        if set_up.plainer:
            counts = _counts_worth_it(set_up, counts, found, fitting)
            counts = _counts_of_leaner(set_up, counts, by_name, simulation)
        if counts:
            explored = found[set_up.name] = explore(set_up, simulation, counts, fitting)
            fitting += [one for one in explored if one.fits]
            if any(_floor_bytes(one) > one.usable_bytes for one in explored):
                too_large.add(_held(set_up))
    return [*(one for explored in found.values() for one in explored), *_refused(fitting, by_name, simulation)]


def _refused(fitting: Sequence[Candidate], by_name: Mapping[str, SetUp], simulation: Simulation) -> list[Candidate]:
    """Return the best set-up with checkpointing as well, so that its reason says what that would cost and free."""
    best = best_of(fitting)
    added = None if best is None else by_name.get(f"{best.name}, {CHECKPOINTING.name}")
    if best is None or added is None:
        return []
    return _simulated(simulation.of(added, rows) for rows in dict.fromkeys((1, best.rows)))


def _counts_worth_it(
    set_up: SetUp, counts: Sequence[int], found: Mapping[str, Sequence[Candidate]], fitting: Sequence[Candidate]
) -> list[int]:
    """Return the row counts with which a set-up that is never faster than others may be of use: those they do not fit.

    Args:
        set_up: that only saves memory compared with its ``plainer`` ones.
        counts: its row counts.
        found: candidates of the set-ups so far, by name.
        fitting: those that fit.
    """
    for name in set_up.plainer:
        plain = found.get(name, ())
        if not plain or plain[-1].fits or not _may_matter(plain[-1].cost, set_up, fitting):
            return []
        most = max((one.rows for one in plain if one.fits), default=0)
        counts = [rows for rows in counts if rows > most]
        next_ones = [one for one in plain if one.rows == counts[0]]
        if not next_ones or _least_bytes(next_ones[0], set_up) > next_ones[0].usable_bytes:
            return []
    return list(counts)


def _counts_of_leaner(
    set_up: SetUp, counts: Sequence[int], by_name: Mapping[str, SetUp], simulation: Simulation
) -> list[int]:
    """Return the row counts that may fit: where recomputing more layers does not, recomputing fewer does not either."""
    leaner = [by_name[name] for name in set_up.leaner if name in by_name]
    for one in leaner if counts else ():
        least = simulation.of(one, counts[0])
        if least is None or not least.fits:
            return []
    if leaner and len(counts) > 1:
        whole = simulation.of(leaner[0], counts[-1])
        return list(counts if whole is not None and whole.fits else counts[:-1])
    return list(counts)


def _least_bytes(plain: Candidate, set_up: SetUp) -> int:
    """Return what a set-up needs at least, by its plainer one with the same rows."""
    changed = set_up.recipe
    total_bytes = plain.context_bytes + plain.margin_bytes + sum(plain.components.values())
    if changed.optim != plain.recipe.optim:
        return total_bytes - plain.components["optimizer state"]
    return total_bytes if changed.expandable_segments and not plain.recipe.expandable_segments else 0


def _smallest(set_ups: Sequence[SetUp], simulation: Simulation, share: int) -> list[Candidate]:
    """Return what may need the least memory, and what is within 5 % of it with as many rows as stay within.

    Those that save most come first, so that most others are left out: by what is there whatever the rows; where only
    some layers are recomputed, by what recomputing all of them needs; without expandable segments, by what they need.
    """
    least = float("inf")
    floors: dict[Recipe, int] = {}
    near: list[tuple[SetUp, Candidate]] = []
    found: dict[tuple[str, int], Candidate] = {}
    for set_up in reversed(set_ups):
        counts = row_counts(set_up, share)
        for rows in dict.fromkeys((counts[0], counts[-1])):
            if floors.get(_held(set_up), 0) > _within(least):
                break
            leaner = [found[name, rows] for name in set_up.leaner if (name, rows) in found]
            if any(one.total_bytes > _within(least) for one in leaner):
                continue
            one = simulation.of(set_up, rows)
            if one is None:
                break
            found[set_up.name, rows] = one
            floors[_held(set_up)] = _floor_bytes(one)
            if one.fits:
                least = min(least, one.total_bytes)
            if rows == counts[0]:
                near.append((set_up, one))
    more = []
    for set_up, first in near:
        last: Candidate | None = first
        for rows in row_counts(set_up, share)[1:]:
            if last is None or not last.fits or last.total_bytes > _within(least):
                break
            last = simulation.of(set_up, rows)
            more.append(last)
    return [*found.values(), *_simulated(more)]


def _within(least: float) -> float:
    """Return the most bytes that count as no more than ``least``, as ``equally_fast`` counts."""
    return least / (1 - SAME_FRACTION)


def explore(
    set_up: SetUp, simulation: Simulation, counts: Sequence[int], fitting: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Return the set-up with the micro-batches that were simulated: the largest that fits, and its neighbours.

    Args:
        set_up: without its micro-batch.
        simulation: of the model on the GPU.
        counts: row counts to choose from, in order.
        fitting: candidates that fit, which a smaller micro-batch has to be faster or simpler than; () to find the
            largest in any case.
    """
    least = None
    accumulates = counts[-1] * simulation.world_size < set_up.recipe.effective_batch_size
    if accumulates or not fitting:
        least = simulation.of(set_up, counts[0])
        if least is None or (least.verdict != "fits" and (accumulates or _bytes_as_one(least) > least.usable_bytes)):
            return _simulated([least])
    whole = simulation.of(set_up, counts[-1])
    if whole is None or whole.verdict == "fits" or len(counts) == 1:
        return _simulated([whole] if least is whole else [least, whole])
    least = simulation.of(set_up, counts[0])
    if not _may_matter(whole.cost, set_up, fitting):
        return _simulated([least, whole])
    if least is None or least.verdict != "fits" or len(counts) == 2:
        return _simulated([least, whole])
    found = {counts[0]: least, counts[-1]: whole}
    low, high = 0, len(counts) - 1  # counts[low] fits, counts[high] does not
    while high - low > 1 and _may_matter(found[counts[high]].cost, set_up, fitting):
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
    return set_up.recipe.replace(
        checkpointing=False,
        every_n_layers=1,
        offload=False,
        autocast_cache=True,
        expandable_segments=False,
        attn_implementation="sdpa",
        reasons={},
    )


def _floor_bytes(one: Candidate) -> int:
    """Return the bytes that are there whatever the rows, with the context."""
    parts = ["weights", "optimizer state", *([] if one.recipe.gradient_release else ["gradients"])]
    return one.context_bytes + sum(one.components[name] for name in parts)


def _bytes_as_one(least: Candidate) -> int:
    """Return what all rows at once need at least, by fewer rows, between whose passes gradients are held."""
    passing = sum(least.components.values()) - least.components["gradients"]
    return max(least.context_bytes + passing, _floor_bytes(least))


def _weights_too_large(set_up: SetUp, found: Iterable[Candidate]) -> bool:
    """Return whether the weights alone, as others have them too, are more than the GPU has."""
    return any(
        _loaded(one.recipe) == _loaded(set_up.recipe)
        and one.context_bytes + one.components["weights"] > one.usable_bytes
        for one in found
    )


def _loaded(recipe: Recipe) -> tuple[object, ...]:
    return recipe.weights_dtype, recipe.load_in, recipe.lora


def _may_matter(cost: float, set_up: SetUp, fitting: Iterable[Candidate]) -> bool:
    """Return whether a set-up that takes ``cost`` at least may be the best of those that fit, or the fastest."""
    for one in fitting:
        if one.cost <= cost and (one.simplicity <= set_up.simplicity or not equally_fast(one.cost, cost)):
            return False
    return True


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
            if _held(set_up) in too_large or _weights_too_large(set_up, found):
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


def least_set_ups(set_ups: Sequence[SetUp]) -> list[SetUp]:
    """Return of each way to hold weights and gradients the set-up that needs least memory."""
    kept = {}
    for one in set_ups:  # the later, the less it needs
        kept[_held(one).replace(optim="adamw_torch_fused")] = one
    return list(reversed(kept.values()))


def _asking(set_ups: Sequence[SetUp], simulation: Simulation) -> list[SetUp]:
    """Return one set-up for each set of words of ``allow`` that is missing: the one that needs least memory."""
    missing = [one for one in set_ups if not set(one.consents) <= set(simulation.allow)]
    asking = [one for one in missing if not one.recipe.offload and not one.recipe.expandable_segments]
    return list({one.consents: one for one in asking}.values())


def _simulated(candidates: Iterable[Candidate | None]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate is not None]
