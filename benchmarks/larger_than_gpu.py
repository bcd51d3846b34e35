"""What training a model larger than the GPU needs and costs: python benchmarks/larger_than_gpu.py

Estimated, without a GPU: layers streamed from host memory, the loss without logits, rows of 512 tokens. Full training
has weights in bfloat16: each layer steps on the GPU (released 8-bit AdamW), or gradients are parked and AdamW steps on
the host. QLoRA streams frozen layers of 4 bits. A column says from how many tokens in a pass on computing hides the
copies. Beside it the host bytes of FSDP2 with ``CPUOffloadPolicy``: weights, gradients, two averages in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_file import markdown, show

from hf_memopt import estimate
from hf_memopt.units import format_bytes

COMMON: Mapping[str, Any] = {"streamed": True, "fused_cross_entropy": True, "seq_len": 512}
BF16: Mapping[str, Any] = {"weights_dtype": "bfloat16", "precision": "fp32", "rounding": "stochastic"}
RELEASED: Mapping[str, Any] = {**BF16, "gradient_release": True, "max_grad_norm": 0, "optim": "adamw_8bit"}
QLORA: Mapping[str, Any] = {"lora": 16, "load_in": "nf4", "precision": "bf16"}
SET_UPS: Mapping[str, Mapping[str, Any]] = {
    "full, released, 8-bit": {**RELEASED, "embeddings_on_host": True},
    "full, parked, 8-bit": {**BF16, "optim": "adamw_8bit", "embeddings_on_host": True},
    "full, parked": {**BF16, "embeddings_on_host": True},
    "QLoRA": QLORA,
}
ROWS = (
    ("Llama-3.1-8B", "RTX 4060", 8, "full, released, 8-bit"),
    ("Llama-3.1-8B", "RTX 4060", 8, "full, parked, 8-bit"),
    ("Llama-3.1-8B", "RTX 4060", 8, "full, parked"),
    ("Llama-3.1-8B", "RTX 3060 12GB", 8, "full, released, 8-bit"),
    ("Qwen2.5-14B", "RTX 4060 Ti 16GB", 8, "full, released, 8-bit"),
    ("Llama-3.1-70B", "RTX 4090", 4, "QLoRA"),
    ("Llama-3.1-70B", "RTX 4060 Ti 16GB", 4, "QLoRA"),
)
SHARDED_BYTES = 16  # of a parameter


def figures_of(model: str, gpu: str, batch_size: int, set_up: str) -> dict[str, Any]:
    """Estimate one row."""
    found = estimate(model, gpu=gpu, batch_size=batch_size, **COMMON, **SET_UPS[set_up])
    assert found.gpu is not None
    assert found.step_time is not None
    assert found.step_costs is not None
    return {
        "row": (model, gpu, batch_size, set_up),
        "total_bytes": found.total_bytes,
        "usable_bytes": found.gpu.usable_bytes,
        "host_bytes": found.host_bytes,
        "sharded_bytes": SHARDED_BYTES * found.parameters if set_up != "QLoRA" else None,
        "tokens_per_second": found.step_time.tokens_per_second(),
        "copied_bytes": vars(found.step_costs.streaming)["in_bytes"],
        "hiding_tokens": found.step_costs.hiding_tokens(gpu),
    }


def table(figures: dict[str, Any]) -> str:
    """Return what each row needs on the GPU and on the host, and how fast it is."""
    rows = [
        (
            f"{found['row'][0]}, {found['row'][3]}",
            f"{found['row'][1]}, {found['row'][2]} x 512",
            f"{format_bytes(found['total_bytes'])} of {format_bytes(found['usable_bytes'])}",
            format_bytes(found["host_bytes"]),
            "-" if found["sharded_bytes"] is None else format_bytes(found["sharded_bytes"]),
            f"{found['copied_bytes'] / 1e9:.0f} GB",
            f"{found['hiding_tokens']:,.0f}",
            f"{found['tokens_per_second']:,.0f}",
        )
        for found in figures["rows"]
    ]
    columns = (
        "model and set-up",
        "GPU, batch",
        "GPU memory",
        "host",
        "FSDP2's host",
        "copied in",
        "hidden from",
        "tokens/s",
    )
    note = (
        "Computed, not measured (`python benchmarks/larger_than_gpu.py`). *Copied in* and *hidden from* are explained "
        "below."
    )
    return markdown(f"| {' | '.join(columns)} |", rows, note)


def main() -> None:
    """Estimate, print the table, append the row."""
    figures = {"rows": [figures_of(*row) for row in ROWS]}
    show("larger_than_gpu", figures, table(figures))


if __name__ == "__main__":
    main()
