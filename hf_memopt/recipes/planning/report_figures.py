"""What a report shows beside the candidates of a plan, as plain data: what fits at other lengths and batches, the
timeline, what each choice costs, padding before and after, and how sure each figure is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_memopt.memory.output import timeline_data
from hf_memopt.memory.recording import keeping_models
from hf_memopt.recipes.planning.fit_map import fit_map
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.recipes.planning.result import Plan
    from hf_memopt.recipes.planning.simulated import Candidate

__all__ = ["known_figures", "report_figures"]

CERTAINTY = ("figure", "kind", "detail")

STRETCHES = 100  # of the timeline; at most four events of each are kept
LEFT_OUT = (
    "Evaluation is that of one batch; generation in evaluation is not counted.",
    "Memory of other processes on the GPU, and of your own tensors beside the model.",
    "The time of loading data, of evaluation, and of saving checkpoints.",
    "torch.compile, and the routing of mixtures of experts.",
)


def known_figures(found: Plan) -> dict[str, Any]:
    """Return the figures of the chosen set-up, else of the one that comes nearest, that need no more simulations."""
    one = _shown(found)
    certainty = [] if one is None else [dict(zip(CERTAINTY, line, strict=True)) for line in _certainty(found, one)]
    return {
        "fit_map": None,
        "timeline": None,
        "choices": [] if one is None else _choices(found, one),
        "padding": _padding(found, one),
        "certainty": certainty,
        "left_out": list(LEFT_OUT),
    }


def report_figures(found: Plan) -> dict[str, Any]:
    """Return all figures, most of them simulated now."""
    one, simulation = _shown(found), found.simulation
    if one is None or simulation is None:
        return known_figures(found)
    with keeping_models():
        simulation.announce("the timeline")
        estimate = simulation.estimate(one.recipe, one.seq_len)
        chart = fit_map(one, found.candidates, simulation, simulation.most_tokens)
    return {**known_figures(found), "fit_map": chart, "timeline": timeline_data(estimate, STRETCHES)}


def _shown(found: Plan) -> Candidate | None:
    return found.chosen or (found.shortfall.nearest if found.shortfall is not None else None)


def _padding(found: Plan, one: Candidate | None) -> dict[str, Any] | None:
    """Return what padding costs on the lengths, cut as planned; None where there are none."""
    if found.texts.lengths is None or one is None:
        return None
    from hf_memopt.batching.padding_costs import padding_report

    report = padding_report(found.texts.lengths, batch_size=one.rows, max_length=found.texts.seq_len).as_dict()
    kept = ("examples", "total", "mean", "shortest", "longest", "percentiles", "histogram", "strategies", "batch_size")
    return {name: report[name] for name in kept}


def _certainty(found: Plan, one: Candidate) -> Iterator[tuple[str, str, str]]:
    """Yield each figure, whether it is computed, measured or assumed, and what it rests on."""
    yield (
        "memory",
        "computed",
        "Every allocation of a step is replayed through a model of torch's allocator. "
        f"{format_bytes(one.margin_bytes)}, 5 % of the GPU, are kept free for what an estimate may be wrong by.",
    )
    usable, context = format_bytes(found.gpu.usable_bytes), "an unknown context, which is not counted"
    if one.context_bytes:
        context = f"a CUDA context of {format_bytes(one.context_bytes)}"
    yield "GPU", "from sources", f"{usable} usable, {context}. {found.gpu.source}."
    if one.seconds is not None and one.low is not None and one.high is not None:
        yield (
            "time",
            "computed",
            f"{one.low / one.seconds:.2f} to {one.high / one.seconds:.2f} times the figure: operations, bytes and "
            "launches of a step, priced by the GPU's data sheet.",
        )
    else:
        yield "time", "unknown", "Not predicted; set-ups are ranked by their floating-point operations."
    if found.texts.lengths is not None:
        yield "lengths", "measured", f"Counted in {found.texts.rows:,} rows of your data."
    elif found.texts.seq_len is not None:
        yield "lengths", "assumed", f"Every row has {found.texts.seq_len} tokens."


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
            told = {"total_bytes": other.total_bytes, "verdict": other.verdict, "time_ratio": ratio, "refused": ""}
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
    names = [name for technique in (*more, *mine) for name, _ in technique.fields]
    is_one = len(mine) + len(more) == 1 or (len(mine) == len(more) == 1 and len(set(names)) < len(names))
    differ = (name for name in names if getattr(one.recipe, name) != getattr(other.recipe, name))
    return next(differ, None) if is_one and one.rows == other.rows else None


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple) else str(value)
