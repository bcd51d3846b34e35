"""Write pictures as PNG, SVG or PDF: check the path before the work that a picture shows, then write it in one step.

Pictures are 8 inches wide with text of 8 to 10 points, which is still readable at 600 pixels. They are drawn in the
colours of a ``Theme``, whatever matplotlib's own style is, and the same figures give the same SVG file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt.errors import MissingExtraError
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DARK", "LIGHT", "WIDTH_INCHES", "Theme", "check_picture", "drawing", "save_picture"]

ENDINGS = (".png", ".svg", ".pdf")
WIDTH_INCHES = 8.0


@dataclass(frozen=True)
class Theme:
    """The colours of a picture beside those of its data.

    Attributes:
        paper: behind everything.
        ink: of text and axes.
        faint: of areas that are not in use, and of what does not fit.
        strong: of what is always there, such as CUDA's context.
        limit: of the line of a GPU, and of what is beyond it.
        fits: of text about what fits.
        tight: of text about what fits with little to spare.
        fits_area: of a cell that fits.
        tight_area: of a cell that fits with little to spare.
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


LIGHT = Theme("#FFFFFF", "#222222", "#DDDDDD", "#555555", "#B00020", "#00694E", "#7A4F00", "#A9DCC9", "#F6D58B")
DARK = Theme("#0D1117", "#E6EDF3", "#343B44", "#8B949E", "#FF7B72", "#56D1A4", "#E8B04A", "#0B6B51", "#8A6100")


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
    name = f"{name}={str(path)!r}"
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"{name} is not a kind of picture; expected a name that ends in .png, .svg or .pdf. Pass "
            f"{path.stem or 'plot'}.png"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{name} is a folder or is in a missing one; expected a file in an existing folder. Pass {path.name} "
            "to write it here"
        )
    if find_spec("matplotlib") is None:  # importing it would take a third of a second
        raise MissingExtraError("matplotlib", extra="plot", purpose=purpose)


@contextmanager
def drawing(theme: Theme = LIGHT) -> Iterator[None]:
    """Draw and save in the colours of a theme inside the block."""
    from matplotlib import rc_context

    look: dict[Any, Any] = {"svg.hashsalt": "hf-memopt", "font.family": "DejaVu Sans", "text.parse_math": False}
    look |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), theme.ink)
    look |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.paper)
    look |= {"font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0, "legend.fontsize": 8.5}
    with rc_context(look):
        yield


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's ending, PNG at 150 dots per inch.

    Raises:
        ValueError: ``path`` cannot be written; a former file at ``path`` is kept.
    """
    drawn, kind = BytesIO(), path.suffix.lower()[1:]
    try:
        figure.savefig(drawn, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise ValueError(
            f"plot={str(path)!r} cannot be written ({error.strerror}); expected a writable folder with free space. "
            "Pass another file"
        ) from error
