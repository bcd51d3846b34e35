"""Where no set-up fits: what comes nearest, what it lacks, and which length, batch, model or GPU would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.prediction.memory import largest_that_fits, margin_of
from hf_memopt.prediction.memory.settings import NotEstimableError
from hf_memopt.prediction.recipes.planning.model_and_rows import MULTIPLE
from hf_memopt.training.devices import GPUS
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes.planning.set_ups import SetUp
    from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation

NAMES = {"full": "full fine-tuning", "freeze": "freezing", "lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True)
class Shortfall:
    """What is missing where nothing fits."""

    nearest: Candidate  # the set-up that needs least, of those that need no further consent
    lacks_bytes: int  # what it needs beyond the GPU's memory
    # tokens of a row with which it fits, with the margin, a multiple of 8 of which the next does not fit; None where no
    # length does, and without text
    longest: int | None
    # examples of a step that a set-up whose steps are whole can hold, of which one more does not fit; None where no
    # set-up is so, or none fits
    batch: int | None
    parameters: int  # elements of the largest model of the same shape that fits, by proportion; 0 where none does
    gpu: str  # name of the smallest GPU of the table that holds it, simulated; "" where none does
    consents: tuple[str, ...] = ()  # words of `allow` with which a set-up fits, simulated; () where none does


def shortfall_of(simulation: Simulation, set_ups: Sequence[SetUp], budget: Any) -> Shortfall:
    own = [one for one in simulation.candidates if not one.consents and not one.host_lacks_bytes]
    _check_methods(own, simulation)
    least = min(own, key=lambda one: one.total_bytes)
    simulation.announce("nothing fits: looking for what would")
    weights = min(one.components["weights"] + one.context_bytes for one in own)
    if budget is not None and weights > least.usable_bytes:
        raise ValueError(
            f"budget={budget!r} is below the weights of {simulation.model_name}, which take {format_bytes(weights)} "
            f"with CUDA's context at least; expected more. Pass budget='{-(-2 * weights // 2**30)}GiB', or a smaller "
            "model"
        )
    room = least.usable_bytes - least.margin_bytes - least.context_bytes  # all else grows with the parameters
    with_consent = [one for one in simulation.candidates if one.consents and one.verdict == "fits"]
    return Shortfall(
        nearest=least,
        lacks_bytes=-least.spare_bytes,
        longest=_longest(least, simulation),
        batch=_batch(set_ups, simulation, least),
        parameters=max(int(simulation.parameters * room / max(least.reserved_bytes, 1)), 0),
        gpu=_smallest_gpu(least, simulation),
        consents=with_consent[0].consents if with_consent else (),
    )


def _check_methods(own: Sequence[Candidate], simulation: Simulation) -> None:
    known = {one.stage for one in own}
    failed = {one.stage: why for one, why in reversed(simulation.refused.items()) if simulation.allows(one)}
    unknown = [stage for stage in NAMES if stage in failed and stage not in known]
    if own and not unknown:
        return
    reason = failed[unknown[0]] if unknown else "no set-up applies to it"
    methods = " and ".join(NAMES[stage] for stage in unknown) or "training"
    model = simulation.model if isinstance(simulation.model, str) else type(simulation.model).__name__
    does_not_fit = "".join(f"{NAMES[stage]} does not fit, and " for stage in dict.fromkeys(one.stage for one in own))
    action = ". Rehearse your own script instead: hf-memopt rehearse train.py"
    if "Call: " in reason or "Pass " in reason:
        action = ""  # it has one
    elif own:
        action = f". To plan what can be simulated, pass method='{'lora' if own[-1].stage == 'lora' else 'full'}'"
    raise NotEstimableError(
        f"not estimable: {does_not_fit}{methods} could not be simulated for {model}: "
        f"{reason.removeprefix('not estimable: ').rstrip('.')}{action}"
    )


def _longest(least: Candidate, simulation: Simulation) -> int | None:
    """Return the most tokens with which the set-up fits, a multiple of 8; simulations show that the next does not."""
    if least.seq_len is None:
        return None
    shorter = range(MULTIPLE, least.seq_len, MULTIPLE)
    return largest_that_fits(
        shorter, partial(simulation.spare_bytes, least.recipe), first=(*shorter[:1], *shorter[-1:])
    )


def _batch(set_ups: Sequence[SetUp], simulation: Simulation, least: Candidate) -> int | None:
    """Return the largest batch that the leanest set-up whose steps are whole can hold.

    It is the last one, or the one before, which has no expandable segments: these round up by 2 MiB in each pool.
    """
    whole = [one.recipe for one in set_ups if not one.recipe.accumulates][-2:]
    if simulation.facts.compares_rows:
        whole = [least.recipe]

    def spare_bytes(rows: int) -> int | None:
        sized = [one.replace(effective_batch_size=rows, per_device_train_batch_size=rows) for one in whole]
        spare = [simulation.spare_bytes(one, simulation.texts.seq_len) for one in sized]
        return max((one for one in spare if one is not None), default=None)

    smaller = range(1, simulation.share)
    return largest_that_fits(smaller, spare_bytes, first=(1, simulation.share - 1)) if whole else None


def _smallest_gpu(least: Candidate, simulation: Simulation) -> str:
    """Return the smallest GPU that holds the set-up: of those whose memory is enough the first that a simulation fits.

    Of GPUs of one size the newest counts first.
    """
    enough = [
        known
        for known in GPUS.values()
        if known.bf16 >= simulation.gpu.bf16 and known.context_bytes is not None
        if known.usable_bytes - margin_of(known) - known.context_bytes >= least.reserved_bytes
    ]
    order = sorted(enough, key=lambda known: (known.memory_bytes, [-part for part in known.compute_capability]))
    for known in order[:3]:
        total_bytes = simulation.estimate(least.recipe, least.seq_len, gpu=known).total_bytes
        if total_bytes <= known.usable_bytes - margin_of(known):
            return known.name
    return ""
