"""Which models fit with each preset, by the estimate, read from ``preset_fits.json`` without torch or transformers.

``python benchmarks/preset_fits.py`` writes the file. A row of it is a model, the tokens of its longest rows and an
effective batch; for each preset it has the bytes that a training step and an evaluation need, CUDA's context included,
on the smallest GPU that the preset is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from hf_memopt.plain_data import parse_object
from hf_memopt.recipes.planning.candidates import MARGIN_SHARE

__all__ = ["LARGEST_BATCH", "PresetFits", "largest_batch", "preset_fits", "preset_fits_table"]

LARGEST_BATCH = 64
"""Every preset accumulates at this effective batch, so that a larger one needs no more memory."""


@dataclass(frozen=True)
class PresetFits:
    """The file.

    Attributes:
        presets: of each its GPU's name and usable bytes, from the smallest to the largest.
        rows: model, seq_len (None for images), effective_batch_size, and the total bytes by preset.
        versions: of the packages that computed them.
    """

    presets: Mapping[str, Mapping[str, Any]]
    rows: tuple[Mapping[str, Any], ...]
    versions: Mapping[str, str]

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
    """Return headings and lines of text: the largest effective batch of each model, length and preset."""
    lines = [["GPU of ... GB", "tokens", *(name.removesuffix("gb-gpu") for name in found.presets)]]
    for (model, seq_len), rows in found.by_length().items():
        largest = [largest_batch(found, rows, preset) for preset in found.presets]
        cells = ["-" if batch is None else "any" if batch >= LARGEST_BATCH else str(batch) for batch in largest]
        lines.append([model, "" if seq_len is None else str(seq_len), *cells])
    return lines
