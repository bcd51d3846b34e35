"""Write pictures as PNG, SVG or PDF, and as the SVG that stands in a page: one drawing for both.

Pictures are 8 inches wide with text of 8 to 10 points, which is still readable at 600 pixels. They are drawn in the
colours of a ``Theme``, whatever matplotlib's own style is, and the same figures give the same SVG. In a page its text
is text, and its colours are the page's CSS variables, so that it follows the reader's light or dark scheme.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

from hf_memopt.errors import MissingExtraError
from hf_memopt.units import to_gib, to_mib
from hf_memopt.whole_files import check_target, write_whole, writing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
WIDTH_INCHES = 8.0
NARROW_INCHES = 4.3  # in a page on a telephone
FONT = "DejaVu Sans"


@dataclass(frozen=True)
class Theme:
    """The colours of a picture beside those of its data, and of a page.

    Attributes:
        paper: behind everything.
        ink: of text and axes.
        faint: of areas that are not in use, and of what does not fit.
        strong: of what is always there, such as CUDA's context.
        limit: of the line of a GPU, and of what is beyond it.
        fits: of text about what fits.
        tight: of text about what fits with little free.
        fits_area: of a cell that fits.
        tight_area: of a cell that fits with little free.
    """

    paper: str
    ink: str
    faint: str
    strong: str
    limit: str
    fits: str
    tight: str
    fits_area: str
    tight_area: str


LIGHT = Theme(*("#FFFFFF", "#222222", "#D8D8D8", "#444444", "#B00020", "#00694E", "#7A4F00", "#A9DCC9", "#F6D58B"))
DARK = Theme(*("#0D1117", "#E6EDF3", "#343B44", "#C9D1D9", "#FF7B72", "#56D1A4", "#E8B04A", "#0B6B51", "#8A6100"))

THEMES = {"light": LIGHT, "dark": DARK}
_THEME = ContextVar("theme", default=LIGHT)
_WIDTH = ContextVar("width", default=WIDTH_INCHES)
_IN_PAGE = ContextVar("in page", default=False)


# ---- Files


def check_picture(path: Path, purpose: str, name: str = "plot") -> None:
    """Refuse a path that no picture can be written to.

    Args:
        path: the file to be written; its ending chooses the format.
        purpose: what the picture is, as the subject of the message about a missing matplotlib.
        name: what the messages call the path.

    Raises:
        ValueError: ``path`` does not end in one of ``ENDINGS``, is a folder or is in a missing one.
        MissingExtraError: matplotlib is not installed.
    """
    check_target(name, path, kind="a kind of picture", endings=ENDINGS)
    if find_spec("matplotlib") is None:  # importing it would take a third of a second
        raise MissingExtraError("matplotlib", extra="plot", purpose=purpose)


@contextmanager
def in_theme(name: str) -> Iterator[None]:
    """Draw the pictures inside in the colours of ``"light"`` or ``"dark"``, where no other theme is asked for."""
    token = _THEME.set(THEMES[name])
    try:
        yield
    finally:
        _THEME.reset(token)


def write_picture(path: Path, draw: Callable[[Theme], Figure], *, purpose: str, theme: Theme | None = None) -> None:
    """Draw a picture in the colours of a theme and write it.

    Raises:
        ValueError: ``path`` is not a file that a picture can be written to.
        MissingExtraError: matplotlib is not installed.
    """
    check_picture(path, purpose, name="path")
    theme = theme or _THEME.get()
    with drawing(theme):
        save_picture(draw(theme), path, purpose)


@contextmanager
def drawing(theme: Theme = LIGHT, more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Draw and save in the colours of a theme inside the block; ``more`` are further settings of matplotlib."""
    from matplotlib import rc_context

    look: dict[Any, Any] = {
        "svg.hashsalt": "hf-memopt",
        "svg.fonttype": "none",
        "font.family": FONT,
        "text.parse_math": False,
    }
    look |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme.ink)
    look |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper)
    look |= {"legend.facecolor": theme.paper, "legend.edgecolor": theme.faint, "hatch.color": theme.strong}
    look |= {"font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0, "legend.fontsize": 8.5, **(more or {})}
    with rc_context(look):
        yield


def save_picture(figure: Figure, path: Path, purpose: str = "") -> None:
    """Write a figure in the format of the path's ending: PNG at 150 dots per inch, SVG with its text as text.

    Raises:
        ValueError: ``path`` cannot be written; a former file at ``path`` is kept.
    """
    kind = path.suffix.lower()[1:]
    with writing("plot", path):
        write_whole(path, _entitled(figure, purpose) if kind == "svg" else _saved(figure, kind, dpi=150))


def _entitled(figure: Figure, purpose: str) -> str:
    """Return a figure as SVG with a title and a description, which screen readers read."""
    title = " ".join((figure.get_suptitle() or figure.axes[0].get_title(loc="left")).split())
    told = f"<title>{escape(title or purpose)}</title><desc>{escape(purpose)}</desc>"
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + told, _explained(figure), count=1)


def _saved(figure: Figure, kind: str, **options: Any) -> bytes:
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, **options)
    return drawn.getvalue()


# ---- In a page


def page_pictures(pictures: Mapping[str, tuple[str, Callable[[Theme], Figure]]]) -> dict[str, str]:
    """Return the SVG of each picture for a page, a wide and a narrow one; none where matplotlib is not installed.

    Args:
        pictures: by a name that is unique in the page, what a screen reader says, and what draws it.
    """
    if find_spec("matplotlib") is None:
        return {}
    found = {}
    for name, (label, draw) in pictures.items():
        found[name] = "".join(_for_page(draw, label, name, width) for width in ("wide", "narrow"))
    return found


def _for_page(draw: Callable[[Theme], Figure], label: str, name: str, width: str) -> str:
    """Draw a picture; return its SVG without what only a file needs, with the page's fonts and colours."""
    width_token, page_token = _WIDTH.set(NARROW_INCHES if width == "narrow" else WIDTH_INCHES), _IN_PAGE.set(True)
    try:
        # identifiers are hashes with this salt, so two pictures of a page share none
        with drawing(LIGHT, {"svg.hashsalt": f"{name} {width}"}), catch_warnings():
            filterwarnings("ignore", "Glyph .* missing from font")  # the reader's browser has its own fonts
            svg = _explained(draw(LIGHT))
    finally:
        _WIDTH.reset(width_token)
        _IN_PAGE.reset(page_token)
    box, body = re.findall(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', svg, re.DOTALL)[0]
    body = re.sub(r"<style.*?</style>", "", body, count=1)
    body = body.replace(f"font-family: '{FONT}'; ", "")
    body = re.sub(r'<g id="[\w.]+_\d+">', "<g>", body)
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+|\n", r"\1", path[0]), body)
    variables = {getattr(LIGHT, one.name).lower(): f"var(--{one.name})" for one in fields(Theme)}
    body = re.sub(r"(?<=(?:fill|roke): )#\w{6}", lambda colour: variables.get(colour[0], colour[0]), body)
    return f'<svg class="{width}" viewBox="{box}" role="img" aria-label="{escape(label)}">{body}</svg>'


EXPLAINED = "title: "


def explain(artist: Artist, text: str, part: str = "") -> None:
    """Let an SVG show a text where the pointer rests on what is drawn, which a page can show apart from other parts."""
    said = f"{EXPLAINED}{part.replace('|', '/')} | {text}"
    artist.set_gid(said.replace('"', "'"))  # of what has none, matplotlib quotes attributes by "


def explain_stretches(axes: Axes, edges: Sequence[float], texts: Sequence[str]) -> None:
    """Let a page show a text over each stretch of a curve, between two edges each; a file has nothing there."""
    if not _IN_PAGE.get():
        return
    for left, right, text in zip(edges, edges[1:], texts, strict=False):
        # nearly transparent: what is quite so is not drawn, and takes no pointer
        explain(axes.axvspan(left, right, facecolor=(0, 0, 0, 0.004), linewidth=0, zorder=7), text)


def _explained(figure: Figure) -> str:
    """Return a figure as SVG, with titles that browsers show."""
    kept = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # else there is a block of metadata
    svg = _saved(figure, "svg", metadata=kept).decode()
    return re.sub(rf'<g id="{EXPLAINED}([^"|]*) \| ([^"]*)">', r'<g data-part="\1"><title>\2</title>', svg)


# ---- What pictures share


def new_figure(height_inches: float) -> Figure:
    """Return an empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH.get(), height_inches), layout="constrained")


def is_narrow() -> bool:
    """Return whether the narrow one of a page's pictures is drawn."""
    return _WIDTH.get() == NARROW_INCHES


def columns(wide: int) -> int:
    """Return how many columns of text have room where a wide picture has ``wide``."""
    return max(round(wide * _WIDTH.get() / WIDTH_INCHES), 1)


def bare(axes: Axes, *sides: str) -> Axes:
    """Return the axes without the lines at these sides, by default those on top and to the right."""
    axes.spines[list(sides or ("top", "right"))].set_visible(False)
    return axes


def scale_of(most_bytes: int) -> tuple[float, str, int]:
    """Return what bytes are multiplied with for an axis, its unit, and the digits behind the point."""
    return (to_gib(1), "GiB", 2) if most_bytes >= 2**28 else (to_mib(1), "MiB", 1)
