"""The console that everything for a terminal is printed to: rich's, with ``printable`` applied to all of its text.

It works on what rich is about to colour, so that rich's own escape sequences stay and those of names do not. (Of five
control characters, such as BEL, rich itself keeps nothing.)
"""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.segment import Segment

from hf_memopt.notices import printable

__all__ = ["Console"]


class Console(rich.console.Console):
    """rich's console without the control characters of foreign text."""

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return what rich renders, each text in it printable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
