"""The techniques in two processes, as one program: python technique_ranks.py FOLDER CASE..., run by ``run_pair``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import tiny
from hf_memopt.technique_list import TECHNIQUES
from technique_table import GROUPS, fits, run

FLAGS = {"DDP": {"ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False}, "DDP, default flags": {}}


BOTH = ("with 8-bit state", "with released gradients and fused loss")
QUICK = [
    *(f"DDP: {group}" for group in GROUPS if len(GROUPS[group]) > 4),
    *(f"DDP, default flags: {group}" for group in BOTH),
]
CASES = [f"{setting}: {group}" for setting in FLAGS for group in GROUPS]


def names_under(setting: str, group: str) -> list[str]:
    """Return the techniques of a group that are not refused under a setting."""
    return [name for name in TECHNIQUES if name in GROUPS[group] and fits(name, setting)]


def main(folder: str, *cases: str) -> None:
    """Write how far each group of techniques ends from stock alone."""
    gc.freeze()  # the Trainer collects garbage at the start of each run
    rank = os.environ["RANK"]
    found = {}
    for case in cases:
        setting, group = case.split(": ")
        names, flags = names_under(setting, group), FLAGS[setting]
        ours, stock = (
            run(names, Path(folder, f"{rank}-{use}"), use=use, ddp_backend="gloo", **flags) for use in (True, False)
        )
        found[case] = tiny.largest_difference(ours.trainer.model, stock.trainer.model)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
