"""PNG files: what can be refused before the work that a picture shows, and a file that is there whole or not at all."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt.errors import MissingExtraError
from hf_memopt.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_picture", "save_picture"]


def check_picture(path: Path, purpose: str) -> None:
    """Refuse a picture that could not be written, before the work that it shows.

    Args:
        path: of the picture.
        purpose: what the picture is, for the message.

    Raises:
        ValueError: ``path`` does not end in ``.png``, is a folder or lies in a missing one.
        MissingExtraError: matplotlib is not installed.
    """
    name = f"plot={str(path)!r}"
    if path.suffix.lower() != ".png":
        raise ValueError(f"{name} is not a PNG file; expected a name that ends in .png. Pass {path.stem}.png")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(
            f"{name} is a folder or lies in a missing one; expected a file in an existing folder. Pass {path.name} "
            "to write it here"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", extra="plot", purpose=purpose) from None


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file, at 150 dots per inch.

    Raises:
        ValueError: ``path`` cannot be written; what was there stays.
    """
    drawn = BytesIO()
    try:
        figure.savefig(drawn, format="png", dpi=150)
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise ValueError(
            f"plot={str(path)!r} cannot be written ({error.strerror}); expected a writable place with room. "
            "Pass another file"
        ) from error
