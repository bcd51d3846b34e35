"""Write a sentence for the person who watches a training, on a line of its own even beside a progress bar.

Notices go through the package's loggers. Where a program has not configured logging, Python's handler of last resort
would print them into the middle of tqdm's bar, so they are written with ``tqdm.write`` there.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["notify"]


def notify(logger: logging.Logger, text: str) -> None:
    """Write a warning to the logger's handlers, or to standard error above the progress bar if there are none."""
    if logger.hasHandlers():
        logger.warning(text)
    elif logger.isEnabledFor(logging.WARNING):
        from tqdm import tqdm

        tqdm.write(f"[memopt] {text}", file=sys.stderr)
