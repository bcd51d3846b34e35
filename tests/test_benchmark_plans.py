"""README's tables of plans: rows are what ``plan`` says, every parameter is trained."""

from __future__ import annotations

import json
from typing import Any

import plans
import pytest
import table_pictures

LARGEST = [
    pytest.param("Llama-3.2-1B", 3.81, marks=pytest.mark.slow),
    pytest.param("Llama-3.2-3B", 11.75, marks=pytest.mark.slow),
    pytest.param("Llama-3.1-8B", 23.57, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "most_gib"), LARGEST)
def test_every_parameter_of_the_largest_model_is_trained_on_its_gpu(model: str, most_gib: float) -> None:
    [cell] = [cell for cell in plans.LARGEST_CELLS if cell.model == model]
    figures = plans.figures_of(cell, plans.planned(cell))
    assert (figures["fits"], figures["verdict"], figures["trains_all"]) == (True, "fits", True)
    assert (figures["clipping"], figures["batch"]) == (False, f"{cell.effective_batch_size} x 1")
    assert figures["total_bytes"] <= 0.95 * most_gib * 2**30
    _is_the_row(cell, figures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu"),
    [
        ("roberta-base", "RTX 3050 4GB"),
        ("vit-base-patch16-224", "T4"),
        ("Llama-3.2-1B", "RTX 4060"),
        ("Llama-3.1-8B", "RTX 3050 4GB"),
    ],
)
def test_a_cell_of_the_table_is_what_plan_says(model: str, gpu: str) -> None:
    [cell] = [cell for cell in plans.MODEL_CELLS if (cell.model, cell.gpu) == (model, gpu)]
    _is_the_row(cell, plans.figures_of(cell, plans.planned(cell)))


def _is_the_row(cell: Any, figures: dict[str, Any]) -> None:
    row = plans.read_plans()[cell.key]["figures"]
    assert json.loads(json.dumps(figures)).items() <= row.items(), "run: make table"


def test_the_results_have_every_cell_once() -> None:
    rows = [json.loads(line) for line in plans.OUT.read_text(encoding="utf-8").splitlines()]
    keys = [plans.key_of(row["figures"]) for row in rows]
    assert sorted(keys) == sorted(cell.key for cell in (*plans.LARGEST_CELLS, *plans.MODEL_CELLS))
    assert {row["figures"]["basis"] for row in rows} <= {"computed", "measured"}


def test_the_picture_of_readme_is_that_of_its_table() -> None:
    """Its bytes are those of one version of matplotlib; another one is not compared."""
    matplotlib = pytest.importorskip("matplotlib")
    told, row = json.loads(plans.EXAMPLE_PLAN.read_text(encoding="utf-8")), plans.read_plans()[plans.EXAMPLE.key]
    chosen, figures = told["chosen"], row["figures"]
    shown = (chosen["name"], chosen["total_bytes"], told["usable_bytes"])
    assert shown == (figures["set_up"], figures["total_bytes"], figures["usable_bytes"]), "run: make table"
    light = (table_pictures.IMAGES / "plan.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}" in light:
        assert table_pictures.stale_pictures() == [], "run: python benchmarks/table.py"
