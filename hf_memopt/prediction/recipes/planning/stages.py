"""Search method after method: full training, with consent freezing, then LoRA, then QLoRA, until something fits.

Where LoRA may follow and speed is the goal, full training has to fit with ease, and no LoRA may be much better than it
in float32: rules 3 and 4 of ``choice``. What of it fits with less ease is simulated once LoRA was taken.

Beside the search, and for what a plan shows of it, four things are simulated: what checkpointing would cost and free
of the chosen set-up; what LoRA would, with as many rows; what bfloat16 weights would, which need consent; and where
nothing fits, whether something does with a word of consent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hf_memopt.prediction.memory import largest_that_fits
from hf_memopt.prediction.recipes.planning.choice import EASE_SHARE, RIVAL_MEMORY, best_of, fits_with_ease, rival_of
from hf_memopt.prediction.recipes.planning.model_and_rows import MULTIPLE
from hf_memopt.prediction.recipes.planning.search import least_set_ups, most_rows, search
from hf_memopt.prediction.recipes.planning.set_ups import (
    ADAPTERS,
    BF16_WEIGHTS,
    CHECKPOINTING,
    ModelFacts,
    SetUp,
    set_ups,
)

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes import Recipe
    from hf_memopt.prediction.recipes.planning.set_ups import Technique
    from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation


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


FEWEST_STREAMED = 3  # layers: two are on the GPU at any time


@dataclass
class StageSearch:
    """The search over stages and lengths; what it simulates are the candidates of the simulation."""

    simulation: Simulation

    def set_ups(self, stage: str, *, with_consents: bool = False, streamed: bool = False) -> list[SetUp]:
        """Return the set-ups that are allowed."""
        simulation = self.simulation
        every = list(set_ups(stage, simulation.facts, simulation.gpu, simulation.share, streamed=streamed))
        return [one for one in every if with_consents or simulation.allows(one)]

    def by_length(self, stages: Sequence[str]) -> Candidate | None:
        """Return the chosen candidate, with shorter or longer rows where they are asked for."""
        simulation = self.simulation
        asked = stages
        if self.simulation.goal == "longest":
            stages = use_longest(simulation, {stage: self.set_ups(stage) for stage in stages})
        chosen, length = self._by_stage(stages), simulation.texts.seq_len
        for part in (2, 4):
            if chosen is not None or "shorter" not in simulation.allow or length is None or length < 2 * MULTIPLE:
                break
            simulation.texts = simulation.texts.shortened(max(length // part, 1), self.simulation.share)
            chosen = self._by_stage(stages)
        if chosen is not None:
            self._simulate_other_methods(chosen, asked)
            self._simulate_rivals(chosen)
        if chosen is None or not chosen.fits:
            self._simulate_nearest(stages, chosen)
        return chosen

    def _by_stage(self, stages: Sequence[str]) -> Candidate | None:
        usable_bytes = self.simulation.gpu.usable_bytes
        has_rivals = self.simulation.goal == "speed" and {"full", "lora"} <= {*stages}
        for with_ease in (True, False) if has_rivals else (False,):
            for stage in stages:
                ease_bytes = int(EASE_SHARE * usable_bytes) + 1 if with_ease and stage == "full" else 0
                chosen = self._searched(stage, ease_bytes)
                if chosen is not None and not (ease_bytes and self._has_rival(chosen)):
                    return self._plainest(chosen) if ease_bytes else chosen
        tight = [one for stage in stages for one in self._of(stage) if one.verdict == "tight"]
        if not tight:
            return next((found for found in map(self._streamed, stages) if found is not None), None)
        return max((one for one in tight if one.stage == tight[-1].stage), key=lambda one: one.spare_bytes)

    def _streamed(self, stage: str) -> Candidate | None:
        """Return the best set-up of a stage whose layers wait in host memory; None where that does not hold them."""
        simulation, needs = self.simulation, dict[tuple[Any, bool], int]()
        least_bytes = simulation.parameters // 2  # at 4 bits
        if simulation.goal == "longest" or least_bytes > simulation.host_memory_bytes:
            return None
        if simulation.facts.layers < FEWEST_STREAMED:
            return None
        every = {one: (one.held, one.recipe.embeddings_on_host) for one in self.set_ups(stage, streamed=True)}
        for one, held in every.items():  # what the host holds is the same for all rows, and more with embeddings
            if held not in needs and not needs.get((one.held, False)):
                found = simulation.of(one, simulation.row_counts(one)[0])
                needs[held] = 1 if found is None else found.host_lacks_bytes
        search([one for one, held in every.items() if needs.get(held, 1) == 0], simulation)
        if simulation.goal == "speed":
            self._keep_most(stage, {one.techniques: one for one in every})
        return best_of(self._of(stage), simulation.goal)

    def _keep_most(self, stage: str, streamed: Mapping[tuple[Technique, ...], SetUp]) -> None:
        """Simulate the fastest candidates of up to three batches with as many layers on the GPU as fit."""
        simulation, layers = self.simulation, self.simulation.facts.all_layers
        fitting = [one for one in self._of(stage) if one.fits and one.techniques in streamed]
        fastest = {one.rows: one for one in sorted(fitting, key=lambda one: -one.cost)}
        for one in sorted(fastest.values(), key=lambda one: one.cost)[:3]:
            set_up = streamed[one.techniques]

            def spare_bytes(resident: int, one: Candidate = one, set_up: SetUp = set_up) -> int | None:
                if not resident:
                    return one.spare_bytes - one.margin_bytes
                recipe = set_up.with_resident(resident, layers).with_rows(one.rows)
                return simulation.spare_bytes(recipe, one.seq_len)

            most = largest_that_fits(range(layers), spare_bytes, first=(0, layers - 1))
            if most:
                simulation.of(set_up.with_resident(most, layers), one.rows)

    def _searched(self, stage: str, left_bytes: int = 0) -> Candidate | None:
        self.simulation.left_bytes = left_bytes
        search(self.set_ups(stage), self.simulation)
        self.simulation.left_bytes = 0
        found = self._of(stage)
        return best_of(filter(fits_with_ease, found) if left_bytes else found, self.simulation.goal)

    def _plainest(self, best: Candidate) -> Candidate:
        """Return a candidate without the techniques without which as many rows fit in no more time."""
        every = {one.techniques: one for one in self.set_ups(best.stage)}
        for technique in best.techniques:
            plainer = every.get(tuple(one for one in best.techniques if one is not technique))
            without = None if plainer is None else self.simulation.of(plainer, best.rows)
            if without is not None and without.fits and without.cost <= best.cost:
                return self._plainest(without)
        return best

    def _has_rival(self, full: Candidate) -> bool:
        """Return whether LoRA, simulated in half of the memory, is recommended before the best full training."""
        if full.recipe.precision == "fp32":
            self._searched("lora", left_bytes=full.usable_bytes - int(RIVAL_MEMORY * full.total_bytes))
        return rival_of(full, self.simulation.candidates) is not None

    def _of(self, stage: str) -> list[Candidate]:
        """Return the candidates of a stage with the length of now."""
        now = stage, self.simulation.texts.seq_len
        return [one for one in self.simulation.candidates if (one.stage, one.seq_len) == now]

    def _simulate_rivals(self, chosen: Candidate) -> None:
        """Simulate the chosen set-up with checkpointing, and with bfloat16 weights and the rows that then fit."""
        every = {frozenset(one.techniques): one for one in self.set_ups(chosen.stage, with_consents=True)}
        used = frozenset(chosen.techniques)
        recomputed = every.get(used | {CHECKPOINTING})
        if recomputed is not None and not chosen.recipe.checkpointing:
            self.simulation.of(recomputed, chosen.rows)
        lever = every.get(used - {chosen.techniques[0]} | {BF16_WEIGHTS})
        is_asked_for = self.simulation.goal == "speed" and BF16_WEIGHTS.consent not in self.simulation.allow
        if lever is not None and is_asked_for and chosen.stage == "full":
            counts = [rows for rows in self.simulation.row_counts(lever) if rows >= chosen.rows]
            most_rows(lever, self.simulation, counts)

    def _simulate_other_methods(self, chosen: Candidate, stages: Sequence[str]) -> None:
        """Simulate LoRA with the rows of the chosen full training, or full training that does not fit with ease."""
        if chosen.stage in ADAPTERS and self.simulation.goal == "speed" and "full" in stages:
            self._searched("full")
        if chosen.stage not in ADAPTERS and "lora" in stages:
            plainest = {one.recipe.checkpointing: one for one in reversed(self.set_ups("lora"))}
            for _, one in sorted(plainest.items(), key=lambda item: item[0]):
                found = self.simulation.of(one, chosen.rows)
                if found is not None and found.fits:
                    return

    def _simulate_nearest(self, stages: Sequence[str], chosen: Candidate | None) -> None:
        """Simulate what needs least where nothing is chosen, and what does with each set of words not given."""
        in_memory = [one for one in self.set_ups(stages[-1]) if not one.recipe.offload]
        for set_up in least_set_ups(in_memory) if chosen is None else ():
            self.simulation.of(set_up, self.simulation.row_counts(set_up)[0])
        asking: dict[tuple[str, ...], SetUp] = {}
        for one in (one for stage in stages for one in self.set_ups(stage, with_consents=True)):
            is_plain = not one.recipe.offload and not one.recipe.expandable_segments
            if is_plain and not self.simulation.allows(one):
                asking[one.consents] = one  # the later, the less it needs
        for set_up in asking.values():
            weights = attrgetter("weights_dtype", "load_in", "lora")
            same = (one for one in self.simulation.candidates if weights(one.recipe) == weights(set_up.recipe))
            if not any(one.context_bytes + one.components["weights"] > one.usable_bytes for one in same):
                most_rows(set_up, self.simulation, self.simulation.row_counts(set_up))


# ---- The longest rows


LONGEST = 131_072  # tokens; no longer rows are looked for


def use_longest(simulation: Simulation, set_ups: Mapping[str, Sequence[SetUp]]) -> list[str]:
    """Let the simulation plan for the longest rows, and return the methods to search."""
    texts, asked, share = simulation.texts, simulation.texts.seq_len, simulation.share
    if asked is None:
        raise ValueError(
            "goal='longest' has no meaning for a model without text; expected another goal. Pass goal='memory'"
        )
    # what needs least, with single rows, and with all of them, which need no accumulation
    variants = {
        stage: [
            one.with_rows(rows)
            for kept in (of_stage, [one for one in of_stage if not one.recipe.offload])  # the host may be small
            for one in reversed(least_set_ups(kept))
            for rows in dict.fromkeys((simulation.row_counts(one)[0], share))
        ]
        for stage, of_stage in set_ups.items()
    }

    @cache
    def spare_bytes(recipe: Recipe, seq_len: int) -> int | None:
        simulation.announce(f"the longest rows: {seq_len} tokens")
        return simulation.spare_bytes(recipe, seq_len)

    def fits(recipe: Recipe, seq_len: int) -> bool:
        spare = spare_bytes(recipe, seq_len)
        return spare is not None and spare >= 0

    stages = list(set_ups)
    stage = next((one for one in stages if any(fits(recipe, asked) for recipe in variants[one])), stages[-1])
    found, lengths = 0, _lengths(min(texts.longest or LONGEST, simulation.facts.most_tokens or LONGEST, LONGEST))
    for recipe in variants[stage]:
        longer = [length for length in lengths if length > found]
        if longer and fits(recipe, longer[0]):
            first = asked, 16 * asked  # the line through them leads near the end, where simulations take longest
            found = largest_that_fits(longer, partial(spare_bytes, recipe), first=first) or found
    simulation.texts = texts.shortened(max(found, MULTIPLE), share)
    return stages[: stages.index(stage) + 1]


def _lengths(limit: int) -> list[int]:
    """Return the lengths to choose from, at most 1 % apart: multiples of 8, from 2,048 on of 16, and so on."""
    apart = ((length, max(MULTIPLE, (1 << length.bit_length()) >> 8)) for length in range(MULTIPLE, limit, MULTIPLE))
    return [*(length for length, step in apart if length % step == 0), limit // MULTIPLE * MULTIPLE]
