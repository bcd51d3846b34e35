"""Print a text with its verdict in colour; rich leaves colours out where ``NO_COLOR`` is set or nobody reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_coloured"]

STYLES = {
    r"^It fits\b|^Recommended\b": "bold green",
    r"^Nothing fits\b|^Out of memory\b": "bold red",
}


def print_coloured(text: str, console: Console) -> None:
    """Print lines as they are, without wrapping them, and what ``STYLES`` matches in its colour."""
    from rich.text import Text

    shown = Text(text)
    for pattern, style in STYLES.items():
        shown.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    console.print(shown, soft_wrap=True, highlight=False)
