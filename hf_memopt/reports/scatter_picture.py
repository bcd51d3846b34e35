"""Draw the set-ups of a plan by memory and time, and which of them no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting
from hf_memopt.plotting import Theme
from hf_memopt.reports.bar_picture import MOST_OF_GPU
from hf_memopt.reports.plan_file import CandidateData, PlanData, batch_of, is_same
from hf_memopt.units import to_gib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["pareto_front", "scatter_figure", "scatter_of", "text_of"]

KINDS = {
    "fits": ("fits", "o"),
    "tight": ("tight", "s"),
    "asks": ("needs your consent", "D"),
    "over": ("does not fit", "x"),
}
"""What a legend says of each, and its marker; the names are those of a ``Theme``'s colours, but for the last."""
ROOM = 0.05  # of the picture, between two that are numbered


def scatter_of(told: PlanData) -> tuple[list[CandidateData], str]:
    """Return the set-ups whose time is known, and which of them are left out, in a sentence; "" for none.

    Where rows differ, the time of a set-up that does not fit is that of rows of the full length: it is left out.
    """
    texts, omitted = told["texts"], []
    alike = texts["width"] is None or texts["width"] == texts["seq_len"]
    timed = [one for one in told["candidates"] if one["seconds_per_example"] and (alike or one["verdict"] != "over")]
    shown = [one for one in timed if one["total_bytes"] <= MOST_OF_GPU * told["usable_bytes"]]
    if len(shown) < len(timed):
        omitted.append(f"{len(timed) - len(shown)} set-ups need more memory than the picture shows.")
    if not alike:
        omitted.append("Set-ups that do not fit are left out: their time is that of rows of the full length.")
    return shown, " ".join(omitted)


def text_of(one: CandidateData) -> str:
    """Return a set-up with its figures."""
    return f"{one['name']}, {batch_of(one)}: {to_gib(one['total_bytes']):.2f} GiB, {_per_example(_place(one)[1])}"


def scatter_figure(shown: Sequence[CandidateData], told: PlanData, theme: Theme) -> Figure:
    """Return a picture with a mark for each set-up, a staircase along the front, and numbers where there is room."""
    figure, limit, places = plotting.new_figure(4.2), to_gib(told["usable_bytes"]), [_place(one) for one in shown]
    axes = plotting.bare(figure.subplots())
    right, top = 1.06 * max(limit, *(gib for gib, _ in places)), 1.1 * max(seconds for _, seconds in places)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("GiB at the peak")
    axes.set_ylabel("time per example")
    axes.yaxis.set_major_formatter(lambda seconds, _: _per_example(seconds))
    axes.axvline(limit, color=theme.limit, linestyle="--", linewidth=1.6)
    front = [places[number] for number in pareto_front(places)]
    # between two of the front, the memory of the second is needed for its time
    axes.step(*zip(*front, strict=True), where="post", color=theme.strong, linewidth=1, linestyle=":")
    last = (-right, -top)
    for number, place in enumerate(front, 1):
        if max(abs(place[0] - last[0]) / right, abs(place[1] - last[1]) / top) > ROOM:
            look: dict[str, Any] = {"textcoords": "offset points", "xytext": (6, -10), "weight": "bold", "fontsize": 8}
            axes.annotate(str(number), place, **look)
            last = place
    handles: dict[str, Any] = {}
    for one, place in zip(shown, places, strict=True):
        kind = "asks" if one["consents"] and one["verdict"] != "over" else one["verdict"]
        label, marker = KINDS[kind]
        look = {"linestyle": "", "marker": marker, "color": getattr(theme, kind, theme.limit), "markersize": 5.5}
        [mark] = axes.plot(*place, label=label, **look)
        plotting.explain(mark, text_of(one))
        handles.setdefault(label, mark)
        if is_same(one, told["chosen"]):
            look = {"linestyle": "", "marker": "o", "color": theme.ink, "markersize": 12, "fillstyle": "none"}
            [handles["chosen"]] = axes.plot(*place, label="chosen", **look)
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _place(one: CandidateData) -> tuple[float, float]:
    return to_gib(one["total_bytes"]), float(one["seconds_per_example"] or 0)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points that no other is at most as large as in both, in the order of the first.

    Examples:
        >>> pareto_front([(1, 9), (2, 5), (3, 6), (4, 1)])
        [0, 1, 3]
    """
    front: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        if not front or points[place][1] < points[front[-1]][1]:
            front.append(place)
    return front


def _per_example(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"
