"""Say of each candidate why it was taken or refused, beside the one that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_memopt.memory.step_time.prices import equally_fast
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.candidates import Candidate

__all__ = ["with_reasons"]


def with_reasons(candidates: Sequence[Candidate], chosen: Candidate | None, goal: str) -> list[Candidate]:
    """Return the candidates, each with its reason."""
    return [one.because(_reason(one, chosen, candidates, goal)) for one in candidates]


def _reason(one: Candidate, chosen: Candidate | None, candidates: Sequence[Candidate], goal: str) -> str:
    if chosen is not None and one is chosen:
        return _why_chosen(one, candidates, goal)
    if one.verdict == "over":
        whole = " with the effective batch as one, which a released gradient needs" * one.recipe.gradient_release
        return f"{one.says()}{whole}"
    if one.consents:
        words = ", ".join(map(repr, one.consents))
        return f"{one.says()}; needs your consent: allow=({words},)"
    if one.verdict == "tight":
        return f"{one.says()}: less than the {format_bytes(one.margin_bytes)} that an estimate may be wrong by"
    if chosen is None:
        return one.says()
    waste = _buys_nothing(one, candidates, goal)
    if waste:
        return waste
    if one.stage != chosen.stage:
        return f"fits, but {_stage(chosen.stage)} comes first"
    if goal == "memory" and not equally_fast(one.total_bytes, chosen.total_bytes):
        return f"needs {format_bytes(one.total_bytes - chosen.total_bytes)} more than the chosen"
    if goal == "longest" and one.seq_len != chosen.seq_len:
        return f"rows of {one.seq_len} tokens, and {chosen.seq_len} fit"
    if equally_fast(one.cost, chosen.cost):
        return f"within 5 % of the chosen, which is {'simpler' if chosen.simplicity < one.simplicity else 'faster'}"
    return f"{one.cost / chosen.cost:.2f} x the {_time(one)} of the chosen"


def _why_chosen(one: Candidate, candidates: Sequence[Candidate], goal: str) -> str:
    fitting = [other for other in candidates if other.fits and other.stage == one.stage]
    if not fitting:
        return "nothing fits with 5 % to spare, and this leaves most"
    fastest = min(fitting, key=lambda other: other.cost)
    if goal == "memory":
        return "the least memory that fits; of set-ups within 5 % of it the fastest"
    longest = f"the longest rows that fit, {one.seq_len} tokens; " if goal == "longest" else ""
    first = f"{'the fastest' if one.seconds is not None else 'the least assumed time'} of the {len(fitting)} that fit"
    if fastest is one or (equally_fast(fastest.cost, one.cost) and fastest.simplicity == one.simplicity):
        return f"{longest}{first}"
    return f"{longest}within 5 % of {first}, and simpler"


def _buys_nothing(one: Candidate, candidates: Sequence[Candidate], goal: str) -> str:
    """Return that a technique is of no use, as the same without it fits with as many rows; "" where it is of some.

    Where memory is the goal, 5 % less of it are of use.
    """
    for other in candidates:
        without = [name for name in _names(one) if name not in _names(other)]
        same = other.stage == one.stage and other.rows == one.rows and other.seq_len == one.seq_len
        fewer = set(_names(other)) < set(_names(one)) and len(without) == 1
        saves = goal == "memory" and not equally_fast(one.total_bytes, other.total_bytes)
        if same and fewer and other.fits and one.cost >= other.cost and not saves:
            times = one.cost / other.cost
            freed = other.total_bytes - one.total_bytes
            seconds = "" if one.seconds is None else f", {one.seconds:.3g} s a step"
            price = f"no more {_time(one)}" if times < 1.005 else f"{times:.2f} x the {_time(one)}{seconds}"
            frees = f"frees {format_bytes(freed)} that nothing needs" if freed > 0 else "frees nothing"
            return f"{without[0]} buys nothing: without it {other.batch} fits too; it {frees}, for {price}"
    return ""


def _time(one: Candidate) -> str:
    return "assumed time" if one.seconds is None else "time"


def _names(one: Candidate) -> list[str]:
    return one.name.split(", ")


def _stage(stage: str) -> str:
    names = {"full": "full training", "freeze": "training with frozen parameters", "lora": "LoRA", "qlora": "QLoRA"}
    return names[stage]
