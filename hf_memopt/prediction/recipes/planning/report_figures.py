"""What a report shows beside the candidates of a plan, as plain data: what fits at other lengths and batches, the
timeline, what each choice costs, and padding before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hf_memopt.components import Verdict
from hf_memopt.prediction.memory import largest_that_fits
from hf_memopt.prediction.memory.output import timeline_data
from hf_memopt.prediction.memory.recording import keeping_models
from hf_memopt.prediction.recipes.planning.model_and_rows import MULTIPLE

if TYPE_CHECKING:
    from hf_memopt.prediction.recipes.planning.result import Plan
    from hf_memopt.prediction.recipes.planning.simulated import Candidate, Simulation

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
    from hf_memopt.training.batching import padding_report

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
    if (one.stage, one.seq_len) != (other.stage, other.seq_len):
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


# ---- What fits at other lengths and batches


MOST_ROWS = 7
MORE = (1, 2, 3, 4)  # powers of two of the effective batch, where all of it fits at once
PARTS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of the planned length
SHORTEST = 16


def fit_map(one: Candidate, known: Sequence[Candidate], simulation: Simulation) -> dict[str, Any]:
    """Return the map of a set-up: a cell for each of its rows of a micro-batch and, within these, each of its lengths.

    A cell has bytes where it was simulated, and none where others prove its verdict: more rows and longer rows need
    more memory, as long as gradients are accumulated. All rows at once, without accumulation, are a map of their own:
    gradients appear while activations are freed, so that this may need less than a half of the rows.

    Limitations: the order holds for allocated bytes. Reserved ones are rounded to the allocator's blocks, so that a
    cell that was not simulated and nearly fills the GPU may be tight where it says that it fits, or the reverse.
    """
    share = simulation.share
    lengths, rows = _lengths(one.seq_len, simulation.facts.most_tokens), _rows(one, share)
    found = {(same.rows, same.seq_len): same.total_bytes for same in known if same.techniques == one.techniques}
    found[one.rows, one.seq_len] = one.total_bytes

    def spare_bytes(count: int, length: int | None) -> int:
        if (count, length) not in found:
            simulation.announce(f"what fits: {count} rows" + ("" if length is None else f" of {length} tokens"))
            recipe = one.recipe.replace(per_device_train_batch_size=count)
            if simulation.is_whole(recipe) or count > share:
                recipe = recipe.replace(effective_batch_size=count)
            found[count, length] = simulation.estimate(recipe, length).total_bytes
        return one.usable_bytes - found[count, length]

    accumulated = [count for count in rows if count < share] if not simulation.is_whole(one.recipe) else rows
    cells: list[list[dict[str, Any]]] = []
    for part in (accumulated, [count for count in rows if count not in accumulated]):
        for count, verdicts in zip(part, settle(part, lengths, spare_bytes, one.margin_bytes), strict=True):
            totals = [found.get((count, length)) for length in lengths]
            pairs = zip(verdicts, totals, strict=True)
            cells.append([{"verdict": verdict, "total_bytes": total} for verdict, total in pairs])
    return {"lengths": lengths, "rows": rows, "cells": cells}


def settle(
    rows: Sequence[int],
    lengths: Sequence[int | None],
    spare_bytes: Callable[[int, int | None], int],
    margin_bytes: int,
) -> list[list[Verdict]]:
    """Return a verdict for each of ``rows`` and ``lengths``, both ascending, which gets worse along both."""
    columns: list[list[Verdict]] = []
    held = len(rows)  # how many of them fit, with the margin or without, with the length before
    for length in lengths:

        def spare(count: int, length: int | None = length) -> int:
            return spare_bytes(count, length) - margin_bytes

        fewer = rows[:held]
        most = largest_that_fits(fewer, spare, first=(*fewer[-1:], *fewer[-2:-1]))
        fitting = 0 if most is None else rows.index(most) + 1
        held = next((at for at in range(fitting, held) if spare_bytes(rows[at], length) < 0), held)
        columns.append(["fits" if at < fitting else "tight" if at < held else "over" for at in range(len(rows))])
    return [list(row) for row in zip(*columns, strict=True)]


def _lengths(seq_len: int | None, most: int | None) -> list[int | None]:
    if seq_len is None:
        return [None]
    rounded = {max(round(part * seq_len / MULTIPLE) * MULTIPLE, SHORTEST) for part in PARTS if part != 1}
    fitting = [length for length in rounded if most is None or length <= most]
    return [*sorted({seq_len, *fitting})]


def _rows(one: Candidate, share: int) -> list[int]:
    """Return the micro-batches of the map, near to powers of two, those of the set-up and all rows among them."""
    if not one.recipe.accumulates or one.rows == share:  # the batch as one: what can grow is the effective batch
        return sorted({count for count in (share // 4, share // 2, share, *(2**n * share for n in MORE)) if count})
    counts = [count for count in range(1, share + 1) if share % count == 0]
    wanted = {1, one.rows, share}
    for count in sorted(counts, key=lambda count: (count & (count - 1) != 0, count)):  # powers of two first
        if len(wanted) < MOST_ROWS:
            wanted.add(count)
    return sorted(wanted)
