"""What training adapters of a mixture of experts needs with its experts in 4 bits: python benchmarks/experts.py

Planned, without a GPU: QLoRA, 8 rows of 512 tokens a step, a computer with 64 GB of memory. Beside it what stock's
``load_in_4bit`` needs, which leaves fused experts in 16 bits, for one row with checkpointed layers and adapters on
attention. gpt-oss by weights in 16 bits; published it is in MXFP4, which is 4 bits already.
"""

from __future__ import annotations

from typing import Any

import transformers
from results_file import markdown, show

from hf_memopt import estimate, plan
from hf_memopt.units import format_bytes

GPUS = ("RTX 3060 12GB", "RTX 4060 Ti 16GB", "RTX 3090")
MODELS = {
    "Mixtral-8x7B": "Mixtral-8x7B",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "OLMoE-1B-7B": transformers.OlmoeConfig(),
}
QLORA: dict[str, Any] = {"lora": 16, "load_in": "nf4", "precision": "bf16", "autocast_cache": False}
QLORA |= {"lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj")}


def figures_of(name: str) -> dict[str, Any]:
    """Estimate stock's set-up, and plan for each GPU."""
    step = {"batch_size": 1, "seq_len": 512, "checkpointing": True, "fused_cross_entropy": True}
    stocks = estimate(MODELS[name], gpu=GPUS[0], **step, **QLORA)
    return {"name": name, "stock_bytes": stocks.total_bytes, "plans": [planned(MODELS[name], gpu) for gpu in GPUS]}


def planned(model: Any, gpu: str) -> dict[str, Any]:
    """Plan for one GPU."""
    options: dict[str, Any] = {"seq_len": 512, "effective_batch_size": 8, "method": "qlora", "host_memory": "64GB"}
    chosen = plan(model, gpu=gpu, **options).chosen
    assert chosen is not None
    return {
        "gpu": gpu,
        "set_up": chosen.name,
        "batch": chosen.batch,
        "total_bytes": chosen.total_bytes,
        "host_bytes": chosen.host_bytes if chosen.recipe.streamed else 0,
        "tokens_per_second": 8 * 512 / chosen.seconds if chosen.seconds else None,
    }


def table(figures: dict[str, Any]) -> str:
    """Return one row for each model and GPU."""
    rows = [
        (
            row["name"],
            format_bytes(row["stock_bytes"]),
            one["gpu"],
            "streamed" if one["host_bytes"] else "on the GPU",
            one["batch"],
            format_bytes(one["total_bytes"]),
            format_bytes(one["host_bytes"]) if one["host_bytes"] else "-",
            f"{one['tokens_per_second']:,.0f}",
        )
        for row in figures["models"]
        for one in row["plans"]
    ]
    columns = ("model", "stock's 4 bits", "GPU", "experts", "batch", "GPU memory", "host", "tokens/s")
    note = "QLoRA with 8 examples of 512 tokens a step. Computed, not measured (`python benchmarks/experts.py`)."
    return markdown(f"| {' | '.join(columns)} |", rows, note)


def main() -> None:
    """Plan, print the table, append the row."""
    figures = {"models": [figures_of(name) for name in MODELS]}
    show("experts", figures, table(figures))


if __name__ == "__main__":
    main()
