"""Write one HTML file of a template: check its path, fill the template in, write the file in one step.

A page needs no network and no file beside it. Every text in it is escaped by jinja2, those of pictures by matplotlib.
Of scripts its security policy allows the one of the template alone, by its hash; styles are allowed.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from hf_memopt.plotting import DARK, LIGHT, Theme
from hf_memopt.prediction.reports.pictures import PHASE_SHADES, colours_of
from hf_memopt.units import format_bytes, format_count, format_duration, format_number, percent, to_gib
from hf_memopt.whole_files import check_target, write_whole, writing


def check_page(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Refuse a path that no report can be written to."""
    check_target("report", path, kind="a web page", endings=(".html", ".htm"), force=force)


def write_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page; a former file at ``path`` is replaced in one step."""
    with writing("report", Path(path)):
        write_whole(Path(path), page)


def rendered(template: str, view: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Return the page of a template beside this file.

    Args:
        template: its name.
        view: what it shows.
        pictures: the SVG of each by its name, as ``page_pictures`` returns them.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    variables = {one.name: f"var(--{one.name})" for one in fields(Theme)}
    environment.globals |= {
        "light": asdict(LIGHT),
        "dark": asdict(DARK),
        "colours": {**PHASE_SHADES, **colours_of(Theme(**variables))},
    }
    environment.filters |= {
        "bytes": format_bytes,
        "count_of": format_count,
        "duration": format_duration,
        "gib": lambda size: f"{to_gib(size):.2f}",
        "number": format_number,
        "percent": percent,
        "sha256": lambda text: b64encode(sha256(text.encode()).digest()).decode(),
        "of": lambda rows, *names: [[row[name] for name in names] for row in rows],
        "signed": signed,
        "sized": sized,
    }
    drawn = {name: Markup(svg) for name, svg in pictures.items()}  # whose texts were escaped as it was drawn
    return environment.get_template(template).render(view, pictures=drawn)


# ---- Figures as text


def sized(parts: Mapping[str, int], whole_bytes: int) -> list[list[str]]:
    """Return a row of a table for each part that has bytes, in the order of pictures, with its share of the whole."""
    found = [(name, size) for name, size in parts.items() if size]
    return [[name, format_bytes(size), percent(size / max(whole_bytes, 1), 1)] for name, size in found]


def signed(change_bytes: int) -> str:
    """Return a change of bytes as text with its sign.

    Examples:
        >>> signed(2**20), signed(-(2**20)), signed(0)
        ('+1.0 MiB', '-1.0 MiB', '0 B')
    """
    return f"{'+' if change_bytes > 0 else ''}{format_bytes(change_bytes)}"


def phase_name(phase: str) -> str:
    """Return what a phase of a run is called.

    Examples:
        >>> phase_name("forward_backward")
        'forward + backward'
    """
    return phase.replace("_", " + ")
