"""What a model costs that is 5 to 20 % too large for its GPU: python benchmarks/resident_layers.py

Estimated, without a GPU: rows of 512 tokens, so many that the model is too large by that much; every layer is
recomputed, the loss has no logits. As many layers stay as fit with 5 % of the GPU left, the others wait in host memory.
Beside that all layers streamed, and nothing streamed on a GPU of the same speed where the model fits whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from results_file import markdown, show

from hf_memopt import Estimate, estimate
from hf_memopt.gpus import GPUS
from hf_memopt.prediction.memory import largest_that_fits, margin_of
from hf_memopt.prediction.memory.recording import session
from hf_memopt.training.binding.parameters import layer_stacks
from hf_memopt.units import format_bytes

COMMON: Mapping[str, Any] = {"checkpointing": True, "fused_cross_entropy": True, "seq_len": 512}
SET_UPS: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {"lora": 16, "weights_dtype": "bfloat16", "precision": "bf16"},
    "QLoRA": {"lora": 16, "load_in": "nf4", "precision": "bf16"},
    "full, 8-bit": {"optim": "adamw_8bit", "precision": "bf16", "autocast_cache": False},
    "full, bf16 weights, 8-bit": {
        **{"weights_dtype": "bfloat16", "precision": "fp32", "rounding": "stochastic"},
        "optim": "adamw_8bit",
    },
}
ROWS = (
    ("Qwen3-8B", "RTX 4080", 1, "LoRA"),
    ("Llama-3.2-3B", "RTX 4090", 32, "full, bf16 weights, 8-bit"),
    ("Qwen2.5-1.5B", "RTX 4060 Ti 16GB", 8, "full, 8-bit"),
    ("Qwen2.5-14B", "RTX 3060 12GB", 4, "QLoRA"),
)
LARGE_BYTES = 2**40


def figures_of(model: str, gpu: str, batch_size: int, set_up: str) -> dict[str, Any]:
    """Estimate one row."""
    card = GPUS[gpu]
    most_bytes = card.usable_bytes - margin_of(card)
    stacks = layer_stacks(session().load(model).model).values()
    layers = sum(map(len, stacks))

    def estimated(resident: int | None) -> Estimate:
        streamed = {} if resident is None else {"streamed": True, "resident": resident}
        where = replace(card, usable_bytes=LARGE_BYTES) if resident is None else card
        return estimate(model, gpu=where, batch_size=batch_size, **{**COMMON, **SET_UPS[set_up], **streamed})

    found: dict[int, Estimate] = {}

    def spare_bytes(resident: int) -> int:
        found[resident] = estimated(resident)
        return most_bytes - found[resident].total_bytes

    most = largest_that_fits(range(layers), spare_bytes, first=(0, layers - 1))
    assert most is not None
    whole = estimated(None)
    return {
        "row": (model, gpu, batch_size, set_up),
        "layers": layers,
        "resident": most,
        "whole_bytes": whole.total_bytes,
        "usable_bytes": card.usable_bytes,
        "host_bytes": found[most].host_bytes,
        "tokens_per_second": [_speed(one) for one in (found[most], found[0], whole)],
    }


def _speed(found: Estimate) -> float:
    assert found.step_time is not None
    return found.step_time.tokens_per_second() or 0.0


def table(figures: dict[str, Any]) -> str:
    """Return how fast each row is with the largest number of layers, with none, and on a GPU that holds all."""
    rows = []
    for found in figures["rows"]:
        model, gpu, batch_size, set_up = found["row"]
        most, none, whole = found["tokens_per_second"]
        rows.append(
            (
                f"{model}, {set_up}",
                f"{gpu}, {batch_size} x 512",
                f"{format_bytes(found['whole_bytes'])} of {format_bytes(found['usable_bytes'])}, "
                f"{found['whole_bytes'] / found['usable_bytes'] - 1:.0%} too large",
                f"{found['layers'] - found['resident']} of {found['layers']}, {format_bytes(found['host_bytes'])}",
                *(f"{speed:,.0f}" for speed in (most, none, whole)),
                f"{whole / most:.2f} x",
            )
        )
    columns = (
        *("model and set-up", "GPU, batch", "without streaming", "layers that wait, host"),
        *("tokens/s", "all streamed", "on a GPU that holds it", "time"),
    )
    note = (
        "Predicted, not measured (`python benchmarks/resident_layers.py`): rows of 512 tokens, so many that the model "
        "is 5 to 20 % too large; time is that of a step, beside the GPU of the same speed that holds the model."
    )
    return markdown(f"| {' | '.join(columns)} |", rows, note)


def main() -> None:
    """Estimate, print the table, append the row."""
    figures = {"rows": [figures_of(*row) for row in ROWS]}
    show("resident_layers", figures, table(figures))


if __name__ == "__main__":
    main()
