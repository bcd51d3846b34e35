"""README's tables of plans: rows are what ``plan`` says, every parameter is trained."""

from __future__ import annotations

import json
from pathlib import Path
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


def test_cells_of_readmes_tables() -> None:
    figures = {"fits": True, "stage": "qlora", "batch": "1 x 32", "total_bytes": 7 * 2**30, "basis": "computed"}
    cell = plans.Cell("m", "T4", 512)

    def shown(**changed: Any) -> str:
        return str(plans._cell({cell.key: {"figures": {**figures, "per_second": 1234.0, **changed}}}, cell))

    assert shown() == "QLoRA 1 x 32<br>7.0 GiB, 1,200/s c"
    assert shown(basis="measured", per_second=None) == "QLoRA 1 x 32<br>7.0 GiB m"
    assert shown(host_bytes=5 * 2**30) == "streamed QLoRA 1 x 32<br>7.0 GiB + 5.0 of the host, 1,200/s c"
    assert shown(fits=False) == "-"
    assert [plans._rounded(value) for value in (9.87, 98.7, 987.0, 123456.0)] == ["9.9", "99", "990", "120,000"]
    with pytest.raises(SystemExit, match=r"was not planned; expected a row of it\. Run: python benchmarks/plans\.py"):
        plans._cell({}, cell)


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


def test_a_run_plans_what_is_asked_and_keeps_the_other_rows(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(plans, "OUT", tmp_path / "plans.jsonl")
    cells = [cell for cell in plans.MODEL_CELLS if cell.gpu == "T4"][:2]
    monkeypatch.setattr(plans, "EVERY_CELL", cells)
    needs = {"set_up": "full", "batch": "1 x 32", "total_bytes": 1}
    monkeypatch.setattr(plans, "figures_of", lambda cell, found: {**json.loads(cell.key), **needs, "found": found})
    for found, arguments in ((1, []), (2, ["--only", cells[1].model])):
        monkeypatch.setattr(plans, "planned", lambda _, found=found: found)
        plans.main(arguments)
    assert [plans.read_plans()[cell.key]["figures"]["found"] for cell in cells] == [1, 2]
