"""The longest row that a GPU holds, one example at a time: python benchmarks/longest_rows.py

Planned, without a GPU: ``plan(goal="longest")`` over checkpointing, offloaded inputs of layers and tiles, with the loss
without logits. Beside it the longest row of checkpointing and that loss alone. A computer with 64 GB of memory.
"""

from __future__ import annotations

from typing import Any

from results_file import markdown, show

from hf_memopt import plan
from hf_memopt.prediction.memory import largest_that_fits
from hf_memopt.prediction.recipes import Recipe

GPUS = ("RTX 4060", "RTX 3060 12GB", "RTX 4060 Ti 16GB", "RTX 3090")
BF16 = ("bf16_weights", "release_clipping")
MODELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Llama-3.1-8B", "qlora", ()),
    ("Llama-3.1-8B", "lora", ()),
    ("Qwen2.5-1.5B", "full", ()),
    ("Qwen2.5-1.5B", "full", BF16),
)


def figures_of(model: str, method: str, allow: tuple[str, ...], gpu: str) -> dict[str, Any]:
    """Plan one row of the table; no tokens where nothing fits."""
    options: dict[str, Any] = {"method": method, "allow": allow, "goal": "longest", "host_memory": "64GB"}
    found = plan(model, gpu=gpu, effective_batch_size=1, **options)
    row: dict[str, Any] = {"row": (model, method, allow, gpu), "tokens": 0, "plain": 0}
    if found.chosen is None:
        return row
    assert found.simulation is not None
    simulation, recipe = found.simulation, found.chosen.recipe
    plain = recipe.replace(offload=False, tiled=False)
    lengths = range(64, (found.chosen.seq_len or 0) + 1, 64)
    row |= {"tokens": found.chosen.seq_len, "seconds": found.chosen.seconds, "set_up": found.chosen.name}
    row |= {"host_bytes": found.chosen.host_bytes, "plain": longest(plain, simulation, lengths)}
    return row


def longest(recipe: Recipe, simulation: Any, lengths: range) -> int:
    """Return the longest row that fits with 5 % free."""
    return largest_that_fits(lengths, lambda tokens: simulation.spare_bytes(recipe, tokens), first=(512, 4096)) or 0


def table(figures: dict[str, Any]) -> str:
    """Return tokens of the longest row, and seconds of it, by model, method and GPU."""
    rows = [
        (
            f"{found['row'][0]}, {NAMES[found['row'][1]]}{', bf16 weights, released' * bool(found['row'][2])}",
            found["row"][3],
            *(
                (f"{found['plain']:,}", f"**{found['tokens']:,}**", f"{found['seconds']:.0f} s", set_up(found))
                if found["tokens"]
                else ("-", "-", "-", "nothing fits")
            ),
        )
        for found in figures["rows"]
    ]
    note = "Computed with 64 GB of host memory, not measured (`python benchmarks/longest_rows.py`)."
    return markdown("| model | GPU | checkpointing alone | longest row | a step | with |", rows, note)


NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def set_up(found: dict[str, Any]) -> str:
    """Return the techniques for long rows that a plan uses."""
    return ", ".join(one for one in ("offload", "tiles", "expandable segments") if one in found["set_up"])


def main() -> None:
    """Plan, print the table, append the row."""
    figures = {"rows": [figures_of(*model, gpu) for model in MODELS for gpu in GPUS]}
    show("longest_rows", figures, table(figures))


if __name__ == "__main__":
    main()
