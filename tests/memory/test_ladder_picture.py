"""The picture of several estimates: one bar each, as long as its total, against the GPU's line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hand_made import MIB, SMALL, hand_made
from hf_memopt.memory.output.estimate_text import COLOURS
from hf_memopt.memory.output.ladder_picture import MOST_OF_GPU, Bar, draw_ladder

pytest.importorskip("matplotlib")
LARGE = hand_made(4)


def bars() -> list[Bar]:
    small = hand_made()
    return [Bar("baseline", "fp32", LARGE), Bar("LoRA", "rank 16", small), Bar("LoRA", "+ frozen", None)]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Return a function that draws and returns the axes."""
    figures = []
    monkeypatch.setattr("hf_memopt.plotting.save_picture", lambda figure, path: figures.append(figure))

    def draw(given: list[Bar]):
        draw_ladder(given, tmp_path / "p.png")
        return figures[-1].axes[0]

    return draw


def widths(axes) -> dict[float, float]:
    """Return the length of each bar, in GiB, by its row."""
    rows: dict[float, float] = {}
    for patch in axes.patches:
        row = patch.get_y() + patch.get_height() / 2
        rows[round(row, 6)] = rows.get(round(row, 6), 0.0) + patch.get_width()
    return rows


def test_a_bar_is_as_long_as_the_total_and_the_gpu_is_a_line(drawn) -> None:
    gpu = replace(SMALL, usable_bytes=LARGE.total_bytes // 2)
    given = [replace(bar, estimate=bar.estimate and replace(bar.estimate, gpu=gpu)) for bar in bars()]
    axes = drawn(given)
    totals = [bar.estimate.total_bytes / 2**30 for bar in given if bar.estimate is not None]
    assert list(widths(axes).values()) == pytest.approx(totals)
    [line] = axes.lines
    assert line.get_xdata()[0] == pytest.approx(gpu.usable_bytes / 2**30)
    texts = [text.get_text().strip() for text in axes.texts]
    assert {"fp32", "LoRA", "rank 16", "+ frozen", "not estimable"} <= set(texts)
    assert f"{totals[0]:.1f}" in texts
    assert f"{totals[1]:.1f} fits" in texts


def test_a_bar_far_beyond_the_gpu_is_cut_and_says_so(drawn) -> None:
    gpu = replace(SMALL, usable_bytes=100 * MIB)
    axes = drawn([Bar("baseline", "fp32", replace(LARGE, gpu=gpu))])
    assert sum(widths(axes).values()) == pytest.approx(MOST_OF_GPU * 100 / 1024)
    assert f"» {LARGE.total_bytes / 2**30:.1f}" in [text.get_text() for text in axes.texts]


def test_without_a_gpu_there_is_no_line(drawn) -> None:
    axes = drawn([Bar("baseline", "fp32", hand_made(gpu=None, context_bytes=None))])
    assert not axes.lines
    assert not any("fits" in text.get_text() for text in axes.texts)


def test_the_legend_explains_what_is_drawn(drawn) -> None:
    [legend] = drawn(bars()).figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*COLOURS, "reserved, not in use", "CUDA context", "GPU 4GB: 3.80 GiB usable"]


@pytest.mark.parametrize(("name", "start"), [("l.png", b"\x89PNG"), ("l.svg", b"<?xml"), ("l.pdf", b"%PDF")])
def test_the_ending_chooses_the_format(tmp_path, name, start) -> None:
    draw_ladder(bars(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
