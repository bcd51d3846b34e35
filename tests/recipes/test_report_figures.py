"""What a report shows beside the candidates: each figure is that of a direct ``estimate``."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_plans import config, fitting_plan, missing_plan

from hf_memopt import Recipe, estimate, plotting

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def estimated(recipe: Recipe, seq_len: int | None) -> Any:
    found = fitting_plan()
    steps = recipe.effective_batch_size // recipe.per_device_train_batch_size
    return estimate(
        config(),
        batch_size=recipe.per_device_train_batch_size,
        seq_len=seq_len,
        recipe=recipe,
        gpu=found.gpu,
        gradient_accumulation_steps=steps,
    )


@pytest.mark.slow
def test_the_map_is_that_of_direct_estimates() -> None:
    found = fitting_plan()
    chart, one = found.figures["fit_map"], found.chosen
    assert one.seq_len in chart["lengths"]
    assert max(chart["lengths"]) <= 128  # the model's positions
    assert chart["rows"] == [1, 2, 4, 8, 16, 32, 64]  # a step has 4: more are steps of as many
    verdicts = set()
    for count, cells in zip(chart["rows"], chart["cells"], strict=True):
        for length, cell in zip(chart["lengths"], cells, strict=True):
            recipe = one.recipe.replace(per_device_train_batch_size=count, effective_batch_size=max(4, count))
            spare = found.gpu.usable_bytes - estimated(recipe, length).total_bytes
            verdict = "over" if spare < 0 else "tight" if spare < one.margin_bytes else "fits"
            assert cell["verdict"] == verdict, (count, length)
            assert cell["total_bytes"] in (None, found.gpu.usable_bytes - spare)
            verdicts.add(verdict)
    assert len(verdicts) > 1


# ---- What choices cost ----------------------------------------------------------------------------------------------


def test_alternatives_cost_what_direct_estimates_say() -> None:
    found = fitting_plan()
    one = found.chosen
    choices = {choice["name"]: choice for choice in found.figures["choices"]}
    assert set(choices) == {name for name in vars(one.recipe) if name not in ("name", "purpose", "reasons")}
    assert all(choice["reason"] for choice in choices.values())
    (larger,) = choices["checkpointing"]["alternatives"]
    with_it = estimated(one.recipe.replace(checkpointing=True, autocast_cache=False), one.seq_len)
    assert (larger["value"], larger["total_bytes"]) == ("True", with_it.total_bytes)
    assert larger["time_ratio"] > 1
    others = choices["per_device_train_batch_size"]["alternatives"]
    assert {other["value"] for other in others} <= {"1", "2", "4"}
    for other in others:
        rows = estimated(one.recipe.replace(per_device_train_batch_size=int(other["value"])), one.seq_len)
        assert other["total_bytes"] == rows.total_bytes
    assert choices["memory_report"]["alternatives"] == []


# ---- The timeline ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [fitting_plan, missing_plan])
def test_the_timeline_reaches_the_peaks_of_the_plan(planned: Any) -> None:
    found = planned()
    one = found.chosen or found.shortfall.nearest
    line = found.figures["timeline"]
    assert max(line["reserved_bytes"]) == one.reserved_bytes
    allocated = np.sum(list(line["components"].values()), axis=0)
    assert int(allocated.max()) == line["peak"]["allocated_bytes"] == sum(one.components.values())
    assert line["positions"] == sorted(line["positions"])
    assert (line["phases"][0]["from"], line["phases"][-1]["to"]) == (0.0, 1.0)
    assert line["peak"]["phase"] == one.phase


# ---- Lengths, and how sure ------------------------------------------------------------------------------------------


def test_padding_is_that_of_the_micro_batches_of_the_plan() -> None:
    found = fitting_plan()
    padding = found.figures["padding"]
    assert padding["examples"] == 100
    assert padding["batch_size"] == found.recipe.per_device_train_batch_size
    packed, buckets = (
        next(way for way in padding["strategies"] if way["name"].startswith(start))
        for start in ("packed", "bucketed(b")
    )
    epoch = found.chosen.seconds * 100 / found.chosen.examples
    assert buckets["epoch_seconds"] == pytest.approx(epoch)
    assert packed["epoch_seconds"] == pytest.approx(epoch * packed["epoch_tokens"] / buckets["epoch_tokens"])
    assert missing_plan().figures["padding"] is None


def test_each_figure_says_what_it_rests_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)  # which is quicker
    for planned, of_lengths in ((fitting_plan(), "Counted in 100 rows"), (missing_plan(), "Every row has ")):
        planned.report(tmp_path / "plan.html", force=True)
        section = (
            (tmp_path / "plan.html").read_text(encoding="utf-8").partition('id="sure"')[2].partition("</section>")[0]
        )
        for said in ("are kept free for what", " usable, ", planned.gpu.source, of_lengths, "Left out"):
            assert said in html.unescape(section)
