"""Show in a notebook, in colour, what a terminal shows.

The text is 80 columns wide, 580 pixels, so that it stands in a narrow cell without scrolling. Its colours can be read
on light and dark paper.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme

__all__ = ["printed_html"]

PRE = (
    '<pre style="overflow-x:auto; white-space:pre; line-height:normal; font-size:12px; font-family:Menlo,Consolas,'
    "'DejaVu Sans Mono',monospace\">{code}</pre>"
)
RED, GREEN, YELLOW, CYAN = (212, 60, 60), (0, 145, 85), (170, 120, 0), (0, 140, 160)
BLACK, WHITE, BLUE, MAGENTA = (0, 0, 0), (255, 255, 255), (60, 110, 210), (170, 80, 170)


def printed_html(print_to: Callable[[Console], object]) -> str:
    """Return as HTML what a function prints to a console; every string in it is escaped.

    Examples:
        >>> printed_html(lambda console: console.print("1 < 2", highlight=False)).count("1 &lt; 2")
        1
    """
    from hf_memopt.terminal import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        width=80,
        color_system="truecolor",
        force_terminal=True,
        force_jupyter=False,
    )
    print_to(console)
    return console.export_html(theme=_theme(), code_format=PRE, inline_styles=True)


def _theme() -> TerminalTheme:
    from rich.terminal_theme import TerminalTheme

    return TerminalTheme(WHITE, BLACK, [BLACK, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, WHITE])
