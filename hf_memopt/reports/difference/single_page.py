"""Write one estimate or measurement as an HTML file: its verdict, its parts, its phases, what would make it fit."""

from __future__ import annotations

from functools import partial

from hf_memopt.components import MARGIN_SHARE, verdict_of
from hf_memopt.plotting import page_pictures
from hf_memopt.reports import rendered
from hf_memopt.reports.difference.sides import VERDICTS, Side
from hf_memopt.reports.pictures import Bar, Limit, bars_figure, near
from hf_memopt.units import format_bytes


def single_page(side: Side) -> str:
    """Return the page."""
    spare = None if side.limit_bytes is None else side.limit_bytes - side.total_bytes
    verdict = "fits" if spare is None else verdict_of(spare, (side.limit_bytes or 0) // MARGIN_SHARE)
    if side.failed:
        verdict = "over"
    limit = near(Limit(side.device, side.limit_bytes or 0), side.total_bytes)
    view = {
        "side": side,
        "versions": side.versions,
        "verdict": verdict,
        "headline": side.failed or (f"Needs {format_bytes(side.total_bytes)}" if spare is None else VERDICTS[verdict]),
        "spare": spare,
    }
    bars = partial(bars_figure, [Bar("", side.components)], limit)
    return rendered("single.html.jinja", view, page_pictures({"peak": (format_bytes(side.total_bytes), bars)}))
