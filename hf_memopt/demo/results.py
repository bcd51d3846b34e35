"""The figures of the demo as text: what each set-up is, one table, and what the table says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["TITLES", "conclusions", "figures_table", "print_results", "setups_text"]

TITLES = {
    "baseline": "(a) naive",
    "stock_best": "(b) stock at its best",
    "memopt": "(c) hf_memopt",
    "memory_saver": "(d) memory saver",
}
SUMMARIES = {
    "baseline": "every text padded to 256 tokens",
    "stock_best": "group_by_length, padded to the longest row",
    "memopt": 'recipe("auto"), bucketed',
    "memory_saver": 'recipe("4gb-gpu"), bucketed',
}
HEADINGS = {"baseline": "(a)\nnaive", "stock_best": "(b)\nstock", "memopt": "(c)\nmemopt", "memory_saver": "(d)\nsaver"}
TABLE_COLUMNS = 60  # what the widest table needs

Figures = Mapping[str, Mapping[str, Any]]


def print_results(figures: Figures, console: Console) -> None:
    """Print what each set-up is, the table and the conclusions; only the text wraps in a narrow terminal."""
    console.print(setups_text(figures))
    console.print()
    console.print(figures_table(figures), width=max(TABLE_COLUMNS, console.width))
    for line in conclusions(figures):
        console.print(f"\n{line}")


def setups_text(figures: Figures) -> str:
    """Return a line for each set-up: how it batches, and its settings as the Trainer had them."""
    return "\n".join(f"{TITLES[name]}: {SUMMARIES[name]}; {figures[name]['settings']}" for name in TITLES)


def figures_table(figures: Figures) -> Table:
    """Return the figures of the set-ups side by side, at most 60 columns wide; bytes in MiB."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for name in TITLES:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)

    def row(label: str, cell: Callable[[Mapping[str, Any]], str]) -> None:
        table.add_row(label, *(cell(figures[name]) for name in TITLES))

    def bytes_row(label: str, size: Callable[[Mapping[str, Any]], int | None]) -> None:
        row(label, lambda f: "-" if (found := size(f)) is None else _number(found / 2**20))

    row("training, seconds", lambda f: _number(f["seconds"]))
    row("  optimizer steps", lambda f: _number(f["optimizer_seconds"]))
    row("examples/s", lambda f: _number(f["examples_per_second"]))
    row("real tokens/s", lambda f: f"{f['real_tokens_per_second']:,.0f}")
    row("padding efficiency", lambda f: f"{f['padding_efficiency']:.3f}")
    bytes_row("optimizer state, MiB", lambda f: f["optimizer_state_bytes"])
    by_dtype = "optimizer_state_bytes_by_dtype"
    for dtype in sorted({dtype for f in figures.values() for dtype in f[by_dtype]}):
        bytes_row(f"  {dtype}", lambda f, dtype=dtype: f[by_dtype].get(dtype, 0))  # type: ignore[misc]
    bytes_row("peak predicted, MiB", lambda f: f["predicted_peak_bytes"])
    bytes_row("peak measured, MiB", lambda f: f["measured_peak_bytes"])
    if not _on_cpu(figures):
        bytes_row("reserved predicted, MiB", lambda f: f["predicted_reserved_bytes"])
        bytes_row("reserved measured, MiB", lambda f: f["measured_reserved_bytes"])
    row("accuracy", lambda f: f"{f['accuracy']:.3f}")
    return table


def conclusions(figures: Figures) -> list[str]:
    """Return what the table says: (c) against stock at its best, then against naive, then (d), then the limits."""
    naive, stock, ours, saver = (figures[name] for name in TITLES)
    texts = ours["test_texts"]
    error = (ours["accuracy"] * (1 - ours["accuracy"]) / texts) ** 0.5
    lines = [
        _comparison("(c)", ours, "(b), stock at its best", stock),
        _comparison("(c)", ours, "(a), naive", naive),
        f"{_comparison('(d)', saver, '(b)', stock)} Its optimizer state is {_ratio(saver, stock, STATE)} that of (b).",
        f"The price of group_by_length in (b): it sorts up to 50 batches at a time from long to short texts, accuracy "
        f"{stock['accuracy']:.3f}. (c) and (d) also batch texts of similar length, but take the batches in random "
        f"order, accuracy {ours['accuracy']:.3f} and {saver['accuracy']:.3f}. The standard error of an accuracy is "
        f"{error:.3f} ({texts} unseen texts), and this is one seed.",
    ]
    if _on_cpu(figures):
        lines += [
            "Peaks: weights, gradients, optimizer state and activations of a step with 256 tokens per text, measured "
            "in torch's allocator apart from the timed run. The prediction is made for a GPU; its matrix workspaces "
            "are subtracted, its reduction buffers are not.",
            "On a CPU the 8-bit optimizer step of bitsandbytes is much slower than the fused one; it is written for "
            "GPUs.",
        ]
    return lines


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


STATE, PEAK, SPEED = "optimizer_state_bytes", "measured_peak_bytes", "examples_per_second"


def _comparison(name: str, one: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> str:
    memory = f", {_ratio(one, other, PEAK)} the peak memory" if one[PEAK] and other[PEAK] else ""
    return (
        f"{name} against {other_name}: {_ratio(one, other, SPEED)} the examples per second{memory}, accuracy "
        f"{one['accuracy']:.3f} against {other['accuracy']:.3f}."
    )


def _ratio(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> str:
    return f"{one[key] / other[key]:.2f}x"


def _on_cpu(figures: Figures) -> bool:
    return all(f["predicted_reserved_bytes"] is None for f in figures.values())
