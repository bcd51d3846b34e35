"""What ``hf-memopt presets`` does: print the presets and which models fit with each, or explain one.

The tables need no torch.

``python benchmarks/preset_fits.py`` writes ``preset_fits.json``. A row of it is a model, the tokens of its longest rows
and an effective batch; for each preset it has the bytes that a training step and an evaluation need, CUDA's context
included, on the smallest GPU that the preset is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from hf_memopt.cli.command import spinner, wrapped
from hf_memopt.components import MARGIN_SHARE
from hf_memopt.plain_data import parse_object
from hf_memopt.recipes import PRESETS, preset_rows, recipe
from hf_memopt.terminal import Console

if TYPE_CHECKING:
    from hf_memopt.cli.options import PresetsOptions

WIDE_COLUMNS = 130  # of a terminal that has a choice and its reason in one line
PRESETS_COLUMNS = 76  # of a terminal; on a narrower one the GPUs would be cut within their names


def run(options: PresetsOptions, context: Any) -> None:
    """Print the presets, or one of them with its reasons."""
    name, model, console = options.name, options.model, Console()
    if name is None and (model is not None or options.seq_len is not None):
        given = f"seq_len={options.seq_len}" if model is None else f"model={model!r}"
        raise ValueError(
            f"{given} has no preset to begin with; expected both. "
            f"Call: hf-memopt presets 8gb-gpu --model {model or 'gpt2'}"
        )
    if name is None:
        if options.json_output:
            console.out(_presets_json(), highlight=False)
        else:
            _print_presets(console)
        return
    what = "looking at this machine" if model is None else f"estimating {model}"
    is_long = (name == "auto" or model is not None) and not options.json_output
    with spinner(what, Console(stderr=True), shown=is_long):
        chosen = recipe(name, model, seq_len=options.seq_len)
    if options.json_output:
        console.out(chosen.to_json(), highlight=False)
    elif console.is_terminal and console.width < WIDE_COLUMNS:
        pairs = (f"  {name} = {value!r}\n    {reason}" for name, value, reason in chosen.choices())
        console.out(wrapped("\n".join([f"{chosen.name}: {chosen.purpose}", *pairs]), console), highlight=False)
    else:
        console.out(wrapped(str(chosen), console), highlight=False)


def _presets_json() -> str:
    """Return the recipes of all presets by name, and under ``"fits"`` which models fit with them, as JSON text."""
    found = preset_fits()
    fits = [{**row, "fits": {name: found.fits(row, name) for name in found.presets}} for row in found.rows]
    whole = {key: json.loads(value.to_json()) for key, value in PRESETS.items()}
    gpus = {name: dict(gpu) for name, gpu in found.presets.items()}
    whole["fits"] = {"rows": fits, "gpus": gpus, "versions": dict(found.versions), "measured": False}
    return json.dumps(whole, indent=2)


def _print_presets(console: Console) -> None:
    """Print the table of presets, and the largest effective batch of each model that fits with them."""
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
    found = preset_fits()
    (first, *headings), *lines = preset_fits_table(found)
    table = Table(first, box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for heading in headings:
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(*line)
    console.print(table, crop=False)
    gpus = ", ".join(str(gpu["gpu"]) for gpu in found.presets.values())
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    console.print(
        "\nThe most examples of an optimizer step (8, 32 or any number) with which the preset of that size fits, with "
        f"5 % to spare; tokens: of the longest rows. Computed for {gpus}, not measured ({versions}). Language models "
        "need more than a preset: LoRA, 4-bit weights, a fused loss. Plan for them.",
        highlight=False,
    )


# ---- Which models fit


LARGEST_BATCH = 64
"""Every preset accumulates at this effective batch, so that a larger one needs no more memory."""


@dataclass(frozen=True)
class PresetFits:
    """The file."""

    # of each its GPU's name and usable bytes, from the smallest to the largest
    presets: Mapping[str, Mapping[str, Any]]
    # model, seq_len (None for images), effective_batch_size, and the total bytes by preset
    rows: tuple[Mapping[str, Any], ...]
    versions: Mapping[str, str]  # of the packages that computed them

    def fits(self, row: Mapping[str, Any], preset: str) -> bool:
        """Return whether a row fits with a preset, with a twentieth of the GPU to spare as ``plan`` wants it."""
        usable_bytes: int = self.presets[preset]["usable_bytes"]
        total_bytes: int = row["total_bytes"][preset]
        return total_bytes + usable_bytes // MARGIN_SHARE <= usable_bytes

    def by_length(self) -> dict[tuple[str, int | None], list[Mapping[str, Any]]]:
        """Return the rows of each model and length."""
        found: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            found.setdefault((row["model"], row["seq_len"]), []).append(row)
        return found


@cache
def preset_fits() -> PresetFits:
    """Return what the package's file says."""
    text = resources.files("hf_memopt.recipes").joinpath("preset_fits.json").read_text(encoding="utf-8")
    found = parse_object(text)
    return PresetFits(found["presets"], tuple(found["rows"]), found["versions"])


def largest_batch(found: PresetFits, rows: Iterable[Mapping[str, Any]], preset: str) -> int | None:
    """Return the largest effective batch of a model and length that fits with a preset; None for none of the rows."""
    return max((row["effective_batch_size"] for row in rows if found.fits(row, preset)), default=None)


def preset_fits_table(found: PresetFits) -> list[list[str]]:
    """Return headings and lines of text: the largest effective batch of each model, length and preset.

    A model that fits with none of the smaller presets is left out: those are language models, for ``plan``.
    """
    lines = [["GPU of ... GB", "tokens", *(name.removesuffix("gb-gpu") for name in found.presets)]]
    small = [*found.presets][: max(len(found.presets) - 3, 2)]  # up to 16 GB
    fitting = {row["model"] for row in found.rows if any(found.fits(row, preset) for preset in small)}
    for (model, seq_len), rows in found.by_length().items():
        if model not in fitting:
            continue
        largest = [largest_batch(found, rows, preset) for preset in found.presets]
        cells = ["-" if batch is None else "any" if batch >= LARGEST_BATCH else str(batch) for batch in largest]
        lines.append([model, "" if seq_len is None else str(seq_len), *cells])
    return lines
