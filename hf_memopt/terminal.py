"""The console that everything for a terminal or a notebook is printed to, in which no text steers the terminal.

``printable`` is applied to what rich is about to colour, so that rich's own escape sequences stay and those of names do
not. In a notebook the text is 80 columns wide, 580 pixels, so that it stands in a narrow cell without scrolling. Its
colours can be read on light and dark paper.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.terminal_theme import TerminalTheme

from hf_memopt.notices import printable

SETTINGS: dict[str, Any] = {"width": 80, "force_jupyter": False}

PRE = (
    '<pre style="overflow-x:auto; white-space:pre; line-height:normal; font-size:12px; font-family:Menlo,Consolas,'
    "'DejaVu Sans Mono',monospace\">{code}</pre>"
)
RED, GREEN, YELLOW, CYAN = (212, 60, 60), (0, 145, 85), (170, 120, 0), (0, 140, 160)
BLACK, WHITE, BLUE, MAGENTA = (0, 0, 0), (255, 255, 255), (60, 110, 210), (170, 80, 170)
THEME = TerminalTheme(WHITE, BLACK, [BLACK, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, WHITE])


class Console(rich.console.Console):
    """rich's console, with ``printable`` applied to every text. (Of BEL, BS, VT, FF and CR rich keeps nothing.)"""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def printed_text(print_to: Callable[[Console], object]) -> str:
    """Return as plain text of at most 80 columns what a function prints to a console."""
    text = io.StringIO()
    print_to(Console(file=text, color_system=None, **SETTINGS))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def printed_html(print_to: Callable[[Console], object]) -> str:
    """Return as HTML what a function prints to a console; every string in it is escaped."""
    console = Console(file=io.StringIO(), record=True, color_system="truecolor", force_terminal=True, **SETTINGS)
    print_to(console)
    return console.export_html(theme=THEME, code_format=PRE, inline_styles=True)
