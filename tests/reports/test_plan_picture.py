"""The picture of a plan: bars of what was simulated, cells of what fits, in light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_memopt import Plan
from hf_memopt.plotting import DARK, LIGHT, Theme
from hf_memopt.prediction.reports.plan import draw_plan, plan_picture, read_plan_text

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(plan_picture.plotting, "save_picture", lambda figure, path, *_: found.append(figure))
    return found


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_set_ups_are_bars_as_long_as_their_totals_and_cells_say_what_fits(
    text: str, figures: list[Any], tmp_path: Path
) -> None:
    told = read_plan_text(text, "plan")
    draw_plan(told, tmp_path / "plan.png")
    axes = figures[0].axes[0]
    shown = [told["candidates"][place] for place in told["shown"]]
    lengths: dict[float, float] = {}
    for patch in axes.patches:
        row = round(patch.get_y() + patch.get_height() / 2, 3)
        lengths[row] = lengths.get(row, 0.0) + patch.get_width()
    most = max(told["usable_bytes"], min(max(one["total_bytes"] for one in shown), 2.5 * told["usable_bytes"]))
    assert list(lengths.values()) == pytest.approx([min(one["total_bytes"], most) / 2**30 for one in shown])
    assert axes.lines[0].get_xdata()[0] == pytest.approx(told["usable_bytes"] / 2**30)
    said = " ".join(texts(axes))
    assert all(one["name"].split(",")[0] in said for one in shown)
    assert "tokens/s" in said
    axes = figures[0].axes[1]
    chart = told["figures"]["fit_map"]
    assert chart is not None
    words = {"fits": "fits", "tight": "tight", "over": "no"}
    cells = [cell for row in reversed(chart["cells"]) for cell in row]
    said = texts(axes)
    assert [one.split(",")[0] for one in said] == [words[cell["verdict"]] for cell in cells]
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"{length:,}" for length in chart["lengths"]]
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(rows) for rows in reversed(chart["rows"])]


def test_where_nothing_fits_the_title_says_so(short: Plan, figures: list[Any], tmp_path: Path) -> None:
    told = read_plan_text(short.to_json(), "plan")
    draw_plan(told, tmp_path / "plan.png")
    assert "nothing fits. Computed, not measured." in figures[0].get_suptitle().replace("\n", " ")
    assert len(figures[0].axes) == 1  # what fits was not simulated


@pytest.mark.parametrize("theme", [LIGHT, pytest.param(DARK, marks=pytest.mark.slow)])
def test_the_same_plan_gives_the_same_file_in_the_colours_of_its_theme(text: str, theme: Theme, tmp_path: Path) -> None:
    told = read_plan_text(text, "plan")
    for name in ("one.svg", "two.svg"):
        draw_plan(told, tmp_path / name, theme=theme)
    one, two = ((tmp_path / name).read_text(encoding="utf-8") for name in ("one.svg", "two.svg"))
    assert one == two
    assert (theme.paper.lower() in one, theme.limit.lower() in one) == (True, True)


def test_a_plan_draws_itself_and_refuses_other_files_first(found: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        found.plot(tmp_path / "plan.gif")
    assert str(error.value).endswith("expected a name that ends in .png, .svg or .pdf. Pass plan.png")
    found.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert json.loads(found.to_json(figures=True))["figures"]["fit_map"]
