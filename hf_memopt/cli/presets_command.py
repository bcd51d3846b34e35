"""What ``hf-memopt presets`` does: print the presets, or how one differs from the Trainer's defaults, without torch."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from hf_memopt.cli.command import spinner, wrapped
from hf_memopt.prediction.recipes import PRESETS, Recipe, preset_rows, recipe
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import PresetsOptions

STOCK = {
    **{item.name: item.default for item in fields(Recipe) if "why" in item.metadata},
    **dict.fromkeys(("effective_batch_size", "per_device_train_batch_size", "per_device_eval_batch_size"), 8),
    **dict.fromkeys(("bucketing", "micro_batching", "memory_report"), False),
    **{"precision": "fp32", "embedding_bits": 8, "pad_to_multiple_of": 1},
}
"""What a Trainer does without a recipe: its defaults and those of its collator, by a recipe's choices."""

WIDE_COLUMNS = 130  # of a terminal that has a choice and its reason in one line
PRESETS_COLUMNS = 76  # of a terminal; on a narrower one the GPUs would be cut within their names


def run(options: PresetsOptions, context: Any) -> None:
    """Print the presets, or one of them with its reasons."""
    name, console = options.name, Console()
    if name is None:
        if options.json_output:
            found = {key: json.loads(value.to_json()) for key, value in PRESETS.items()}
            console.out(json.dumps(found, indent=2), highlight=False)
        else:
            _print_presets(console)
        return
    is_long = name == "auto" and not options.json_output
    with spinner("looking at this machine", Console(stderr=True), shown=is_long):
        chosen = recipe(name)
    if options.json_output:
        console.out(chosen.to_json(), highlight=False)
    else:
        is_narrow = console.is_terminal and console.width < WIDE_COLUMNS
        console.out(wrapped(_explained(chosen, is_narrow=is_narrow), console), highlight=False)


def _explained(chosen: Recipe, *, is_narrow: bool) -> str:
    """Return what differs from the Trainer's defaults, each with its reason."""
    found = [(name, repr(value), why) for name, value, why in chosen.choices() if value != STOCK[name]]
    width, most = (max(len(row[column]) for row in found) for column in (0, 1))
    break_ = "\n    " if is_narrow else "  "
    lines = [
        f"  {name} = {value}{break_}{why} (default: {STOCK[name]!r})"
        if is_narrow
        else f"  {name:<{width}}  {value:<{most}}  {why} (default: {STOCK[name]!r})"
        for name, value, why in found
    ]
    return "\n".join([f"{chosen.name}: {chosen.purpose}", *lines, "Everything else is as the Trainer has it."])


def _print_presets(console: Console) -> None:
    """Print the table of presets."""
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
    console.print(
        "For encoders of up to BERT-large's size at 512 tokens; for any other model: hf-memopt plan MODEL --gpu NAME. "
        "What differs from the Trainer's defaults, and why: hf-memopt presets 4gb-gpu",
        highlight=False,
    )
