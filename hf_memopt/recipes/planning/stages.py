"""Search method after method: full training, with consent freezing, then LoRA, then QLoRA, until something fits.

The longest rows: memory grows with the length, nearly along a line, so the line through a length that fits and one that
does not tells where to look, and halving is the fallback. Every verdict is a simulation's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_memopt.recipes.planning.search import best_of, explore, least_set_ups, row_counts, search
from hf_memopt.recipes.planning.set_ups import BF16_WEIGHTS, ModelFacts, SetUp, set_ups
from hf_memopt.recipes.planning.texts import MULTIPLE, Texts

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.candidates import Candidate
    from hf_memopt.recipes.planning.set_ups import SetUp
    from hf_memopt.recipes.planning.sharing import Sharing
    from hf_memopt.recipes.planning.simulation import Simulation

__all__ = ["StageSearch", "stages_of"]


def stages_of(method: str, facts: ModelFacts, allow: Sequence[str]) -> list[str]:
    """Return the rungs of the ladder to search, in order."""
    if facts.has_adapters:
        return ["full"]  # all that is trained are its adapters
    full = [] if facts.is_quantized else ["full", *(["freeze"] if "freeze" in allow else [])]
    adapters = (["lora"] if facts.is_quantized else ["lora", "qlora"]) if facts.can_adapt else []
    stages = {"auto": [*full, *adapters], "full": full, "lora": ["lora"], "qlora": ["qlora"]}[method]
    if not stages or (method in ("lora", "qlora") and not set(stages) <= set(adapters)):
        raise ValueError(
            f"method={method!r} cannot train this model: its weights are quantised, or PEFT's rules are not known to "
            "fit it; expected another method. Pass method='auto', or the model's name instead of a module"
        )
    return stages


@dataclass
class StageSearch:
    """The search over stages and lengths."""

    simulation: Simulation
    facts: ModelFacts
    effective_batch_size: int
    share: int
    goal: str
    sharings: Sequence[Sharing | None] = (None,)

    def all_set_ups(self, stages: Iterable[str]) -> list[SetUp]:
        """Return the set-ups that work as the GPUs share a step now."""
        gpu, sharing = self.simulation.gpu, self.simulation.sharing
        every = [one for stage in stages for one in set_ups(stage, self.facts, gpu, self.effective_batch_size)]
        if sharing is None:
            return every
        return [one for one in map(sharing.adapted, every) if one is not None]

    def _allowed(self, stage: str) -> list[SetUp]:
        return [one for one in self.all_set_ups([stage]) if set(one.consents) <= set(self.simulation.allow)]

    def by_length(self, stages: Sequence[str], most: int | None) -> tuple[list[Candidate], Candidate | None]:
        """Return the candidates and the chosen one, with shorter or longer rows where they are asked for."""
        self.simulation.sharing = self.sharings[0]
        if self.goal == "longest":
            stages = use_longest(self.simulation, {stage: self._allowed(stage) for stage in stages}, self.share, most)
        candidates, chosen = self._by_stage(stages)
        length = self.simulation.texts.seq_len
        for part in (2, 4):
            if chosen is not None or "shorter" not in self.simulation.allow or length is None or length < 2 * MULTIPLE:
                break
            self.simulation.texts = self.simulation.texts.shortened(max(length // part, 1), self.share)
            more, chosen = self._by_stage(stages)
            candidates += more
        return [*candidates, *self._lever(chosen)], chosen

    def _lever(self, chosen: Candidate | None) -> list[Candidate]:
        """Return the chosen set-up with bfloat16 weights, which need consent: as it is, and with more rows that fit."""
        if chosen is None or chosen.stage != "full" or BF16_WEIGHTS.consent in self.simulation.allow:
            return []
        self.simulation.sharing = chosen.sharing
        method, _, *rest = chosen.name.split(", ")
        name = ", ".join([method, BF16_WEIGHTS.name, *rest])
        lever = next((one for one in self.all_set_ups(["full"]) if one.name == name), None)
        if lever is None or self.goal != "speed":
            return []
        counts = [rows for rows in row_counts(lever, self.share) if rows >= chosen.rows]
        return explore(lever, self.simulation, counts)

    def _of_stage(self, stage: str, *, offload: bool) -> list[Candidate]:
        """Return the candidates of a method, under each way to share a step that may be of use."""
        found: list[Candidate] = []
        for sharing in self.sharings:
            is_wanted = (sharing is not None and sharing.offload) is offload
            if is_wanted and (sharing is None or sharing.may_improve(best_of(found, self.goal), self.goal)):
                self.simulation.sharing = sharing
                found += search(self.all_set_ups([stage]), self.simulation, self.share, self.goal)
        return found

    def _by_stage(self, stages: Sequence[str]) -> tuple[list[Candidate], Candidate | None]:
        candidates: list[Candidate] = []
        for offload in (False, True):  # the host's memory is unknown, and its optimizer slow
            for stage in stages:
                found = self._of_stage(stage, offload=offload)
                candidates += found
                if (chosen := best_of(found, self.goal)) is not None:
                    return candidates, chosen
        tight = [one for one in candidates if one.verdict == "tight" and not one.consents]
        if not tight:
            return candidates, None
        last = next(stage for stage in reversed(stages) if any(one.stage == stage for one in tight))
        return candidates, max((one for one in tight if one.stage == last), key=lambda one: one.spare_bytes)


# ---- The longest rows


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
