"""A spinner on standard error while a command imports torch and works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["spinner"]


@contextmanager
def spinner(text: str, errors: Console, *, shown: bool = True) -> Iterator[Callable[[str], object]]:
    """Show a spinner inside the block, and yield the function that changes its text.

    Args:
        text: what the command does.
        errors: the console of standard error; nothing is written to it unless it is a terminal.
        shown: False for no spinner on a terminal either, as with ``--json``.
    """
    if not (shown and errors.is_terminal):
        yield lambda text: None
        return
    from rich.text import Text  # a name may hold what rich takes for markup

    with errors.status(Text(text)) as status:
        yield lambda text: status.update(Text(text))
