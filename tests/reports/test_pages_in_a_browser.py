"""Every kind of page in headless Chromium: wide and on a telephone, light, dark and printed.

What is asserted is what a reader would trip over: texts over each other, text that is cut or pale, scrolling sideways,
a request, a value that the keyboard does not reach.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import fit_page
import numpy as np
import pytest
from chromium import Chromium
from hand_made_runs import finished_run, lost_run
from html_page import SHOWN
from invoked import invoked

from hf_memopt import Plan
from hf_memopt.components import COLOURS
from hf_memopt.plotting import DARK, LIGHT

LOOKED_AT = Path(__file__).with_name("looked_at.js").read_text(encoding="utf-8")

READ_BY_KEYS = Path(__file__).with_name("read_by_keys.js").read_text(encoding="utf-8")


def curve() -> dict[str, Any]:
    steps = list(range(2, 41, 2))
    losses = [None if step == 20 else 3.0 - step / 20 - 1.5 * (step == 38) for step in steps]
    return {
        "step": steps,
        "loss": losses,
        "seconds_per_step": [0.4 + 0.01 * (step % 3) for step in steps],
        "tokens_per_second": [9000.0 + step for step in steps],
    }


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, text: str, short: Plan) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    told = json.loads(text)
    long = {**told, "model": "Organisation/" + "Model-of-many-words-" * 8, "candidates": 60 * told["candidates"][:1]}
    long["chosen"] = {**told["chosen"], "name": ", ".join(["LoRA r16"] * 19), "seconds": 9e9, "low": 8e9, "high": 1e10}
    long["shown"] = list(range(12))
    files = {
        "plan": told,
        "missing": {**json.loads(short.to_json(figures=True)), "model": "x" * 200},
        "long": long,
        "run": finished_run(curve=curve()),
        "lost": lost_run(model="x" * 200),
    }
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
        done = invoked("report", folder / f"{name}.json")
        assert done.exit_code == 0, done.output
    return {"does it fit": fit_page.PAGE} | {name: folder / f"{name}.html" for name in files}


NAMES = ("does it fit", "plan", "missing", "long", "run", "lost")


DRAWN = {
    "plan": "peak ladder map timeline padding",
    "missing": "peak ladder map timeline",
    "run": "peak curves timeline",
    "lost": "alive peak timeline",
}
"""The sections of a page that have pictures."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_a_page_can_be_read(browser: Chromium, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    browser.open(pages[name], width, dark=dark)
    found = browser.value(LOOKED_AT)
    assert {what: found[what] for what in ("over", "pale", "wide")} == {"over": [], "pale": [], "wide": []}
    assert found["sideways"] <= 0
    if name in DRAWN:
        shown = browser.value(SHOWN)
        assert [section for section, *_ in shown["pictures"]] == DRAWN[name].split()
        assert all(wide > 300 and high > 60 for _, wide, high in shown["pictures"])
        assert (shown["cut"], shown["wide"]) == ([], [])
    assert browser.complaints() == []


@pytest.mark.parametrize("name", NAMES)
def test_the_keyboard_reaches_every_value(browser: Chromium, pages: dict[str, Path], name: str) -> None:
    for width in (1280, 390):
        browser.open(pages[name], width)
        pictures = browser.value(READ_BY_KEYS)
        assert pictures
        for picture in pictures:
            assert picture["isFocused"]
            assert picture["titles"], picture["name"]
            assert picture["read"] == picture["titles"]


def test_values_are_those_of_the_file(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], 1280)
    read = {picture["name"]: picture["read"] for picture in browser.value(READ_BY_KEYS)}
    assert "measured, weights: 2.30 GiB" in read["peak"]
    assert "loss, step 2: 2.9" in read["curves"]
    assert "loss, step 20: not finite" in read["curves"]
    assert any(one.startswith("step 7: forward + backward 6.04 GiB, optimizer 4.39 GiB") for one in read["timeline"])


def test_some_parts_can_be_shown_alone(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["plan"], 1280)
    faded = "[...document.querySelectorAll('#peak svg.wide g.other')].map((one) => one.dataset.part)"
    press = "[...document.querySelectorAll('#peak .alone button')].find((one) => one.textContent === 'weights').click()"
    assert browser.value(faded) == []
    browser.value(press)
    parts = browser.value("[...document.querySelectorAll('#peak svg.wide g[data-part]')].map((m) => m.dataset.part)")
    assert {"CUDA context", "weights", "gradients", "reserved, not in use"} <= set(parts)
    assert set(browser.value(faded)) == set(parts) - {"weights", ""}
    browser.value(press)
    assert browser.value(faded) == []


@pytest.mark.parametrize("name", NAMES)
def test_print_is_whole(browser: Chromium, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], 794, dark=True, media="print")  # A4 at 96 dots per inch
    browser.value("dispatchEvent(new Event('beforeprint'))")
    found = browser.value(LOOKED_AT)
    assert found["clipped"] == []
    assert found["sideways"] <= 0
    assert found["over"] == []
    assert browser.value("[...document.querySelectorAll('details')].every((one) => one.open)")
    assert browser.value("getComputedStyle(document.querySelector('.picture path')).printColorAdjust") == "exact"
    assert browser.value("getComputedStyle(document.querySelector('section')).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.complaints() == []


# ---- Colours, without a browser

DEUTERANOPE = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTANOPE = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
"""What linear sRGB looks like without one kind of cones; Machado, Oliveira and Fernandes 2009, table 1."""


def lab(colour: str, seen: Any) -> Any:
    """Return CIELAB of a colour of sRGB as somebody sees it."""
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.clip(seen @ np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4), 0, 1)
    white = np.array([0.95047, 1.0, 1.08883])
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear / white
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_parts_differ_to_everybody(theme: Any) -> None:
    colours = {**COLOURS, "context": theme.strong, "unused": theme.faint, "paper": theme.paper}
    for seen in (np.eye(3), np.array(DEUTERANOPE), np.array(PROTANOPE)):
        for (one, first), (other, second) in combinations(colours.items(), 2):
            assert np.linalg.norm(lab(first, seen) - lab(second, seen)) > 12, (one, other)
