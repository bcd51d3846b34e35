"""Show in a notebook, in colour, what a terminal shows."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["printed_html"]

COLUMNS = 100
PRE = (
    '<pre style="overflow-x:auto; white-space:pre; line-height:normal; font-family:Menlo,Consolas,'
    "'DejaVu Sans Mono',monospace\">{code}</pre>"
)


def printed_html(print_to: Callable[[Console], object], columns: int = COLUMNS) -> str:
    """Return as HTML what a function prints to a console; every string in it is escaped.

    Examples:
        >>> printed_html(lambda console: console.print("1 < 2", highlight=False)).count("1 &lt; 2")
        1
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        width=columns,
        color_system="truecolor",
        force_terminal=True,
        force_jupyter=False,
    )
    print_to(console)
    return console.export_html(code_format=PRE, inline_styles=True)
