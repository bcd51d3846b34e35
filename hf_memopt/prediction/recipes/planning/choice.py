"""The choice: which of the set-ups that were simulated is recommended, and the reason that is shown for each of them.

1. A set-up fits where it leaves 5 % of the GPU, and needs no consent that was not given (``Candidate.fits``).
2. A technique has to earn its place: the simplest set-up wins to which no other adds more than 5 % of speed for each
   technique that it has beyond (``best_of``).
3. Full training comes before LoRA where it fits with ease: it leaves 8 % of the GPU, and nothing of it waits in host
   memory (``fits_with_ease``). A technique that only makes this room is then left out, if as many rows fit without it.
4. Full training that computes in float32 is passed over for LoRA that is 1.3 times as fast in half of its memory
   (``rival_of``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from hf_memopt.prediction.memory.step_time import SAME_FRACTION, equally_fast
from hf_memopt.prediction.recipes.planning.nearest import NAMES
from hf_memopt.prediction.recipes.planning.set_ups import on_host
from hf_memopt.units import format_bytes, format_number, percent

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes.planning.simulated import Candidate
    from hf_memopt.training.devices import Gpu

EASE_SHARE = 0.08  # of a GPU, which full training leaves where it is recommended before LoRA
RIVAL_SPEED, RIVAL_MEMORY = 1.3, 0.5  # of full training's, with which LoRA is recommended before it


def best_of(candidates: Iterable[Candidate], goal: str = "speed") -> Candidate | None:
    """Return the best candidate that fits, or None: by the goal, then the simplest that no other earns its place over.

    A candidate that is no faster than a simpler one does not count.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    if goal == "longest":
        longest = max((candidate.seq_len or 0 for candidate in fitting), default=0)
        fitting = [candidate for candidate in fitting if (candidate.seq_len or 0) == longest]
    if goal == "memory":
        least = min((candidate.total_bytes for candidate in fitting), default=0)
        fitting = [candidate for candidate in fitting if equally_fast(candidate.total_bytes, least)]
    ranked = sorted(fitting, key=lambda candidate: (candidate.cost, candidate.simplicity))
    counted = [
        one for place, one in enumerate(ranked) if all(one.simplicity < other.simplicity for other in ranked[:place])
    ]
    unbeaten = [one for one in counted if not any(_earns_its_place(other, one) for other in counted)]
    return unbeaten[-1] if unbeaten else None


def _earns_its_place(one: Candidate, simpler: Candidate) -> bool:
    """Return whether a candidate takes 5 % less time than a simpler one for each technique that it has beyond."""
    return one.cost < simpler.cost * (1 - SAME_FRACTION) ** max(_beyond(one, simpler), 1)


def _beyond(one: Candidate, simpler: Candidate) -> int:
    """Return how many of ``LEVERS``, a bit for each, a candidate has that a simpler one has not."""
    return (one.simplicity[1] & ~simpler.simplicity[1]).bit_count()


def fits_with_ease(one: Candidate) -> bool:
    """Return whether a candidate leaves 8 % of the GPU, with neither optimizer state nor activations in host memory."""
    return one.fits and one.spare_bytes >= EASE_SHARE * one.usable_bytes and not on_host(one.techniques)


def rival_of(full: Candidate, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the fastest LoRA for which full training in float32 is passed over; None where it is not."""
    lora = [one for one in candidates if one.fits and one.stage == "lora" and not on_host(one.techniques)]
    small = [one for one in lora if one.total_bytes <= RIVAL_MEMORY * full.total_bytes]
    fastest = min(small, key=lambda one: one.cost, default=full)
    is_rival = full.recipe.precision == "fp32" and fastest.cost * RIVAL_SPEED <= full.cost
    return fastest if is_rival else None


# ---- Reasons


def with_reason(
    one: Candidate, chosen: Candidate | None, candidates: Sequence[Candidate], goal: str, gpu: Gpu
) -> Candidate:
    """Return a candidate with its reason; the chosen one with a recipe that says what it is for."""
    reason = _reason(one, chosen, candidates, goal)
    if one is not chosen:
        return replace(one, reason=reason)
    length = "" if one.seq_len is None else f" at {one.seq_len} tokens"
    needs = f"{format_bytes(one.total_bytes)} of {format_bytes(gpu.usable_bytes)}"
    purpose = f"{one.name}{length} on {gpu.name}: {needs}, computed and not measured"
    reasons = {**one.recipe.reasons, "per_device_train_batch_size": reason}
    return replace(one, reason=reason, recipe=one.recipe.replace(purpose=purpose, reasons=reasons))


def _reason(one: Candidate, chosen: Candidate | None, candidates: Sequence[Candidate], goal: str) -> str:
    if chosen is not None and one is chosen:
        return _why_chosen(one, candidates, goal)
    if one.verdict == "over":
        whole = " with the effective batch as one, which a released gradient needs" * (not one.recipe.accumulates)
        return f"{one.says()}{whole}"
    if one.consents:
        words = ", ".join(map(repr, one.consents))
        return f"{one.says()}; needs your consent: allow=({words},)"
    if one.verdict == "tight":
        return f"{one.says()}: an estimate may be wrong by {format_bytes(one.margin_bytes)}"
    if chosen is None:
        return one.says()
    if waste := _buys_nothing(one, candidates, goal):
        return waste
    if one.stage == "full" and one not in _considered(candidates, chosen, goal):
        return why_not_full(one, chosen, candidates)
    times = f"{one.cost / chosen.cost:.2f} x the {_time(one)} of the chosen"
    if one.stage != chosen.stage:
        return f"{times}, but {NAMES[chosen.stage]} comes first"
    if goal == "memory" and not equally_fast(one.total_bytes, chosen.total_bytes):
        return f"needs {format_bytes(one.total_bytes - chosen.total_bytes)} more than the chosen"
    if goal == "longest" and one.seq_len != chosen.seq_len:
        return f"examples of {one.seq_len} tokens, and {chosen.seq_len} fit"
    if equally_fast(one.cost, chosen.cost):
        return f"within 5 % of the chosen, which is {'simpler' if chosen.simplicity < one.simplicity else 'faster'}"
    if one.cost < chosen.cost:
        return f"{times}: less than 5 % for each of its {_beyond(one, chosen)} more techniques"
    return times


def _why_chosen(one: Candidate, candidates: Sequence[Candidate], goal: str) -> str:
    fitting = _considered(candidates, one, goal)
    if not fitting:
        return "nothing fits with 5 % free, and this leaves most"
    if one not in fitting:
        same = [
            other.techniques for other in fitting if other.rows == one.rows and {*one.techniques} < {*other.techniques}
        ]
        names = " and ".join(technique.name for technique in min(same, key=len) if technique not in one.techniques)
        return f"full fine-tuning fits, and {names} would only free memory that no larger batch needs"
    fastest = min(fitting, key=lambda other: other.cost)
    if goal == "memory":
        return "the fastest of the set-ups within 5 % of the least memory"
    longest = f"the longest examples that fit, {one.seq_len} tokens; " if goal == "longest" else ""
    is_not_all = any(other.fits and other.cost < fastest.cost for other in candidates)
    kind, ease = (f"{NAMES[one.stage]} ", " with 8 % free" * (one.stage == "full")) if is_not_all else ("", "")
    if one.recipe.streamed:
        what = hides = ""
        if one.recipe.resident:
            what = f"{one.layers - one.recipe.resident} of {one.layers} "
            hides = "" if one.waiting_seconds is None else f", which costs {one.waiting_seconds:.2g} s per step"
        elif one.hiding_tokens is not None:
            hides = f", copies hidden from {one.hiding_tokens:,.0f} tokens a pass on"
        longest += f"nothing fits on the GPU alone: {what}layers wait in {format_bytes(one.host_bytes)} of RAM{hides}; "
    first = f"the fastest {kind}set-up that fits{ease}{' by an assumed time' if one.seconds is None else ''}"
    if fastest is one or (equally_fast(fastest.cost, one.cost) and fastest.simplicity == one.simplicity):
        return f"{longest}{first}"
    if equally_fast(fastest.cost, one.cost):
        return f"{longest}nearly as fast as {first}, and simpler"
    saved, more = percent(1 - fastest.cost / one.cost), _beyond(fastest, one)
    return f"{longest}simpler than {first}, whose {more} more techniques save {saved} of the time, less than 5 % each"


def _considered(candidates: Sequence[Candidate], chosen: Candidate, goal: str) -> list[Candidate]:
    """Return those of the chosen one's method that could be chosen: full training beside LoRA has to fit with ease."""
    fitting = [one for one in candidates if one.fits and one.stage == chosen.stage]
    is_beside_lora = chosen.stage == "full" and goal == "speed" and any(one.stage == "lora" for one in candidates)
    easy = [one for one in fitting if fits_with_ease(one)] if is_beside_lora else []
    return easy or fitting


def why_not_full(one: Candidate, chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Return why full training that fits is not recommended: what it needs, or what LoRA needs less."""
    if rival := rival_of(one, candidates):
        times, share = f"{one.cost / rival.cost:.2f}", percent(rival.total_bytes / one.total_bytes)
        return f"computes in fp32, and {rival.name}, {rival.batch}, is {times} times as fast in {share} of its memory"
    names = " and ".join(technique.name for technique in on_host(one.techniques))
    leaves = f"leaves {percent(one.spare_bytes / one.usable_bytes, 1)} of the GPU, less than {percent(EASE_SHARE)}"
    needs = f"{f'needs {names}' if names else leaves}, and " * (not fits_with_ease(one))
    return f"{needs}takes {one.cost / chosen.cost:.2f} x the {_time(one)} of the chosen"


def _buys_nothing(one: Candidate, candidates: Iterable[Candidate], goal: str) -> str:
    """Return that a technique is of no use, as the same without it fits with as many rows; "" where it is of some.

    Where memory is the goal, 5 % less of it are of use.
    """
    for technique, other in product(one.techniques, candidates):
        if not one.adds(technique, to=other) or one.rows != other.rows or not other.fits or one.cost < other.cost:
            continue
        freed_bytes = other.total_bytes - one.total_bytes
        if goal != "memory" or equally_fast(one.total_bytes, other.total_bytes):
            times = one.cost / other.cost
            seconds = "" if one.seconds is None else f", {format_number(one.seconds)} s a step"
            price = f"no more {_time(one)}" if times < 1.005 else f"{times:.2f} x the {_time(one)}{seconds}"
            frees = f"frees {format_bytes(freed_bytes)} that nothing needs" if freed_bytes > 0 else "frees nothing"
            return f"{technique.name} buys nothing: without it {other.batch} fits too; it {frees}, for {price}"
    return ""


def _time(one: Candidate) -> str:
    return "assumed time" if one.seconds is None else "time"
