"""The page "Does it fit?": its points against simulations, and what its script answers against its points."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import fit_page
import plans
import pytest
import results_file
from chromium import Chromium
from fit_moments import Row
from fit_points import curve, errors_of, kernels_of, parts_at, random_point

from hf_memopt.components import verdict_of
from hf_memopt.gpus import GPUS
from hf_memopt.prediction.memory import margin_of

PAGES_BYTES = 80 * 2**20  # four pages of the allocator with expandable segments


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return fit_page.read_data()


def small(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.get("parameters", 1e12) < 4e8]


def choose(browser: Chromium, field: str, value: str) -> None:
    box = f"const box = document.getElementById('{field}'); box.value = '{value}';"
    browser.value(f"(() => {{ {box} box.dispatchEvent(new Event('input', {{bubbles: true}})) }})()")


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24))])
def test_a_random_point_is_that_of_a_simulation(rows: list[Row], seed: int) -> None:
    point = random_point(small(rows) if seed < 2 else rows, Random(seed))
    parts, found = parts_at(point.row, point.gpu, point.length), errors_of(point)
    assert abs(found["allocated"]) < 0.03  # pythia-70m with LoRA is off by 2 %
    assert abs(found["total"]) < max(0.05, PAGES_BYTES / sum(parts.values()))  # reserved bytes jump
    assert abs(found.get("seconds", 0.0)) < 0.07  # two of 300 points: 11 % at most


def test_what_the_page_says_of_random_points_is_what_was_found() -> None:
    told = results_file.last_row("fit_data")["figures"]
    assert told["allocated_median"] < 0.001
    assert told["allocated_within_1"] >= 0.95
    assert told["allocated_worst"] < 0.15  # of 300 points: Qwen3.5-4B with layers in RAM; five are above 1.5 %
    assert told["seconds_median"] < 0.005


def test_the_page_is_that_of_the_data(rows: list[Row]) -> None:
    assert fit_page.PAGE.read_text(encoding="utf-8") == fit_page.page_of(rows)
    assert sum(path.stat().st_size for path in (fit_page.PAGE, fit_page.DATA)) < 3e6


def test_readme_and_the_page_give_one_answer(rows: list[Row]) -> None:
    """What a method fits by the page fits by ``plan``; README says where only layers in RAM do."""
    stored, streamed = plans.read_plans(), []
    for cell in plans.MODEL_CELLS:
        gpu, figures = GPUS[cell.gpu], stored[cell.key]["figures"]
        own = [row for row in rows if row["model"] == cell.model and row["kernels"] == kernels_of(gpu).name]
        sizes = {row["method"]: sum(parts_at(row, gpu, cell.seq_len).values()) for row in own if "reason" not in row}
        assert sizes
        verdicts = {method: verdict_of(gpu.usable_bytes - size, margin_of(gpu)) for method, size in sizes.items()}
        if "host_bytes" in figures:
            streamed.append((cell.model, cell.gpu))
            assert verdicts == {"full": "over", "lora": "over", "qlora": "over", "streamed": "fits"}
            assert plans._cell(stored, cell).startswith("streamed ")
        assert figures["fits"]
        assert figures["total_bytes"] <= gpu.usable_bytes - margin_of(gpu)
    assert streamed == [("Llama-3.1-8B", "RTX 3050 4GB")]


def test_where_the_gpu_is_too_small_the_page_says_what_layers_in_ram_need(browser: Chromium) -> None:
    browser.open(fit_page.PAGE, 1280)
    choose(browser, "model", "Llama-3.1-8B")
    choose(browser, "gpu", "RTX 3050 4GB")
    said = browser.value("document.getElementById('instead').textContent")
    assert said.startswith("LoRA with layers in RAM fits RTX 3050 4GB: ")
    assert " GiB of RAM. The smallest GPU that fits it is " in said


def test_the_script_answers_as_the_points_say(browser: Chromium, rows: list[Row]) -> None:
    browser.open(fit_page.PAGE, 1280)
    chance = Random(0)
    for point in (random_point(rows, chance) for _ in range(40)):
        asked = json.dumps([point.row["model"], point.gpu.name, point.row["method"], point.length])
        found: dict[str, Any] = browser.value(f"fit.answer(...{asked})")
        expected = parts_at(point.row, point.gpu, point.length)
        assert found["parts"] == pytest.approx(expected, abs=2e-4 * sum(expected.values()))
        if point.row["seconds"]:
            told = browser.value(f"fit.secondsOf(...{asked})")
            own = curve(point.row["lengths"], point.row["seconds"][point.gpu.name], point.length)
            assert told == pytest.approx(own, rel=3e-3)


def test_what_is_chosen_is_in_the_address(browser: Chromium, rows: list[Row]) -> None:
    browser.open(fit_page.PAGE, 1280)
    choose(browser, "gpu", "T4")
    choose(browser, "length", "100000")
    assert "gpu=T4" in browser.value("location.hash")
    assert "outside 128 to 4,096 tokens" in browser.value("document.getElementById('length-note').textContent")
    assert browser.value("document.getElementById('headline').textContent").endswith("examples of 4,096 tokens, on T4")
    choose(browser, "model", "no such model")
    assert "model=Qwen2.5-1.5B" in browser.value("location.hash")  # a name that is being typed changes nothing


def test_without_javascript_there_is_a_plain_table(rows: list[Row]) -> None:
    page = fit_page.PAGE.read_text(encoding="utf-8")
    plain = page.partition("<noscript>")[2].partition("</noscript>")[0]
    for row in rows:
        if row["kernels"] == kernels_of(fit_page.PLAIN_GPU).name:
            assert f"<tr><td>{row['model']}</td>" in plain
    assert page.count(" hidden>") == 2  # the form and the answers, which the script shows
