"""``plan``: the set-up of the stock ``Trainer`` that suits a goal best of those that fit a GPU, without the GPU.

Formula:
    A set-up fits where reserved bytes + CUDA's context + a margin of 5 % of the GPU are at most what is usable of it.

Full training is searched first. With ``method="auto"`` LoRA follows where nothing of it fits, and QLoRA where LoRA does
not. What changes the training in another way is used where ``allow`` has its word.

Limitations: what ``estimate`` cannot simulate. Evaluation is that of one batch. On several GPUs the buffers of DDP are
not counted, and neither sharding nor the time of communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_memopt.memory.recording.kept_models import keeping_models
from hf_memopt.recipes.planning.candidates import Candidate
from hf_memopt.recipes.planning.model_facts import facts_of
from hf_memopt.recipes.planning.nearest import Shortfall, shortfall_of
from hf_memopt.recipes.planning.reasons import with_reasons
from hf_memopt.recipes.planning.request import (
    GOALS,
    METHODS,
    MULTIPLE,
    Texts,
    checked_allow,
    checked_batch,
    checked_word,
    read_gpu,
)
from hf_memopt.recipes.planning.search import best_of, least_set_ups, row_counts, search
from hf_memopt.recipes.planning.set_ups import ModelFacts, SetUp, set_ups
from hf_memopt.recipes.planning.simulation import Simulation
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike
    from torch import nn
    from transformers import PretrainedConfig

    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.recipes.recipe import Recipe

__all__ = ["Plan", "plan"]

LONGEST = 131_072  # tokens; no longer rows are looked for
NAMES = {"full": "full training", "freeze": "freezing", "lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True, eq=False)
class Plan:
    """What ``plan`` found.

    Attributes:
        model: its display name.
        parameters: elements of all parameters.
        gpu: with what is usable of it: the budget, if there was one.
        goal: "speed", "memory" or "longest".
        method: that was asked for.
        allow: the words of consent that were given.
        effective_batch_size: examples of an optimizer step, on all GPUs.
        world_size: GPUs.
        texts: the lengths it is planned for.
        candidates: every set-up that was simulated, each with its reason.
        chosen: the best of them; None where none fits.
        shortfall: where none fits, what is missing and what would fit; None otherwise.
        notes: what was decided or assumed.
        simulations: how many there were, those of shorter rows included.
    """

    model: str
    parameters: int
    gpu: Gpu
    goal: str
    method: str
    allow: tuple[str, ...]
    effective_batch_size: int
    world_size: int
    texts: Texts
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    shortfall: Shortfall | None = None
    notes: tuple[str, ...] = ()
    simulations: int = 0

    @property
    def fits(self) -> bool:
        """Whether a set-up was found."""
        return self.chosen is not None

    @property
    def recipe(self) -> Recipe:
        """The chosen recipe, with the reason for every choice.

        Raises:
            ValueError: none fits.
        """
        if self.chosen is None:
            raise ValueError(
                f"model=<{self.model}> has no plan that fits {self.gpu.name}; expected one that does. "
                "See what would fit: print(plan)"
            )
        return self.chosen.recipe

    def table(self, width: int = 80) -> str:
        """Return the plan as text of at most ``width`` columns."""
        from hf_memopt.recipes.planning.output import plan_text

        return plan_text(self, width)

    def to_json(self) -> str:
        """Return everything as JSON text."""
        from hf_memopt.recipes.planning.output import plan_json

        return plan_json(self)

    def __str__(self) -> str:
        return self.table()


def plan(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    *,
    gpu: str | Gpu | None = None,
    budget: int | str | None = None,
    lengths: ArrayLike | None = None,
    seq_len: int | None = None,
    effective_batch_size: int = 32,
    goal: str = "speed",
    method: str = "auto",
    allow: str | Iterable[str] = (),
    measured: str | os.PathLike[str] | None = None,
    world_size: int = 1,
    task: str | None = None,
    announce: Callable[[str], object] = lambda text: None,
) -> Plan:
    """Return the set-up that suits the goal best of those whose predicted memory fits a GPU.

    Nothing that changes the training is used without consent: freezing and shorter rows need their word in ``allow``,
    adapters ``method``. Set-ups whose predicted times are within 5 % count as equally fast, and the simpler one wins.

    Args:
        model: as for ``estimate``.
        gpu: as for ``estimate``; None for the current CUDA device.
        budget: what may be used of it, in bytes or as text such as ``"8GB"`` (8 GiB); alone, a GPU of that size.
        lengths: tokens of each example, such as ``token_lengths(dataset)``, shape (examples,): memory is planned for
            the longest row, time for the mean padded length of bucketed batches.
        seq_len: where rows are cut; without ``lengths`` the tokens of every row. None for the longest of ``lengths``,
            else 512 or what the model takes.
        effective_batch_size: examples of an optimizer step, which stays as it is.
        goal: ``"speed"``, ``"memory"`` or ``"longest"``.
        method: ``"full"``, ``"lora"``, ``"qlora"``, or ``"auto"``: full training where it fits with 5 % to spare,
            else LoRA, else QLoRA.
        allow: what may be changed besides: ``"release_clipping"`` (gradients are released, not clipped),
            ``"bf16_weights"`` (no float32 copies, stochastic rounding), ``"freeze"``, ``"shorter"``.
        measured: not available yet.
        world_size: GPUs that train together, each with a whole copy of the model.
        task: of the head to build, as for ``estimate``.
        announce: called before each simulation with a text that names it.

    Raises:
        ValueError: an unknown word, GPU or model; words that contradict each other; lengths beyond the model's
            positions; an effective batch that cannot be cut over the GPUs; a budget below the weights.
        NotEstimableError: no set-up of the model can be simulated.

    Example:
        >>> found = plan("bert-base-uncased", gpu="RTX 3060 12GB", seq_len=128)
        >>> found.chosen.batch, found.chosen.stage
        ('32 x 1', 'full')
    """
    if measured is not None:
        raise ValueError(
            f"measured={str(measured)!r} cannot be used yet: nothing writes such a file; expected None. "
            "Leave measured out"
        )
    checked_word("goal", goal, GOALS)
    checked_word("method", method, METHODS)
    found_gpu = read_gpu(gpu, budget)
    words = checked_allow(allow, method, found_gpu)
    share = checked_batch(effective_batch_size, world_size)
    if world_size > 1 and "release_clipping" in words:
        raise ValueError(
            f"allow={words!r}, world_size={world_size} contradict each other: released gradients would step before the "
            "GPUs have shared them; expected one GPU. Pass world_size=1, or leave 'release_clipping' out"
        )
    with keeping_models():
        source, own_task, facts, most, default = facts_of(model, task)
        texts = Texts.of(lengths, seq_len, batch_size=share, most=most, default=default)
        simulation = Simulation(source, own_task, found_gpu, texts, world_size, words, announce)
        search_of = _Search(simulation, facts, effective_batch_size, share, goal)
        stages = _stages(method, facts, words)
        candidates, chosen = search_of.by_length(stages, most)
        shortfall = None
        if chosen is None:
            shortfall = shortfall_of(candidates, simulation, facts, search_of.all_set_ups(stages), share, budget)
    reasoned = with_reasons(candidates, chosen, goal)
    taken = None if chosen is None else _with_reasons_of_recipe(reasoned[candidates.index(chosen)], found_gpu)
    shown = tuple(
        taken if one is chosen and taken is not None else again for one, again in zip(candidates, reasoned, strict=True)
    )
    return Plan(
        model=simulation.model_name,
        parameters=simulation.parameters,
        gpu=found_gpu,
        goal=goal,
        method=method,
        allow=words,
        effective_batch_size=effective_batch_size,
        world_size=world_size,
        texts=simulation.texts,
        candidates=shown,
        chosen=taken,
        shortfall=shortfall,
        notes=tuple(_notes(simulation, texts, chosen, candidates, method, lengths is None and seq_len is None)),
        simulations=simulation.count,
    )


def _stages(method: str, facts: ModelFacts, allow: Sequence[str]) -> list[str]:
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
class _Search:
    """The search over stages and lengths."""

    simulation: Simulation
    facts: ModelFacts
    effective_batch_size: int
    share: int
    goal: str

    def all_set_ups(self, stages: Iterable[str]) -> list[SetUp]:
        return [
            one
            for stage in stages
            for one in set_ups(stage, self.facts, self.simulation.gpu, self.effective_batch_size)
            if self.simulation.world_size == 1 or not one.recipe.gradient_release  # refused under DDP
        ]

    def by_length(self, stages: Sequence[str], most: int | None) -> tuple[list[Candidate], Candidate | None]:
        """Return the candidates and the chosen one, with shorter or longer rows where they are asked for."""
        if self.goal == "longest":
            self._use_longest(stages, most)
        candidates, chosen = self._by_stage(stages)
        length = self.simulation.texts.seq_len
        for part in (2, 4):
            if chosen is not None or "shorter" not in self.simulation.allow or length is None or length < 2 * MULTIPLE:
                break
            self.simulation.texts = self.simulation.texts.shortened(max(length // part, 1), self.share)
            more, chosen = self._by_stage(stages)
            candidates += more
        return candidates, chosen

    def _by_stage(self, stages: Sequence[str]) -> tuple[list[Candidate], Candidate | None]:
        candidates: list[Candidate] = []
        for stage in stages:
            found = search(self.all_set_ups([stage]), self.simulation, self.share, self.goal)
            candidates += found
            if (chosen := best_of(found, self.goal)) is not None:
                return candidates, chosen
        tight = [one for one in candidates if one.verdict == "tight" and not one.consents]
        if not tight:
            return candidates, None
        last = next(stage for stage in reversed(stages) if any(one.stage == stage for one in tight))
        return candidates, max((one for one in tight if one.stage == last), key=lambda one: one.spare_bytes)

    def _use_longest(self, stages: Sequence[str], most: int | None) -> None:
        """Plan for the longest rows of which a single one fits."""
        simulation = self.simulation
        if simulation.texts.seq_len is None:
            raise ValueError(
                "goal='longest' has no meaning for a model without text; expected another goal. Pass goal='memory'"
            )
        allowed = [one for one in self.all_set_ups(stages[:1]) if set(one.consents) <= set(simulation.allow)]
        least = least_set_ups(allowed)
        high = min(most or LONGEST, LONGEST) // MULTIPLE + 1
        low, texts = 0, simulation.texts
        while high - low > 1:
            middle = (low + high) // 2 if low else min(texts.seq_len or MULTIPLE, (high - 1) * MULTIPLE) // MULTIPLE
            middle = min(max(middle, low + 1), high - 1)
            simulation.texts = Texts(middle * MULTIPLE)
            if self._any_fits(least):
                low = middle
            else:
                high = middle
        simulation.texts = Texts(max(low, 1) * MULTIPLE)

    def _any_fits(self, set_ups: Sequence[SetUp]) -> bool:
        """Return whether one of the set-ups fits with single rows, or with all of them."""
        for set_up in set_ups:
            counts = row_counts(set_up, self.share)
            for rows in dict.fromkeys((counts[0], counts[-1])):
                one = self.simulation.of(set_up, rows)
                if one is not None and one.fits:
                    return True
        return False


def _with_reasons_of_recipe(chosen: Candidate, gpu: Gpu) -> Candidate:
    """Return the chosen candidate with a recipe that says what it is for."""
    length = "" if chosen.seq_len is None else f" at {chosen.seq_len} tokens"
    needs = f"{format_bytes(chosen.total_bytes)} of {format_bytes(gpu.usable_bytes)}"
    purpose = f"{chosen.name}{length} on {gpu.name}: {needs}, computed and not measured"
    reasons = {**chosen.recipe.reasons, "per_device_train_batch_size": chosen.reason}
    return replace(chosen, recipe=chosen.recipe.replace(purpose=purpose, reasons=reasons))


def _notes(
    simulation: Simulation,
    texts: Texts,
    chosen: Candidate | None,
    candidates: Sequence[Candidate],
    method: str,
    is_default: bool,
) -> Iterable[str]:
    planned = simulation.texts
    if is_default and texts.seq_len is not None and planned.seq_len == texts.seq_len:
        yield f"seq_len={texts.seq_len} by default; pass lengths, or the length of your longest rows"
    if planned.cut and planned.rows:
        yield f"rows are cut to {planned.seq_len} tokens, which cuts {planned.cut / planned.rows:.1%} of them"
    if chosen is not None and method == "auto":
        tried = [stage for stage in dict.fromkeys(one.stage for one in candidates) if stage != chosen.stage]
        if tried:
            without = " nor ".join(NAMES[stage] for stage in tried)
            neither = "neither " if len(tried) > 1 else ""
            does = "fits" if len(tried) > 1 else "does not fit"
            yield f"{neither}{without} {does} with 5 % to spare, so {NAMES[chosen.stage]} was chosen"
    if chosen is not None and chosen.verdict == "tight":
        yield f"tight: {format_bytes(chosen.spare_bytes)} to spare, less than the 5 % that an estimate may be wrong by"
    if simulation.priced_on is not None and simulation.priced_on.name != simulation.gpu.name:
        yield f"times are those of {simulation.priced_on.name}: {simulation.gpu.name} has no known rates"
    if simulation.time_unknown:
        yield f"time is not predicted: {simulation.time_unknown}; set-ups are ranked by their FLOPs"
    if simulation.world_size > 1:
        yield "on several GPUs: without the buffers of DDP and the time of its communication"
    yield from simulation.gpu.notes
    for name, why in simulation.refused.items():
        yield f"{name} was not simulated: {why}"
