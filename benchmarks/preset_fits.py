"""Which models fit with each preset, by the estimate: python benchmarks/preset_fits.py

Writes ``hf_memopt/recipes/preset_fits.json``, which ``hf-memopt presets`` prints. Takes two to four minutes on two CPU
cores and needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hf_memopt
from hf_memopt import PRESETS, Recipe, estimate, find_gpu
from hf_memopt.cli.presets_command import LARGEST_BATCH
from hf_memopt.memory.recording import keeping_models
from hf_memopt.recipes import largest_divisor

FILE = Path(hf_memopt.__file__).parent / "recipes" / "preset_fits.json"
GPUS: Mapping[str, str] = MappingProxyType(
    {
        "4gb-gpu": "GTX 1650",
        "6gb-gpu": "RTX 2060",
        "8gb-gpu": "RTX 3050 8GB",
        "12gb-gpu": "RTX 3060 12GB",
        "16gb-gpu": "T4",
        "24gb-gpu": "A10",
        "40gb-gpu": "A100 40GB",
        "80gb-gpu": "H100",
    }
)
"""A GPU of each preset's size with the least usable memory."""
LENGTHS: Mapping[str, tuple[int | None, ...]] = MappingProxyType(
    {
        "roberta-base": (128, 512),
        "bert-large-uncased": (128, 512),
        "t5-base": (128, 512),
        "vit-base-patch16-224": (None,),
        "whisper-small": (128,),  # labels, of 448 at most
        "Llama-3.2-1B": (128, 512, 2048),
        "Qwen2.5-1.5B": (128, 512, 2048),
        "Llama-3.1-8B": (128, 512, 2048),
    }
)
EFFECTIVE_BATCHES = (8, 32, LARGEST_BATCH)


def cut(preset: Recipe, effective_batch_size: int) -> Recipe:
    """Return the preset with another effective batch, cut as ``preset(..., effective_batch_size=)`` cuts it."""
    rows = largest_divisor(effective_batch_size, preset.per_device_train_batch_size)
    return preset.replace(effective_batch_size=effective_batch_size, per_device_train_batch_size=rows)


def total_bytes(preset: str, model: str, seq_len: int | None, effective_batch_size: int) -> int:
    """Return what a step and an evaluation of a model need with a preset on its smallest GPU."""
    recipe = cut(PRESETS[preset], effective_batch_size)
    rows = recipe.per_device_train_batch_size
    return estimate(model, batch_size=rows, seq_len=seq_len, recipe=recipe, gpu=GPUS[preset]).total_bytes


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of the file, those of a model after each other."""
    for model, lengths in LENGTHS.items():
        with keeping_models():
            for seq_len in lengths:
                for batch in EFFECTIVE_BATCHES:
                    sizes = {preset: total_bytes(preset, model, seq_len, batch) for preset in GPUS}
                    yield {
                        "model": model,
                        "seq_len": seq_len,
                        "effective_batch_size": batch,
                        "total_bytes": sizes,
                    }


def versions() -> dict[str, str]:
    """Return the versions that decide about the figures."""
    return {"hf-memopt": hf_memopt.__version__, **{name: version(name) for name in ("torch", "transformers")}}


def text_of(found: list[dict[str, Any]]) -> str:
    """Return the file's text, a line for each row."""
    presets = {name: {"gpu": gpu, "usable_bytes": find_gpu(gpu).usable_bytes} for name, gpu in GPUS.items()}
    lines = ",\n".join(json.dumps(row) for row in found)
    return f'{{"versions": {json.dumps(versions())},\n"presets": {json.dumps(presets)},\n"rows": [\n{lines}\n]}}\n'


def main() -> int:
    """Estimate every row and write the file."""
    found = []
    for row in rows():
        found.append(row)
        print(row["model"], row["seq_len"], row["effective_batch_size"], file=sys.stderr, flush=True)
    FILE.write_text(text_of(found), encoding="utf-8")
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
