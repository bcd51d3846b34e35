"""The picture of an estimate: what stands in it, its pixels; on estimates made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hand_made import MIB, SMALL, hand_made
from hf_memopt import Estimate
from hf_memopt.components import COLOURS, COMPONENTS
from hf_memopt.gpus import Gpu

LARGE = Gpu("Card 80GB", 81920 * MIB, 80000 * MIB, 400 * MIB, (9, 0), "made up for the tests")


def drawn(estimate: Estimate, monkeypatch, tmp_path: Path) -> Any:
    """Return the figure that ``plot`` saves."""
    figure = pytest.importorskip("matplotlib.figure")
    seen = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: seen.append(self))
    estimate.plot(tmp_path / "timeline.png")
    return seen[0]


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def test_the_picture_is_a_file_with_every_component(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    image_reader = pytest.importorskip("PIL.Image")  # comes with matplotlib
    picture = tmp_path / "timeline.png"
    picture.write_text("an older one")
    components = dict.fromkeys(COMPONENTS, 50 * MIB)
    timeline = hand_made().timeline
    rows = np.full_like(timeline.components, 50 * MIB)
    hand_made(components=components, timeline=replace(timeline, components=rows)).plot(str(picture))
    with image_reader.open(picture) as image:
        assert (image.format, image.width) == ("PNG", 1200)
        pixels = np.asarray(image.convert("RGB"))
    heights = []
    for colour in COLOURS.values():
        wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        found = np.nonzero((pixels[: len(pixels) * 3 // 4, :900] == wanted).all(axis=-1))[0]  # above the legend
        assert len(found) > 2000, colour
        heights.append(found.mean())
    assert heights == sorted(heights, reverse=True)  # stacked in the order of COMPONENTS, weights at the bottom
    assert list(tmp_path.iterdir()) == [picture]


def test_the_picture_names_peak_phases_steps_and_limits(monkeypatch, tmp_path) -> None:
    found = texts(drawn(hand_made(), monkeypatch, tmp_path))
    for text in (
        "bert-large: batch 32 x 128, fp32, adamw_torch_fused\nFITS GPU 4GB: 1.99 of 3.80 GiB, 1.81 GiB free",
        "peak here: 1.59 GiB allocated, backward\nbert.encoder.layer.23",
        "usable on GPU 4GB: 3.80 GiB",
        "reserved and context, 1.99 GiB at most",
        "1.59 GiB allocated where the total is decided; of components, there / at most:",
        "what\ndecides",
        "CUDA context  0.39",
        "memory in GiB",
        "\xa0step 1",
        "\xa0step 2",
        "weights  0.59 / 0.59",
        "gradients  0.07 / 0.59",
        *("load", "forward", "backward", "optimizer", "evaluation"),
    ):
        assert text in found
    assert not [text for text in found if text.startswith("out of memory")]


def test_where_memory_runs_out_is_marked(monkeypatch, tmp_path) -> None:
    gpu = replace(SMALL, usable_bytes=1500 * MIB)  # 1,100 MiB of them for the allocator, which needs 1,225 in event 4
    figure = drawn(hand_made(gpu=gpu), monkeypatch, tmp_path)
    assert "out of memory here: step 1, forward" in texts(figure)
    [mark] = [line for line in figure.axes[1].lines if line.get_marker() == "X"]
    assert mark.get_ydata()[0] == 1500 / 1024


@pytest.mark.parametrize(
    ("gpu", "label", "inside"),
    [
        (replace(SMALL, usable_bytes=2400 * MIB), "usable on GPU 4GB: 2.34 GiB", True),
        (LARGE, "usable on Card 80GB: 78.12 GiB (above the picture)", False),
    ],
)
def test_the_gpu_is_a_dashed_line_where_it_is_near(monkeypatch, tmp_path, gpu, label, inside) -> None:
    figure = drawn(hand_made(gpu=gpu), monkeypatch, tmp_path)
    assert label in texts(figure)
    [line] = [line for line in figure.axes[1].lines if line.get_linestyle() == "--"]
    height = line.get_ydata()[0]
    assert height == gpu.usable_bytes / 2**30
    assert (height < figure.axes[1].get_ylim()[1]) == inside
