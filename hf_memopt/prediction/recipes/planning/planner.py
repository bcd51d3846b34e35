"""``plan``: the set-up of the stock ``Trainer`` that suits a goal best of those that fit a GPU, without the GPU.

Formula:
    A set-up fits where reserved bytes + CUDA's context + a margin of 5 % of the GPU are at most what is usable of it.

Full training is searched first. With ``method="auto"`` LoRA follows where nothing of it fits with ease, and QLoRA where
LoRA does not fit; ``choice`` has the rules. What changes the training in another way is used where ``allow`` has its
word.

A plan is for one GPU; where several processes train, a note has the size of DDP's gradient buckets.

Limitations: what ``estimate`` cannot simulate. Evaluation is that of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never

from hf_memopt.notices import Aside
from hf_memopt.plain_data import Count, check_value, check_word
from hf_memopt.prediction.memory import launched, notes_for_one_gpu
from hf_memopt.prediction.memory.models import checked_task
from hf_memopt.prediction.memory.recording import keeping_models
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.prediction.recipes.planning.choice import best_of, fits_with_ease, why_not_full, with_reason
from hf_memopt.prediction.recipes.planning.model_and_rows import (
    LONG_ROW,
    Texts,
    assumptions,
    can_tile,
    facts_of,
    name_to_load,
)
from hf_memopt.prediction.recipes.planning.nearest import NAMES, shortfall_of
from hf_memopt.prediction.recipes.planning.request import (
    GOALS,
    METHODS,
    EffectiveBatch,
    checked_allow,
    planned_os,
    read_gpu,
    refuse_removed,
)
from hf_memopt.prediction.recipes.planning.result import Plan
from hf_memopt.prediction.recipes.planning.set_ups import LINUX_ONLY
from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation
from hf_memopt.prediction.recipes.planning.stages import StageSearch, stages_of
from hf_memopt.training.devices import Gpu
from hf_memopt.training.devices.readings import read_memory
from hf_memopt.units import format_bytes, parse_bytes, percent

if TYPE_CHECKING:
    import os

    from numpy.typing import ArrayLike
    from torch import nn
    from transformers import PretrainedConfig

HOST_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # GiB that computers have


def plan(
    model: nn.Module | PretrainedConfig | str | os.PathLike[str],
    *,
    gpu: str | Gpu | None = None,
    budget: int | str | None = None,
    os: str | None = None,
    lengths: ArrayLike | None = None,
    seq_len: int | None = None,
    effective_batch_size: int = 32,
    goal: str = "speed",
    method: str = "auto",
    allow: str | Iterable[str] = (),
    task: str | None = None,
    images: int | None = None,
    image_size: int | None = None,
    audio_seconds: float | None = None,
    host_memory: int | str | None = None,
    announce: Callable[[str], object] = lambda text: None,
    **removed: Never,
) -> Plan:
    """Find the best set-up for a goal, among those whose predicted memory fits a GPU.

    Nothing that changes the training is used without consent: freezing and shorter rows need their word in ``allow``,
    adapters ``method``. The simplest set-up wins to which no other adds more than 5 % of speed for each technique that
    it has beyond: nothing, then checkpointing, 8-bit state, expandable segments, state on the host, offloading.

    Args:
        model: as for ``estimate``.
        gpu: as for ``estimate``; None for the current CUDA device.
        budget: what may be used of it, in bytes or as text such as ``"8GB"`` (8 GiB); alone, a GPU of that size. None
            for all of it, of a laptop's GPU and under Windows less 0.5 GiB for the desktop.
        os: where it trains, ``"linux"``, ``"windows"`` or ``"wsl"``; on the last two neither expandable segments nor
            paged state work. None for this machine's, and for a laptop elsewhere Windows.
        lengths: tokens of each example, such as ``token_lengths(dataset)``, shape (examples,): memory is planned for
            the longest row, time for the mean padded length of bucketed batches.
        seq_len: where rows are cut; without ``lengths`` the tokens of every row. None for the longest of ``lengths``,
            so that no row is cut (``--data`` of the command line does the same), else 512 or what the model takes.
        effective_batch_size: examples of an optimizer step, which stays as it is.
        goal: ``"speed"``, ``"memory"`` or ``"longest"``.
        method: ``"full"``, ``"lora"``, ``"qlora"``, or ``"auto"``: full training where it fits with ease, else LoRA,
            else QLoRA.
        allow: what may be changed besides: ``"release_clipping"`` (gradients are released, not clipped),
            ``"bf16_weights"`` (no float32 copies, stochastic rounding), ``"freeze"``, ``"shorter"``.
        task: of the head to build, as for ``estimate``.
        images: pictures of an example, as for ``estimate``.
        image_size: as for ``estimate``.
        audio_seconds: as for ``estimate``.
        host_memory: of the computer that trains, in bytes or as text such as ``"64GB"``: where nothing else fits, the
            layers' weights may wait there, and what is offloaded or waits there has to fit. None for this machine's, 0
            for plans without streamed layers.
        announce: called before each simulation with a text that names it.
        removed: nothing; arguments that an earlier version had are named.

    Raises:
        TypeError: an argument that it does not have.
        ValueError: an unknown word, GPU or model; words that contradict each other; lengths beyond the model's
            positions; a budget below the weights.
        NotEstimableError: nothing that was simulated fits, and of a method every simulation failed.

    Examples:
        >>> found = plan("bert-base-uncased", gpu="RTX 3060 12GB", seq_len=128)
        >>> found.chosen.batch, found.chosen.stage
        ('32 x 1', 'full')
    """
    refuse_removed(removed)
    check_word("goal", goal, GOALS)
    check_word("method", method, METHODS)
    check_value("seq_len", seq_len, Count | None, 512)
    check_value("announce", announce, Callable, print)
    task = checked_task(task)
    found_gpu = read_gpu(gpu, budget=budget, os=os)
    words = checked_allow(allow, method, found_gpu)
    check_value("effective_batch_size", effective_batch_size, EffectiveBatch, 32)
    with keeping_models():
        media: dict[str, Any] = {"images": images, "image_size": image_size, "audio_seconds": audio_seconds}
        source, own_task, facts = facts_of(model, task, planned_os(os, gpu), StepSettings(**media))
        most, default = facts.most_tokens, facts.default_length
        if seq_len is not None and default is None and facts.task is not None:
            raise ValueError(
                f"seq_len={seq_len} has no meaning for a model without text; expected None. Leave seq_len out"
            )
        if seq_len is not None and most is not None and seq_len > most:
            raise ValueError(
                f"seq_len={seq_len} is beyond the positions of the model; expected 1 to {most}. Pass seq_len={most}"
            )
        texts = Texts.of(lengths, seq_len, batch_size=effective_batch_size, most=most, default=default)
        if goal == "longest" or (texts.seq_len or 0) >= LONG_ROW:
            facts = replace(facts, tiles=can_tile(source, own_task))
        simulation = Simulation(source, own_task, facts, found_gpu, texts, effective_batch_size, goal, words, announce)
        simulation.media, simulation.is_this_host = media, host_memory is None
        own_bytes = read_memory("cpu").host_total_bytes
        simulation.host_memory_bytes = own_bytes if host_memory is None else parse_bytes(host_memory, "host_memory")
        search_of = StageSearch(simulation)
        stages = stages_of(method, facts, words)
        chosen, shortfall = search_of.by_length(stages), None
        candidates = simulation.candidates
        shown = chosen or min(candidates, key=lambda one: one.total_bytes, default=None)
        if chosen is None:
            on_host = any(one.recipe.streamed and not one.host_lacks_bytes for one in candidates)
            set_ups = [one for stage in stages for one in search_of.set_ups(stage, streamed=on_host)]
            shortfall = shortfall_of(simulation, set_ups, budget)
        assumed = assumptions(source, own_task, StepSettings(**media))
        of_several = tuple(_of_several(simulation, shown, *launched(counts_gpus=gpu is None)))
    used = () if chosen is None or os else [one.name for one in chosen.techniques if one in LINUX_ONLY]
    of_linux = (f"{name} needs Linux, which this machine has; os='windows' plans without it" for name in used)
    passed_over = "" if chosen is None or method != "auto" else _passed_over(chosen, candidates)
    notes = _notes(simulation, texts, chosen, lengths is None and seq_len is None)
    named = None if gpu is None and budget is not None else found_gpu.name
    asked = {"gpu": named, "budget": budget, "task": task, **media, "host_memory": host_memory}
    reasoned = tuple(with_reason(one, chosen, candidates, goal, found_gpu) for one in candidates)
    return Plan(
        model=simulation.model_name,
        parameters=simulation.parameters,
        gpu=found_gpu,
        goal=goal,
        method=method,
        allow=words,
        effective_batch_size=effective_batch_size,
        texts=simulation.texts,
        candidates=reasoned,
        chosen=None if chosen is None else reasoned[candidates.index(chosen)],
        shortfall=shortfall,
        notes=(*notes, *map(Aside, filter(None, [passed_over])), *assumed, *of_linux, *of_several),
        passed_over=passed_over,
        simulations=simulation.count,
        source=name_to_load(model),
        task=facts.task,
        simulation=simulation,
        system=os,
        asked={name: value for name, value in asked.items() if value is not None},
    )


def _passed_over(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return why the methods before that of the chosen one were not chosen; "" where there are none."""
    tried = list(NAMES)[: list(NAMES).index(chosen.stage)]
    tried = [stage for stage in dict.fromkeys(one.stage for one in candidates) if stage in tried]
    full = [one for one in candidates if one.stage == "full"] if "full" in tried else []
    harder = best_of(filter(fits_with_ease, full)) or best_of(full)
    if harder is not None:
        return f"{NAMES['full']} {why_not_full(harder, chosen, candidates)}; method='full' plans it"
    names = " nor ".join(NAMES[stage] for stage in tried)
    free = " with 5 % free" * any(one.verdict == "tight" for one in candidates if one.stage in tried)
    return f"neither {names} fits{free}" if len(tried) > 1 else f"{names} does not fit{free}" * bool(tried)


def _notes(simulation: Simulation, texts: Texts, chosen: Candidate | None, is_default: bool) -> Iterable[str]:
    planned, candidates = simulation.texts, simulation.candidates
    if is_default and texts.seq_len is not None and planned.seq_len == texts.seq_len:
        yield f"{texts.seq_len} tokens are assumed; pass your own seq_len (or --data FILE)"
    if planned.cut and planned.rows:
        yield f"{percent(planned.cut / planned.rows, 1)} of the examples are cut to {planned.seq_len} tokens"
    elif shorter := planned.shorter():
        yield (
            f"the longest example has {planned.seq_len} tokens, and none is cut; seq_len={shorter[0]} needs less "
            f"memory and cuts {percent(shorter[1], 1)} of the examples"
        )
    if chosen is not None and chosen.verdict == "tight":
        yield f"too close to tell: {format_bytes(chosen.spare_bytes)} free, and an estimate may be 5 % of the GPU off"
    if chosen is not None and chosen.stage == "qlora":
        yield Aside("planned with prepare_quantized; for PEFT's own preparation: hf-memopt estimate --prepare peft")
    share = 1 if chosen is None else chosen.examples
    if chosen is not None and chosen.rows == 1 and share > 3 and all(share % rows for rows in range(2, share)):
        yield Aside(f"{share} examples per step can only be cut into single ones; try effective_batch_size={share + 1}")
    yield from _of_host(simulation, candidates, chosen)
    if simulation.facts.compares_rows and simulation.share > 1:
        yield (
            f"the loss of {simulation.model_name} compares the examples of a batch, so all {simulation.share} of a "
            "step are computed at once: in accumulation steps each would meet fewer others"
        )
    if simulation.time_unknown and (chosen is None or chosen.seconds is None):
        yield f"speed is not predicted: {simulation.time_unknown}"
    elif simulation.priced_on.name != simulation.gpu.name:
        yield f"speed is that of {simulation.priced_on.name}: for {simulation.gpu.name} no rates are known"
    if simulation.not_generated:
        yield f"texts that evaluation generates are not counted: {simulation.not_generated}"
    yield from simulation.facts.notes
    if simulation.gpu.context_bytes is None:
        yield f"the CUDA context on {simulation.gpu.name} is not counted: its size is unknown"
    yield from simulation.gpu.notes
    refused: dict[str, list[str]] = {}
    for one, why in simulation.refused.items():
        if simulation.allows(one):
            refused.setdefault(why.rstrip("."), []).append(one.name)
    for why, names in refused.items():
        yield Aside(f"{'; '.join(names)} {'were' if len(names) > 1 else 'was'} not simulated: {why}")
    if problem := simulation.facts.against_float16(simulation.gpu):
        yield problem


def _of_several(simulation: Simulation, shown: Candidate | None, processes: int, engine: str) -> Iterable[str]:
    """Yield what a plan for one GPU leaves out where several processes train, and how they keep its batch."""
    if shown is None or processes <= 1:
        return
    yield from notes_for_one_gpu(simulation.estimate(shown.recipe, shown.seq_len), processes, engine)
    steps, left = divmod(shown.accumulation_steps, processes)
    if not left:
        yield f"with {processes} processes gradient_accumulation_steps={steps} keeps {shown.examples} examples a step"


def _of_host(simulation: Simulation, candidates: Sequence[Candidate], chosen: Candidate | None) -> Iterable[str]:
    """Yield what host memory the chosen plan takes, or would have taken where nothing fits."""
    has = format_bytes(simulation.host_memory_bytes)

    def source(size: int) -> str:
        return f"this machine's; host_memory='{size}GiB' plans for another" if simulation.is_this_host else "as given"

    lacking = [one for one in candidates if one.host_lacks_bytes and not one.consents]
    is_much = chosen is not None and chosen.host_bytes > simulation.host_memory_bytes / 10 > 0
    if chosen is not None and (chosen.recipe.streamed or is_much):
        yield f"uses {format_bytes(chosen.host_bytes)} of {has} of host memory, {source(64)}"
    elif chosen is None and lacking:
        least = min(lacking, key=lambda one: (one.spare_bytes < one.margin_bytes, one.host_bytes))
        size = next((size for size in HOST_SIZES if size * 2**30 >= least.host_bytes), HOST_SIZES[-1])
        yield (
            f"{least.name} needs {format_bytes(least.total_bytes)} of the GPU and {format_bytes(least.host_bytes)} of "
            f"host memory; there is {has}, {source(size)}"
        )
