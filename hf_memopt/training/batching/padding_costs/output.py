"""Show a ``PaddingReport``: as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_memopt.units import percent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from hf_memopt.training.batching.padding_costs.figures import Histogram, PaddingReport

LEAST_BAR_COLUMNS, BAR_COLUMNS = 8, 40
FIGURE_COLUMNS = 22  # beside the bar: its edge, the count and its share
NARROW_COLUMNS = 70  # where the names of strategies have a line for their arguments


def print_report(report: PaddingReport, console: Console) -> None:
    """Print the report, with bars of ``#`` where the console's encoding has no block characters."""
    from rich.markup import escape

    console.print(_heading(report), highlight=False)
    bars = _bars(report, "#" if console.options.ascii_only else "█", console.width)
    console.print(bars, highlight=False, soft_wrap=True)
    console.print(_strategies(report, console.width))
    if report.cuts:
        console.print(_cuts(report))
    console.print()
    unit = "" if report.unit == "tokens" else f", in {escape(report.unit)}"
    console.print(f"[bold]Suggestions{unit}[/]")
    for found in report.suggestions:
        console.print(f"[bold]{found.name} = {found.value}[/]: {found.reason}", highlight=False)
        if found.code:
            console.print(f"    {found.code}", markup=False, highlight=False, soft_wrap=True)


def _heading(report: PaddingReport) -> str:
    from rich.markup import escape

    figures = {**report.percentiles, "max": report.longest}
    lines = [
        f"[bold]{report.examples:,} examples, {report.total:,} {escape(report.unit)}[/], "
        f"mean {report.mean:.1f}, shortest {report.shortest:,}",
        "   ".join(f"{name} {length:,}" for name, length in figures.items()),
    ]
    if report.unit != "tokens":
        lines.insert(
            0, f"[bold yellow]Counted in {escape(report.unit)}, not in tokens[/]: a text has more tokens than words."
        )
    return "\n".join(lines)


def _bars(report: PaddingReport, sign: str, width: int) -> str:
    rows = list(_folded(report.histogram))
    highs = [min(high, report.longest) for _, high, _ in rows]
    labels = [f"{low:,}-{high:,}" if high > low else f"{low:,}" for (low, _, _), high in zip(rows, highs, strict=True)]
    widest, most = max(map(len, labels)), max(count for _, _, count in rows)
    columns = min(max(width - widest - FIGURE_COLUMNS, LEAST_BAR_COLUMNS), BAR_COLUMNS)
    lines = [""]
    for label, (_, _, count) in zip(labels, rows, strict=True):
        bar = sign * max(round(columns * count / most), count > 0)
        lines.append(
            f"{label:>{widest}} |[cyan]{bar:<{columns}}[/] {count:>11,} {percent(count / report.examples, 1):>7}"
        )
    return "\n".join([*lines, ""])


def _folded(histogram: Histogram) -> Iterator[tuple[int, int, int]]:
    """Yield the lowest length, the highest length and the count of 10 to 20 rows."""
    cells = len(histogram.counts) - histogram.has_tail
    fold = 1 if cells <= 20 else 2 if cells <= 40 else 4
    for first in range(0, cells, fold):
        last = min(first + fold, cells)
        yield histogram.edges[first], histogram.edges[last] - 1, sum(histogram.counts[first:last])
    if histogram.has_tail:
        yield histogram.edges[-2], histogram.edges[-1] - 1, histogram.counts[-1]


def _strategies(report: PaddingReport, width: int) -> RenderableType:
    from rich.table import Table

    caption = (
        f"One epoch in batches of {report.batch_size}, padded to multiples of {report.pad_to_multiple_of}. Largest "
        f"batch: its padded {report.unit}. Shapes: distinct (rows, width). "
        "Rows that are packed hold several texts, with a label for each token or none. What each takes in seconds: "
        "hf-memopt plan MODEL --data FILE."
    )
    if report.simulated < report.examples:
        caption += f" All but the fixed widths are replayed on {report.simulated:,} examples, drawn at random."
    title = "What each way of padding wastes"
    table = Table(title=title, caption=caption, caption_justify="left", **_look())
    table.add_column("", overflow="fold")  # a narrow terminal wraps the names, never the figures
    for heading in ("wasted", f"epoch\n{report.unit}", "batches", "largest\nbatch", "shapes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in report.strategies:
        table.add_row(
            found.name.replace("(", "(\n") if width < NARROW_COLUMNS else found.name,
            percent(found.wasted_fraction, 1),
            _count(found.epoch_tokens),
            f"{found.batches:,}",
            f"{found.largest_batch_tokens:,}",
            f"{found.shapes:,}",
        )
    return table


def _count(tokens: int) -> str:
    digits = 0 if tokens >= 10**9 else 1
    return f"{tokens:,}" if tokens < 10**7 else f"{tokens / 1e6:,.{digits}f} M"


def _cuts(report: PaddingReport) -> RenderableType:
    from rich.table import Table

    table = Table(title="\nWhat truncating would lose", **_look())
    for heading in ("max_length", "examples cut", f"{report.unit} lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cut in report.cuts:
        asked = " (asked for)" if cut.max_length == report.max_length else ""
        table.add_row(f"{cut.max_length:,}{asked}", percent(cut.examples_fraction, 2), percent(cut.tokens_fraction, 2))
    return table


def _look() -> dict[str, Any]:
    from rich import box

    edges = {"show_edge": False, "pad_edge": False, "collapse_padding": True}
    return {"title_justify": "left", "box": box.SIMPLE_HEAD, **edges}
