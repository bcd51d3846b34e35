"""Two published ladders of memory techniques, predicted beside what was measured: python benchmarks/ladders.py A

A is BERT-large's shape at batch 32, B is BERT-large at batch 4 on a V100. Predictions are those of today's software,
with what the settings of ``estimate`` can say of the measured versions. The last row is this package's preset for 4 GB,
which nobody has published.

python benchmarks/ladders.py B --plot ladder.png    # also a picture: .png, .svg or .pdf
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from results_file import markdown

from hf_memopt import PRESETS, Estimate, estimate
from hf_memopt.components import parts_of
from hf_memopt.gpus import find_gpu
from hf_memopt.plotting import check_picture, write_picture
from hf_memopt.prediction.recipes import largest_divisor
from hf_memopt.prediction.reports.pictures import Bar
from hf_memopt.units import to_gib

LADDERS = ("A", "B")
OURS = "4gb-gpu"


@dataclass(frozen=True)
class LadderRow:
    """A published run.

    Attributes:
        name: of its techniques.
        total_bytes: of the whole GPU, as published.
        seconds: of an optimizer step; of the whole task where only that was published (``Ladder.of_task``).
        settings: of ``estimate``, batch and length among them.
    """

    name: str
    total_bytes: int
    seconds: float
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Ladder:
    """A published ladder.

    Attributes:
        name: "A" or "B".
        title: model, data and effective batch.
        source: its address.
        measured_on: GPU and versions, as far as they were published.
        model: a known name.
        gpu: of the measurement, or the one that is assumed.
        of_task: whether seconds are those of a task of unknown size on an unknown GPU, so that only ratios mean
            anything.
        context_bytes: of CUDA, where the source measured it.
        effective_batch_size: examples of an optimizer step.
        seq_len: tokens of a row where a row says nothing else.
        then: settings of ``estimate`` for what the measured versions did and those of today do not.
        rows: in the order of the source.
    """

    name: str
    title: str
    source: str
    measured_on: str
    model: str
    gpu: str
    of_task: bool
    context_bytes: int | None
    effective_batch_size: int
    seq_len: int
    then: Mapping[str, Any]
    rows: tuple[LadderRow, ...]


def read_ladder(name: str) -> Ladder:
    """Return a ladder by its name, one of ``LADDERS``."""
    text = (Path(__file__).resolve().parent / "published" / "ladders.json").read_text(encoding="utf-8")
    found = json.loads(text)[name]
    shared = {"seq_len": found["seq_len"], **found.pop("settings")}
    rows = [LadderRow(**{**row, "settings": {**shared, **row["settings"]}}) for row in found.pop("rows")]
    return Ladder(name=name, rows=tuple(rows), **found)


# ---- The predictions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictedRow:
    """A row of a ladder with its prediction; without published figures for what only this package has."""

    name: str
    total_bytes: int
    seconds: float
    published: LadderRow | None = None
    estimate: Estimate | None = field(default=None, repr=False)


def predicted_rows(ladder: Ladder) -> list[PredictedRow]:
    """Return the rows of a ladder with their predictions, and one more: the preset for 4 GB with the same batch."""
    gpu = find_gpu(ladder.gpu)
    if ladder.context_bytes is not None:
        gpu = replace(gpu, context_bytes=ladder.context_bytes)
    found = [
        _predicted(row.name, estimate(ladder.model, gpu=gpu, **row.settings, **ladder.then), row) for row in ladder.rows
    ]
    preset, effective = PRESETS[OURS], ladder.effective_batch_size
    rows = largest_divisor(effective, preset.per_device_train_batch_size)
    ours = preset.replace(effective_batch_size=effective, per_device_train_batch_size=rows)
    own = estimate(ladder.model, gpu=gpu, batch_size=rows, seq_len=ladder.seq_len, recipe=ours)
    return [*found, _predicted(f"{OURS} preset", own, None)]


def _predicted(name: str, found: Estimate, published: LadderRow | None) -> PredictedRow:
    assert found.step_time is not None  # both GPUs have known rates
    return PredictedRow(name, found.total_bytes, found.step_time.seconds, published, found)


def draw(ladder: Ladder, rows: Sequence[PredictedRow], path: Path) -> None:
    """Draw each prediction as a bar, and mark what was published; an assumed GPU has no line."""
    from hf_memopt.prediction.reports.pictures import Limit, bars_figure

    bars = []
    for row in rows:
        measured = None if row.published is None else row.published.total_bytes
        bar = bar_of(row.name, row.estimate, measured)
        bars.append(replace(bar, verdict="") if ladder.of_task else bar)
    gpu = None if ladder.of_task or rows[0].estimate is None else rows[0].estimate.gpu
    limit = None if gpu is None else Limit(gpu.name, gpu.usable_bytes)
    title = f"Ladder {ladder.name}: {ladder.title}"
    write_picture(path, lambda theme: bars_figure(bars, limit, theme, title), purpose="the picture of a ladder")


def bar_of(label: str, found: Estimate | None, measured_bytes: int | None = None) -> Bar:
    """Return the bar of an estimate; of None one that says so."""
    if found is None:
        return Bar(label, {})
    parts = parts_of(found.components, found.peak_reserved_bytes, found.context_bytes)
    return Bar(label, parts, found.verdict or "", measured_bytes=measured_bytes)


# ---- Text -----------------------------------------------------------------------------------------------------------


def table(ladder: Ladder, rows: Sequence[PredictedRow]) -> str:
    """Return GiB and speed, published and predicted: examples per second, or the time against that of the first row."""
    speed = "time, baseline = 1" if ladder.of_task else "examples/s"
    first, lines = rows[0], []
    for row in rows:
        published = row.published
        cells = ["" if published is None else f"{to_gib(published.total_bytes):.2f}", f"{to_gib(row.total_bytes):.2f}"]
        cells.append("" if published is None else f"{_speed(ladder, published, first.published):.2f}")
        lines.append((row.name, *cells, f"{_speed(ladder, row, first):.2f}"))
    heads = f"| | GiB published | predicted | {speed} published | predicted |"
    return markdown(heads, lines, *_notes(ladder, rows), f"Source: {ladder.source}")


def _speed(ladder: Ladder, row: Any, first: Any) -> float:
    return row.seconds / first.seconds if ladder.of_task else ladder.effective_batch_size / row.seconds


def _notes(ladder: Ladder, rows: Sequence[PredictedRow]) -> Iterator[str]:
    of_time, of_bytes, pairs = ordered_pairs(rows)
    yield f"Order as published: {of_time} of {pairs} pairs by time, {of_bytes} of {pairs} by memory."
    if ladder.of_task:
        yield (
            f"Published for {ladder.measured_on}. {ladder.gpu} is assumed, so only the order means anything: times are "
            "relative to the first row, and bytes include the context of that GPU."
        )
    else:
        yield (
            f"Published for {ladder.measured_on}. Predicted for today's software, except that gradients stay "
            "allocated and 8-bit states include embeddings, as then. Softmax also kept its input then, and AdamW "
            "updated one parameter after the other; `make bench-published` and `make bench-step-time` count that too."
        )
    yield "The last row is this package's preset, computed for the same GPU, batch and length."


def ordered_pairs(rows: Sequence[PredictedRow]) -> tuple[int, int, int]:
    """Return how many pairs of rows are in the published order by seconds, and by bytes, and how many there are.

    Of rows that were published as equal either order is right.
    """
    both = [(row, row.published) for row in rows if row.published is not None]
    by_time = by_bytes = pairs = 0
    for (one, one_published), (other, other_published) in combinations(both, 2):
        pairs += 1
        seconds = one_published.seconds - other_published.seconds
        sizes = one_published.total_bytes - other_published.total_bytes
        by_time += seconds == 0 or (seconds > 0) == (one.seconds > other.seconds)
        by_bytes += sizes == 0 or (sizes > 0) == (one.total_bytes > other.total_bytes)
    return by_time, by_bytes, pairs


def main() -> None:
    """Print the ladder, and draw it where there is a path for that."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", type=str.upper, choices=LADDERS)
    parser.add_argument("-p", "--plot", type=Path, metavar="FILE", help="also write a picture: .png, .svg or .pdf")
    options = parser.parse_args()
    ladder = read_ladder(options.name)
    if options.plot is not None:
        try:
            check_picture(options.plot, purpose="the picture of a ladder")
        except ValueError as error:
            parser.error(str(error))
    rows = predicted_rows(ladder)
    print(f"Ladder {ladder.name}: {ladder.title}\n\n{table(ladder, rows)}")
    if options.plot is not None:
        draw(ladder, rows, options.plot)
        print(f"Picture: {options.plot}")


if __name__ == "__main__":
    main()
