"""Try patterns by hand: ``python try_pattern.py [--stock] [NAME [SETUP ...]]``.

Without a name, every pattern, and a name may be a part of one. ``--stock``: stock alone, to see that it repeats itself,
and that a rounding of its weights stays within what "equal" allows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from pattern_outcomes import Found, found_in, is_right, repeated, rounded
from test_patterns import PATTERNS


def main() -> int:
    """Print what comes of each cell; return how many are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("setups", nargs="*")
    parser.add_argument("--stock", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    wrong = 0
    for name, pattern in PATTERNS.items():
        if asked.name not in name:
            continue
        for setup in ["stock", "rounded"] if asked.stock else asked.setups or pattern.setups:
            before = time.perf_counter()
            try:
                with contextlib.redirect_stdout(None):  # what the trainer logs
                    if asked.stock:
                        found = Found(repeated(pattern) if setup == "stock" else rounded(pattern))
                    else:
                        found = found_in(pattern, setup)
                is_fine = is_right(pattern, setup, found) and (setup != "stock" or found.outcome.verdict == "same")
                shown = f"{found.outcome.verdict} {found.outcome.detail} {found.remedied or ''}"
                shown += " (the last batch was whole)" if found.is_whole else ""
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                is_fine, shown = False, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            wrong += not is_fine
            seconds = time.perf_counter() - before
            print(f"{'ok   ' if is_fine else 'WRONG'} {seconds:5.2f} s  {name} | {setup} | {shown}", flush=True)
    print(f"{wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
