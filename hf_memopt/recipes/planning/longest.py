"""Find the longest rows that a model can be trained with on a GPU.

Memory grows with the length, nearly along a line, so the line through a length that fits and one that does not tells
where to look, and halving what lies between them is the fallback. Every verdict is a simulation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_memopt.recipes.planning.search import least_set_ups, row_counts
from hf_memopt.recipes.planning.texts import MULTIPLE, Texts

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.candidates import Candidate
    from hf_memopt.recipes.planning.set_ups import SetUp
    from hf_memopt.recipes.planning.simulation import Simulation

__all__ = ["use_longest"]

LONGEST = 131_072  # tokens; no longer rows are looked for


def use_longest(
    simulation: Simulation, set_ups: Mapping[str, Sequence[SetUp]], share: int, most: int | None
) -> list[str]:
    """Let the simulation plan for the longest rows, and return the methods to search.

    Args:
        simulation: of the model; its length is where an adapter has to be taken if full training does not fit there.
        set_ups: those that are allowed, by method.
        share: examples of a step on each GPU.
        most: tokens that the model takes; None for no limit.
    """
    asked = simulation.texts.seq_len
    if asked is None:
        raise ValueError(
            "goal='longest' has no meaning for a model without text; expected another goal. Pass goal='memory'"
        )
    variants = {stage: _variants(of_stage, share) for stage, of_stage in set_ups.items()}
    stages = list(set_ups)
    fitting = [stage for stage in stages if any(_fits(simulation, one, asked) for one in variants[stage])]
    stage = fitting[0] if fitting else stages[-1]
    high = min(most or LONGEST, LONGEST) // MULTIPLE + 1  # in multiples, the first that is not looked at
    low = 0
    for variant in variants[stage]:
        if low + 1 < high and _fits(simulation, variant, (low + 1) * MULTIPLE):
            low = _longest_of(simulation, variant, low + 1, high, asked // MULTIPLE)
    simulation.texts = Texts(max(low, 1) * MULTIPLE)
    return stages[: stages.index(stage) + 1]


def _variants(set_ups: Sequence[SetUp], share: int) -> list[tuple[SetUp, int]]:
    """Return what needs least memory: with single rows, and with all of them, which need no accumulation."""
    found = []
    for set_up in least_set_ups(set_ups):
        counts = row_counts(set_up, share)
        found += [(set_up, rows) for rows in dict.fromkeys((counts[0], counts[-1]))]
    return found


def _longest_of(simulation: Simulation, variant: tuple[SetUp, int], low: int, high: int, guess: int) -> int:
    """Return the largest multiple that fits; ``low`` does, ``high`` does not or is not looked at."""
    known: dict[int, Candidate | None] = {}
    while high - low > 1:
        middle = guess if low < guess < high else (low + high) // 2
        found = _at(simulation, variant, middle * MULTIPLE)
        known[middle] = found
        before = high - low
        if found is not None and found.fits:
            low = middle
        else:
            high = middle
        guess = _guess(known, low, high) if 2 * (high - low) <= before or len(known) < 4 else 0
    return low


def _guess(known: Mapping[int, Candidate | None], low: int, high: int) -> int:
    """Return where the line through the two nearest known lengths meets what the GPU has; 0 for none."""
    ends = sorted(known, key=lambda length: min(abs(length - low), abs(length - high)))[:2]
    if len(ends) < 2:
        return 2 * low
    (one, first), (other, second) = ((length, known[length]) for length in sorted(ends))
    if first is None or second is None or second.total_bytes <= first.total_bytes:
        return 0
    slope = (second.total_bytes - first.total_bytes) / (other - one)
    room = first.spare_bytes - first.margin_bytes
    return min(max(one + int(room / slope), low + 1), high - 1)


def _fits(simulation: Simulation, variant: tuple[SetUp, int], seq_len: int) -> bool:
    found = _at(simulation, variant, seq_len)
    return found is not None and found.fits


def _at(simulation: Simulation, variant: tuple[SetUp, int], seq_len: int) -> Candidate | None:
    simulation.texts = Texts(seq_len)
    return simulation.of(*variant)
