"""What a report shows beside the candidates of a plan, as plain data: what fits at other lengths and batches, the
timeline, what each choice costs, and padding before and after.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_memopt.memory.output import timeline_data
from hf_memopt.memory.recording import keeping_models
from hf_memopt.recipes.planning.fit_map import fit_map

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.result import Plan
    from hf_memopt.recipes.planning.simulated import Candidate

STRETCHES = 100  # of the timeline; at most four events of each are kept


def report_figures(found: Plan, *, simulate: bool = True) -> dict[str, Any]:
    """Return the figures of the chosen set-up, else of the nearest; two of them only where more may be simulated."""
    short, simulation = found.shortfall, found.simulation
    one = found.chosen or (None if short is None else short.nearest)
    choices = [] if one is None else _choices(found, one)
    figures = {"fit_map": None, "timeline": None, "choices": choices, "padding": _padding(found, one)}
    if one is None or simulation is None or not simulate:
        return figures
    with keeping_models():
        simulation.announce("the timeline")
        estimate = simulation.estimate(one.recipe, one.seq_len)
        chart = fit_map(one, found.candidates, simulation)
    return {**figures, "fit_map": chart, "timeline": timeline_data(estimate, STRETCHES)}


def _padding(found: Plan, one: Candidate | None) -> dict[str, Any] | None:
    """Return what padding costs on the lengths, cut as planned; None where there are none."""
    if found.texts.lengths is None or one is None:
        return None
    from hf_memopt.batching.padding_costs import padding_report

    report = padding_report(found.texts.lengths, batch_size=one.rows, max_length=found.texts.seq_len).as_dict()
    # A step is predicted at the mean padded length of buckets; other ways take as much longer as they compute tokens.
    of_buckets = next(way["epoch_tokens"] for way in report["strategies"] if way["name"].startswith("bucketed(batch"))
    for way in report["strategies"]:
        epoch = None if one.seconds is None else one.seconds * report["examples"] / one.examples
        way["epoch_seconds"] = None if epoch is None else epoch * way["epoch_tokens"] / of_buckets
    kept = ("examples", "total", "mean", "shortest", "longest", "percentiles", "histogram", "strategies", "batch_size")
    return {name: report[name] for name in kept}


# ---- Choices


NOT_SHOWN = ("name", "purpose", "reasons")


def _choices(found: Plan, one: Candidate) -> list[dict[str, Any]]:
    """Return every field of the set-up's recipe with its reason, and what others of its values need and take.

    These are those of the candidates that differ by the rows or by one technique alone. Fields that have some come
    first, then those with a reason of their own.
    """
    recipe = one.recipe
    others: dict[str, list[dict[str, Any]]] = {}
    for other in found.candidates:
        if (name := _only_change(one, other)) is not None:
            ratio = None if one.seconds is None or other.seconds is None else other.seconds / one.seconds
            told = {"total_bytes": other.total_bytes, "verdict": other.verdict, "time_ratio": ratio}
            others.setdefault(name, []).append({"value": _text(getattr(other.recipe, name)), **told})
    names = [item.name for item in fields(recipe) if item.name not in NOT_SHOWN]
    names.sort(key=lambda name: (name not in others, name not in recipe.reasons))
    return [
        {
            "name": name,
            "value": _text(getattr(recipe, name)),
            "reason": recipe.reason_of(name),
            "alternatives": others.get(name, []),
        }
        for name in names
    ]


def _only_change(one: Candidate, other: Candidate) -> str | None:
    """Return the field that another candidate has another value of, by its rows or one technique; None for more."""
    if (one.stage, one.seq_len, one.sharing) != (other.stage, other.seq_len, other.sharing):
        return None
    if one.techniques == other.techniques:
        return "per_device_train_batch_size" if one.rows != other.rows else None
    mine = [technique for technique in one.techniques if technique not in other.techniques]
    more = [technique for technique in other.techniques if technique not in one.techniques]
    names = [name for technique in (*more, *mine) for name in technique.fields]
    is_one = len(mine) + len(more) == 1 or (len(mine) == len(more) == 1 and len(set(names)) < len(names))
    differ = (name for name in names if getattr(one.recipe, name) != getattr(other.recipe, name))
    return next(differ, None) if is_one and one.rows == other.rows else None


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple) else str(value)
