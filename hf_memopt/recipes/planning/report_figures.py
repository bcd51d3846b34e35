"""What a report shows beside the candidates of a plan, as plain data: what fits at other lengths and batches, the
timeline, what each choice costs, padding before and after, and how sure each figure is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_memopt.errors import MissingExtraError
from hf_memopt.memory.output.estimate_picture import timeline_data
from hf_memopt.memory.recording.kept_models import keeping_models
from hf_memopt.recipes.planning.candidates import verdict_of
from hf_memopt.recipes.planning.fit_map import fit_map
from hf_memopt.reports.plan_file import AlternativeData, ChoiceData
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.memory.step_time.prices import StepTime
    from hf_memopt.recipes.planning.candidates import Candidate
    from hf_memopt.recipes.planning.result import Plan
    from hf_memopt.recipes.planning.simulation import Simulation
    from hf_memopt.recipes.recipe import Recipe

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
        "choices": [],
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
        choices = priced_choices(one, simulation, simulation.step_time(estimate))
    simulated = {"fit_map": chart, "timeline": timeline_data(estimate, STRETCHES), "choices": choices}
    return {**known_figures(found), **simulated}


def _shown(found: Plan) -> Candidate | None:
    return found.chosen or (found.shortfall.nearest if found.shortfall is not None else None)


def _padding(found: Plan, one: Candidate | None) -> dict[str, Any] | None:
    """Return what padding costs on the lengths, cut as planned; None where there are none."""
    if found.texts.lengths is None or one is None:
        return None
    from hf_memopt.batching.padding_costs.figures import padding_report

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
WITHOUT: dict[str, dict[str, Any]] = {
    "precision": {"precision": "fp32"},
    "optim": {"optim": "adamw_torch_fused"},
    "checkpointing": {"checkpointing": False, "offload": False, "autocast_cache": True},
    "offload": {"offload": False},
    "freeze": {"freeze": ()},
    "lora": {"lora": None, "load_in": None, "weights_dtype": "float32"},
    "load_in": {"load_in": None, "weights_dtype": "bfloat16"},
    "weights_dtype": {"weights_dtype": "float32", "rounding": "nearest"},
    "fused_cross_entropy": {"fused_cross_entropy": False},
    "sparse_tied_embedding": {"sparse_tied_embedding": False},
    "gradient_release": {"gradient_release": False},
}
"""By the field of a technique, what a Recipe has without it."""


def priced_choices(one: Candidate, simulation: Simulation, time: StepTime | None) -> list[ChoiceData]:
    """Return every field of the set-up's recipe, those with alternatives or a reason of their own first.

    Args:
        one: the set-up.
        simulation: of the model on the GPU.
        time: of a step of the set-up with rows of the planned length, which the alternatives have too.
    """
    recipe, seconds = one.recipe, None if time is None else time.seconds
    priced: dict[str, list[AlternativeData]] = {}
    for name, changed in _changes(recipe, simulation.world_size):
        simulation.announce(f"what {name} costs: {_text(changed[name])} instead")
        priced.setdefault(name, []).append(_priced(one, changed, name, simulation, seconds))
    names = [item.name for item in fields(recipe) if item.name not in NOT_SHOWN]
    names.sort(key=lambda name: (name not in priced, name not in recipe.reasons))
    return [
        {
            "name": name,
            "value": _text(getattr(recipe, name)),
            "reason": recipe.reason_of(name),
            "alternatives": priced.get(name, []),
        }
        for name in names
    ]


def _changes(recipe: Recipe, world_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the field and the changed fields of each alternative."""
    rows, share = recipe.per_device_train_batch_size, recipe.effective_batch_size // world_size
    counts = [count for count in range(1, share + 1) if share % count == 0]
    if not recipe.gradient_release:
        for near in ([count for count in counts if count > rows][:1], [count for count in counts if count < rows][-1:]):
            yield from (("per_device_train_batch_size", {"per_device_train_batch_size": count}) for count in near)
    if not recipe.checkpointing:
        yield "checkpointing", {"checkpointing": True, "autocast_cache": False}
    for name, without in WITHOUT.items():
        if getattr(recipe, name) != without[name] and not (name == "weights_dtype" and recipe.lora is not None):
            yield name, without


def _priced(
    one: Candidate, changed: dict[str, Any], name: str, simulation: Simulation, seconds: float | None
) -> AlternativeData:
    alternative: AlternativeData = {
        "value": _text(changed[name]),
        "total_bytes": None,
        "verdict": "",
        "time_ratio": None,
        "refused": "",
    }
    try:
        found = simulation.estimate(one.recipe.replace(**changed), one.seq_len)
    except (ValueError, MissingExtraError) as error:
        return {**alternative, "refused": str(error)}
    time = simulation.step_time(found)
    verdict = verdict_of(one.usable_bytes - found.total_bytes, one.margin_bytes)
    ratio = None if time is None or seconds is None else time.seconds / seconds
    return {**alternative, "total_bytes": found.total_bytes, "verdict": verdict, "time_ratio": ratio}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, tuple) else str(value)
