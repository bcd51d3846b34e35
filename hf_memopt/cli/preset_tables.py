"""What ``hf-memopt presets`` prints without a name: the presets, and which models fit with each. Needs no torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["presets_json", "print_presets"]

PRESETS_COLUMNS = 76  # of a terminal; on a narrower one the GPUs would be cut within their names


def presets_json() -> str:
    """Return the recipes of all presets by name, and under ``"fits"`` which models fit with them, as JSON text."""
    from hf_memopt.recipes.preset_fits import preset_fits
    from hf_memopt.recipes.presets import PRESETS

    found = preset_fits()
    fits = [{**row, "fits": {name: found.fits(row, name) for name in found.presets}} for row in found.rows]
    whole = {key: json.loads(value.to_json()) for key, value in PRESETS.items()}
    gpus = {name: dict(gpu) for name, gpu in found.presets.items()}
    whole["fits"] = {"rows": fits, "gpus": gpus, "versions": dict(found.versions), "measured": False}
    return json.dumps(whole, indent=2)


def print_presets(console: Console) -> None:
    """Print the table of presets, and the largest effective batch of each model that fits with them."""
    from rich import box
    from rich.table import Table

    from hf_memopt.recipes.presets import PRESETS, preset_rows

    rows = preset_rows(PRESETS)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    folded = {"eval batch": "eval\nbatch", "checkpointing": "check-\npointing"}
    headings = [heading for heading in rows[0] if heading != "meant for" or console.width >= PRESETS_COLUMNS]
    for heading in headings:
        table.add_column(folded.get(heading, heading), no_wrap=heading != "meant for")
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    console.print(table, crop=False)
    console.print("batch: examples x accumulation steps.\n", highlight=False)
    _print_fits(console)
    console.print(
        "Every choice with its reason: hf-memopt presets 4gb-gpu. For another model, or the fastest set-up of one: "
        "hf-memopt plan MODEL --gpu NAME",
        highlight=False,
    )


def _print_fits(console: Console) -> None:
    from hf_memopt.recipes.preset_fits import preset_fits, preset_fits_table

    found = preset_fits()
    headings, *lines = preset_fits_table(found)
    widths = [max(len(line[column]) for line in (headings, *lines)) for column in range(len(headings))]
    for line in (headings, *lines):
        cells = [line[0].ljust(widths[0]), *(c.rjust(n) for c, n in zip(line[1:], widths[1:], strict=True))]
        console.out(" ".join(cells), highlight=False)
    gpus = ", ".join(str(gpu["gpu"]) for gpu in found.presets.values())
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    console.print(
        "\nThe most examples of an optimizer step (8, 32 or any number) with which the preset of that size fits, with "
        f"5 % to spare; tokens: of the longest rows. Computed for {gpus}, not measured ({versions}).",
        highlight=False,
    )
