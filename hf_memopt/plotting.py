"""Write pictures as PNG, SVG or PDF: check the path before the work that a picture shows, then write it in one step."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.errors import MissingExtraError
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_picture", "save_picture"]

ENDINGS = (".png", ".svg", ".pdf")


def check_picture(path: Path, purpose: str) -> None:
    """Refuse a path that no picture can be written to.

    Args:
        path: the file to be written; its ending chooses the format.
        purpose: what the picture is, as the subject of the message about a missing matplotlib.

    Raises:
        ValueError: ``path`` does not end in one of ``ENDINGS``, is a folder or is in a missing one.
        MissingExtraError: matplotlib is not installed.
    """
    name = f"plot={str(path)!r}"
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(
            f"{name} is not a kind of picture; expected a name that ends in .png, .svg or .pdf. Pass {path.stem}.png"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{name} is a folder or is in a missing one; expected a file in an existing folder. Pass {path.name} "
            "to write it here"
        )
    if find_spec("matplotlib") is None:  # importing it would take a third of a second
        raise MissingExtraError("matplotlib", extra="plot", purpose=purpose)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's ending, PNG at 150 dots per inch.

    Raises:
        ValueError: ``path`` cannot be written; a former file at ``path`` is kept.
    """
    drawn = BytesIO()
    try:
        figure.savefig(drawn, format=path.suffix.lower()[1:], dpi=150)
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise ValueError(
            f"plot={str(path)!r} cannot be written ({error.strerror}); expected a writable folder with free space. "
            "Pass another file"
        ) from error
