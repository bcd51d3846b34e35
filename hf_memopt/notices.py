"""Text for the person who watches: sentences beside a progress bar, and no character that steers the terminal.

Notices go through the package's loggers. Where a program has not configured logging, Python's handler of last resort
would print them into the middle of tqdm's bar, so they are written with ``tqdm.write`` there.
Names and the messages of other code may hold escape sequences. ``printable`` is applied where text leaves: by
``notify``, by the console of ``terminal``, and by the command line to errors, warnings and logs.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys

# C0 but tab and line feed, DEL and C1; bidirectional characters, line separators; bytes of a name that are not UTF-8
_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text in which characters that steer a terminal are escaped, as Python and JSON write them.

    Tabs and line feeds stay, and JSON stays what it says.

    Examples:
        >>> printable("model\x1b[31m\nnext line")
        'model\\u001b[31m\nnext line'
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def quoted(word: str) -> str:
    """Return a word of a command as this machine's shell reads it; cmd.exe of Windows knows double quotes alone."""
    return subprocess.list2cmdline([word]) if os.name == "nt" else shlex.quote(word)


class Aside(str):
    """A note that a table shows only where it is asked for every detail (``--verbose``)."""

    __slots__ = ()


class PrintableRecord(logging.LogRecord):
    """A log record whose message is printable; for ``logging.setLogRecordFactory`` of a program."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


def notify(logger: logging.Logger, text: str) -> None:
    """Write a warning to the logger's handlers, or to standard error above the progress bar if there are none."""
    if logger.hasHandlers():
        logger.warning(printable(text))
    elif logger.isEnabledFor(logging.WARNING):
        from tqdm import tqdm

        tqdm.write(f"[memopt] {printable(text)}", file=sys.stderr)
