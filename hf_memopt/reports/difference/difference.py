"""Tell what grew between two estimates, plans, measurements or runs: by component, by phase, by setting and version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.components import MARGIN_SHARE, verdict_of
from hf_memopt.plotting import page_pictures
from hf_memopt.reports import rendered, share_text, signed
from hf_memopt.reports.difference.sides import Side
from hf_memopt.reports.pictures import Bar, Limit, bars_figure, near
from hf_memopt.reports.run import curves_figure
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from hf_memopt.plotting import Theme

NAMED = 3  # of what grew or shrank, in the sentence
LEAST_SHARE = 50  # what is below a fiftieth of the whole change is not named
COMPUTED = frozenset({"estimate", "plan"})
SHARES_FROM = 76  # columns of a terminal


@dataclass(frozen=True)
class Row:
    """Bytes of one component or phase; None where only the other has it."""

    name: str
    before_bytes: int | None
    after_bytes: int | None

    @property
    def change_bytes(self) -> int:
        """By how much it grew; negative where it shrank."""
        return (self.after_bytes or 0) - (self.before_bytes or 0)

    @property
    def change_text(self) -> str:
        """The change with its sign; "" where only one of them has it."""
        return "" if None in (self.before_bytes, self.after_bytes) else signed(self.change_bytes)

    @property
    def share_text(self) -> str:
        """The change in percent of what it was; "" where only one of them has it."""
        if self.before_bytes is None or self.after_bytes is None:
            return ""
        return share_text(self.after_bytes, self.before_bytes)


@dataclass(frozen=True)
class Difference:
    """What differs between two of one kind.

    Attributes:
        before: the first.
        after: the second.
        components: what the total is made of.
        phases: the allocated peaks.
        settings: (before, after) of those that differ; None where only the other has it.
        versions: (before, after) of packages that differ.
    """

    before: Side
    after: Side
    components: tuple[Row, ...]
    phases: tuple[Row, ...]
    settings: Mapping[str, tuple[str | None, str | None]]
    versions: Mapping[str, tuple[str | None, str | None]]

    @property
    def total(self) -> Row:
        """What they need in all."""
        return Row("total", self.before.total_bytes, self.after.total_bytes)

    @property
    def verdict(self) -> str:
        """What grew or shrank, and whether it still fits, in a few sentences."""
        change, before = self.total.change_bytes, self.before.total_bytes
        is_computed = self.before.kind in COMPUTED
        if not change:
            sentences = [f"Both {'need' if is_computed else 'held'} {format_bytes(before)}."]
        else:
            share = share_text(self.after.total_bytes, before)
            more = f"{format_bytes(abs(change))} {'more' if change > 0 else 'less'}"
            sentences = [
                f"B {'needs' if is_computed else 'held'} {more} than A: {format_bytes(before)} to "
                f"{format_bytes(self.after.total_bytes)}{f' ({share})' if share else ''}."
            ]
        if "model" in self.settings:
            sentences.insert(0, f"The models differ: {' and '.join(map(str, self.settings['model']))}.")
        moved = sorted((row for row in self.components if row.change_bytes), key=lambda row: -abs(row.change_bytes))
        named = [row for row in moved[:NAMED] if LEAST_SHARE * abs(row.change_bytes) >= abs(moved[0].change_bytes)]
        if named:
            sentences.append(f"Most of it: {', '.join(f'{row.name} {signed(row.change_bytes)}' for row in named)}.")
        return " ".join([*sentences, *self._fits()])

    def _fits(self) -> Iterator[str]:
        for letter, side in (("A", self.before), ("B", self.after)):
            if side.failed:
                yield f"{letter} {side.failed}."
            elif side.limit_bytes is not None and side.kind in COMPUTED:
                spare = side.limit_bytes - side.total_bytes
                verdict = verdict_of(spare, side.limit_bytes // MARGIN_SHARE)
                fits = {"fits": "fits with {} to spare", "tight": "is tight with {} to spare", "over": "is {} over"}
                yield f"{letter} {fits[verdict].format(format_bytes(abs(spare)))} on {side.device}."

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""

        def rows(of: tuple[Row, ...]) -> list[dict[str, Any]]:
            return [{**asdict(row), "change_bytes": row.change_bytes} for row in of]

        return {
            "format": 1,
            "verdict": self.verdict,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "total": rows((self.total,))[0],
            "components": rows(self.components),
            "phases": rows(self.phases),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
        }


def compare(before: Side, after: Side) -> Difference:
    """Return what differs.

    Raises:
        ValueError: they are of different kinds.
    """
    if before.kind != after.kind:
        kinds = {before.kind, after.kind}
        what = "what is predicted and what is measured" if len(kinds & COMPUTED) == 1 else "they"
        first, second = ("an estimate" if one == "estimate" else f"a {one}" for one in (before.kind, after.kind))
        raise ValueError(
            f"path={before.name!r}, {after.name!r} are {first} and {second}; expected two of one "
            f"kind, since {what} differ by "
            f"more than what changed. Pass two of the kind of {before.name}"
        )
    return Difference(
        before,
        after,
        _rows(before.components, after.components),
        _rows(before.phases, after.phases),
        _differing(before.settings, after.settings),
        _differing(before.versions, after.versions),
    )


def _rows(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Row, ...]:
    names = dict.fromkeys([*before, *after])
    rows = (Row(name, before.get(name), after.get(name)) for name in names)
    return tuple(row for row in rows if row.before_bytes or row.after_bytes)


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    names = dict.fromkeys([*before, *after])
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---- In a terminal --------------------------------------------------------------------------------------------------


def print_difference(found: Difference, console: Console) -> None:
    """Print tables and verdict at the console's width."""
    from rich.text import Text

    def plain(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), highlight=False)

    plain(f"A  {found.before.name}: {found.before.title}{_on(found.before)}")
    plain(f"B  {found.after.name}: {found.after.title}{_on(found.after)}")
    console.print(_table("component", (*found.components, found.total), console.width, last_is_total=True))
    if found.phases:
        console.print(_table("peak in the phase", found.phases, console.width))
    for what, pairs in (("setting", found.settings), ("version", found.versions)):
        for name, (one, other) in pairs.items():
            plain(f"{what} {name}: {_value(one)} -> {_value(other)}")
    grew = found.total.change_bytes
    plain(found.verdict, "bold red" if grew > 0 else "bold green" if grew < 0 else "bold")


def _on(side: Side) -> str:
    return f", on {side.device}" if side.device else ""


def _value(text: str | None) -> str:
    return "not there" if text is None else text


def _table(heading: str, rows: tuple[Row, ...], width: int, *, last_is_total: bool = False) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heading)
    for name in ("A", "B", "change", *(["in %"] if width >= SHARES_FROM else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row.change_bytes > 0 else "green" if row.change_bytes < 0 else ""
        cells = [Text(row.name), *(Text(_bytes(size)) for size in (row.before_bytes, row.after_bytes))]
        cells.append(Text(row.change_text, style=style))
        if width >= SHARES_FROM:
            cells.append(Text(row.share_text))
        is_total = last_is_total and row is rows[-1]
        if is_total:
            table.add_section()
        table.add_row(*cells, style="bold" if is_total else None)
    return table


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


# ---- As a page ------------------------------------------------------------------------------------------------------


def difference_page(found: Difference) -> str:
    """Return the difference as one HTML page."""
    sides = {"A": found.before, "B": found.after}
    bars = [Bar(letter, side.components) for letter, side in sides.items()]
    limits = [Limit(side.device, side.limit_bytes or 0) for side in sides.values()]
    limit = near(max(limits, key=lambda limit: limit.usable_bytes), max(side.total_bytes for side in sides.values()))
    said = ", ".join(f"{letter}: {format_bytes(side.total_bytes)}" for letter, side in sides.items())
    grew = found.total.change_bytes
    view = {
        "versions": found.after.versions,
        "found": found,
        "headline": "Grew" if grew > 0 else "Shrank" if grew < 0 else "As before",
        "same_title": found.before.title == found.after.title,
        "verdict": "over" if grew > 0 else "fits",
        "sides": sides,
        "components": _cells((*found.components, found.total)),
        "phases": _cells(found.phases),
    }
    drawn: dict[str, tuple[str, Callable[[Theme], Figure]]] = {"total": (said, partial(bars_figure, bars, limit))}
    if curves := {letter: side.curves for letter, side in sides.items() if side.curves}:
        drawn["curves"] = ("The two runs by optimizer step", partial(curves_figure, curves))
    return rendered("difference.html.jinja", view, page_pictures(drawn))


def _cells(rows: tuple[Row, ...]) -> list[list[str]]:
    return [
        [row.name, row.change_text, row.share_text, _bytes(row.before_bytes), _bytes(row.after_bytes)] for row in rows
    ]
