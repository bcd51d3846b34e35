"""The picture of several set-ups: one bar each, as long as its total, against the GPU's line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ladders import bar_of

from hand_made import MIB, SMALL, hand_made
from hf_memopt.plotting import LIGHT
from hf_memopt.prediction.memory import Estimate
from hf_memopt.prediction.reports.pictures import Bar, Limit, bars_figure
from hf_memopt.prediction.reports.pictures.bar_picture import MOST_OF_GPU

pytest.importorskip("matplotlib")
LARGE = hand_made(4)


def bars(gpu_bytes: int | None = SMALL.usable_bytes) -> list[Bar]:
    gpu = None if gpu_bytes is None else replace(SMALL, usable_bytes=gpu_bytes)
    small, large = (replace(found, gpu=gpu) for found in (hand_made(), LARGE))
    given: dict[str, Estimate | None] = {"fp32": large, "rank 16": small, "+ frozen": None}
    return [bar_of(*one) for one in given.items()]


@pytest.fixture
def drawn():
    """Return a function that draws and returns the axes."""

    def draw(given: list[Bar], usable_bytes: int | None = SMALL.usable_bytes):
        limit = None if usable_bytes is None else Limit("GPU 4GB", usable_bytes)
        return bars_figure(given, limit, LIGHT, "a model").axes[0]

    return draw


def widths(axes) -> dict[float, float]:
    """Return the length of each bar, in GiB, by its row."""
    rows: dict[float, float] = {}
    for patch in axes.patches:
        row = patch.get_y() + patch.get_height() / 2
        rows[round(row, 6)] = rows.get(round(row, 6), 0.0) + patch.get_width()
    return rows


def test_a_bar_is_as_long_as_the_total_and_the_gpu_is_a_line(drawn) -> None:
    usable = LARGE.total_bytes // 2
    axes = drawn(bars(usable), usable)
    totals = [found.total_bytes / 2**30 for found in (LARGE, hand_made())]
    assert list(widths(axes).values()) == pytest.approx(totals)
    [line] = axes.lines
    assert line.get_xdata()[0] == pytest.approx(usable / 2**30)
    texts = [text.get_text().strip() for text in axes.texts]
    assert {"fp32", "rank 16", "+ frozen", "not estimable"} <= set(texts)
    assert f"{totals[0]:.2f}" in texts
    assert {f"{totals[1]:.2f}", "fits", "too large"} <= set(
        texts
    )  # at the end of each bar, and in a column of their own


def test_a_bar_far_beyond_the_gpu_is_cut_and_says_so(drawn) -> None:
    axes = drawn(bars(100 * MIB)[:1], 100 * MIB)
    assert sum(widths(axes).values()) == pytest.approx(MOST_OF_GPU * 100 / 1024)
    assert f"» {LARGE.total_bytes / 2**30:.2f}" in [text.get_text() for text in axes.texts]


def test_what_was_measured_is_marked(drawn) -> None:
    axes = drawn([replace(bars()[0], measured_bytes=9 * 2**30)])
    [mark] = [line for line in axes.lines if line.get_marker() == "D"]
    assert mark.get_xdata()[0] == 9
    [legend] = axes.figure.legends
    assert "9.00 measured" in " ".join(text.get_text() for text in axes.texts)
    assert "published, measured" in [text.get_text() for text in legend.get_texts()]
