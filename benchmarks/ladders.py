"""Two published ladders of memory techniques, predicted beside what was measured: python benchmarks/ladders.py A

A is BERT-large's shape at batch 32, B is BERT-large at batch 4 on a V100. Predictions are those of today's software,
with what the settings of ``estimate`` can say of the measured versions. The last row is this package's preset for 4 GB,
which nobody has published.

python benchmarks/ladders.py B --plot ladder.png    # also a picture: .png, .svg or .pdf
python benchmarks/ladders.py B --json               # JSON instead of a table

Imported without torch or transformers, as ``gpu.py ladder`` measures the same rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hf_memopt.cli.command import spinner
from hf_memopt.plotting import check_picture
from hf_memopt.units import to_gib

if TYPE_CHECKING:
    from hf_memopt.memory.result import Estimate

LADDERS = ("A", "B")
OURS = "4gb-gpu"
COLUMNS = 8  # of a figure


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
    return _every_ladder()[name]


@cache
def _every_ladder() -> dict[str, Ladder]:
    text = (Path(__file__).resolve().parent / "published" / "ladders.json").read_text(encoding="utf-8")
    return {name: _ladder(name, found) for name, found in json.loads(text).items()}


def _ladder(name: str, found: Mapping[str, Any]) -> Ladder:
    shared = {"precision": "fp32", "optim": "adamw_torch", "seq_len": found["seq_len"], **found["common"]}
    rows = []
    for row in found["rows"]:
        size_bytes = round(row["gib"] * 2**30) if "gib" in row else row["mib"] * 2**20
        speed = row.get("examples_per_second")
        seconds = row["seconds"] if speed is None else found["effective_batch_size"] / speed
        rows.append(LadderRow(row["id"], size_bytes, seconds, {**shared, **row["settings"]}))
    context = found.get("context_mib")
    return Ladder(
        name=name,
        of_task=found["gpu_is_assumed"],
        context_bytes=None if context is None else context * 2**20,
        rows=tuple(rows),
        **{key: found[key] for key in ("title", "source", "measured_on", "model", "gpu", "effective_batch_size")},
        seq_len=found["seq_len"],
        then=found["then"],
    )


# ---- The predictions


@dataclass(frozen=True)
class PredictedRow:
    """A row of a ladder with its prediction; without published figures for what only this package has."""

    name: str
    total_bytes: int
    seconds: float
    published: LadderRow | None = None
    estimate: Estimate | None = field(default=None, repr=False)


def print_ladder(name: str, console: Console, errors: Console, *, json_output: bool, plot: Path | None = None) -> int:
    """Print the ladder, draw it where there is a path for that, and return 0.

    Raises:
        ValueError: a path to which no picture can be written.
        MissingExtraError: a picture without matplotlib.
    """
    ladder = read_ladder(name)
    if plot is not None:
        check_picture(plot, purpose="the picture of a ladder")
    with spinner(f"simulating {ladder.model}", errors, shown=not json_output) as announce:
        rows = predicted_rows(ladder, announce)
        if plot is not None:
            _draw(ladder, rows, plot)
    if json_output:
        console.out(json.dumps(_as_dict(ladder, rows), indent=2), highlight=False)
        return 0
    console.print(f"Ladder {ladder.name}: {ladder.title}\n", highlight=False)
    for line in _table(ladder, rows):
        console.out(line, highlight=False)
    for text in _notes(ladder, rows):
        console.print(text, highlight=False)
    console.out(f"Source: {ladder.source}", highlight=False)  # an address is not wrapped
    if plot is not None:
        console.out(f"Picture: {plot}", highlight=False)
    return 0


def predicted_rows(ladder: Ladder, announce: Callable[[str], object] = lambda text: None) -> list[PredictedRow]:
    """Return the rows of a ladder with their predictions, and one more: the preset for 4 GB with the same batch."""
    from hf_memopt.devices.gpus import find_gpu
    from hf_memopt.memory.estimation import estimate
    from hf_memopt.memory.recording.session import keeping_models
    from hf_memopt.recipes.effective_batch import largest_divisor
    from hf_memopt.recipes.presets import PRESETS

    gpu = find_gpu(ladder.gpu)
    if ladder.context_bytes is not None:
        gpu = replace(gpu, context_bytes=ladder.context_bytes)
    found = []
    with keeping_models():
        for row in ladder.rows:
            announce(row.name)
            found.append(_predicted(row.name, estimate(ladder.model, gpu=gpu, **row.settings, **ladder.then), row))
        announce(OURS)
        preset, effective = PRESETS[OURS], ladder.effective_batch_size
        rows = largest_divisor(effective, preset.per_device_train_batch_size)
        ours = preset.replace(effective_batch_size=effective, per_device_train_batch_size=rows)
        own = estimate(ladder.model, gpu=gpu, batch_size=rows, seq_len=ladder.seq_len, recipe=ours)
        found.append(_predicted(f"{OURS} preset", own, None))
    return found


def _predicted(name: str, found: Estimate, published: LadderRow | None) -> PredictedRow:
    assert found.step_time is not None  # both GPUs have known rates
    return PredictedRow(name, found.total_bytes, found.step_time.seconds, published, found)


def _draw(ladder: Ladder, rows: Sequence[PredictedRow], path: Path) -> None:
    """Draw each prediction as a bar, and mark what was published; an assumed GPU has no line."""
    from hf_memopt.memory.output.estimate_picture import bar_of
    from hf_memopt.reports.bar_picture import Limit, draw_bars

    bars = []
    for row in rows:
        measured = None if row.published is None else row.published.total_bytes
        bar = bar_of("", row.name, row.estimate, measured_bytes=measured)
        bars.append(replace(bar, verdict="") if ladder.of_task else bar)
    gpu = None if ladder.of_task or rows[0].estimate is None else rows[0].estimate.gpu
    limit = None if gpu is None else Limit(gpu.name, gpu.usable_bytes)
    draw_bars(bars, path, title=f"Ladder {ladder.name}: {ladder.title}", limit=limit)


# ---- Text and JSON


def _table(ladder: Ladder, rows: Sequence[PredictedRow]) -> Iterator[str]:
    """Yield the lines of the table: GiB and speed, published and predicted."""
    width = max(len(row.name) for row in rows)
    speed = "baseline = 1" if ladder.of_task else "examples/s"
    yield f"{'':<{width}}{'GiB':>{2 * COLUMNS}}{speed:>{2 * COLUMNS}}"
    yield f"{'':<{width}}" + "".join(f"{text:>{COLUMNS}}" for text in ("publ.", "pred.", "publ.", "pred."))
    for row in rows:
        published = row.published
        cells = ["" if published is None else f"{to_gib(published.total_bytes):.2f}", f"{to_gib(row.total_bytes):.2f}"]
        cells += ["" if time is None else f"{time:.2f}" for time in _speeds(ladder, rows, row)]
        yield f"{row.name:<{width}}" + "".join(f"{cell:>{COLUMNS}}" for cell in cells)
    yield ""


def _speeds(ladder: Ladder, rows: Sequence[PredictedRow], row: PredictedRow) -> tuple[float | None, float]:
    """Return published and predicted speed: examples per second, or the time against that of the first row."""
    first, published = rows[0], row.published
    if not ladder.of_task:
        examples = ladder.effective_batch_size
        return None if published is None else examples / published.seconds, examples / row.seconds
    assert first.published is not None
    relative = None if published is None else published.seconds / first.published.seconds
    return relative, row.seconds / first.seconds


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


def _as_dict(ladder: Ladder, rows: Sequence[PredictedRow]) -> dict[str, Any]:
    names = ("name", "title", "source", "measured_on", "model", "gpu", "effective_batch_size", "seq_len")
    found = []
    for row in rows:
        published = row.published
        one = {"name": row.name, "predicted_bytes": row.total_bytes, "predicted_seconds": row.seconds}
        if published is not None:
            one |= {"published_bytes": published.total_bytes, "published_seconds": published.seconds}
            one["settings"] = dict(published.settings)
        found.append(one)
    only_order = {"only_order_means_anything": ladder.of_task}
    return {**{name: getattr(ladder, name) for name in names}, **only_order, "rows": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", type=str.upper, choices=LADDERS)
    parser.add_argument("-p", "--plot", type=Path, metavar="FILE", help="also write a picture: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    try:
        return print_ladder(options.name, Console(), Console(stderr=True), json_output=options.json, plot=options.plot)
    except ValueError as error:  # of the picture
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
