"""What every parameter of Llama-3 needs on 4 to 24 GB, technique by technique: python benchmarks/large_models.py

Estimated, without a GPU: weights in bfloat16, no autocast, checkpointing, gradients released, paged 8-bit AdamW. To
that come the gradient of the tied embeddings as rows, the loss without logits, and stochastic rounding of the weights.
Released gradients are neither accumulated nor clipped by their global norm, so the effective batch is the rows of one
pass. Beside Llama-3.1-8B's 1 GiB of gradient of the head the allocator's gaps decide: torch's own
reserves more there with expandable segments, which the estimate does not see (docs/accuracy.md).

Beside them, logits and loss of Llama-3.2-1B, 2 x 512 tokens: the most of them at any time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from results_file import markdown, show

from hf_memopt import Estimate, estimate
from hf_memopt.units import format_bytes

COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "weights_dtype": "bfloat16",
        "precision": "fp32",
        "optim": "paged_adamw_8bit",
        "checkpointing": True,
        "gradient_release": True,
        "max_grad_norm": 0,
    }
)


class Row(NamedTuple):
    """A model, its batch and a GPU."""

    model: str
    batch_size: int
    seq_len: int
    gpu: str


ROWS = (
    Row("Llama-3.2-1B", 1, 512, "RTX 3050 4GB"),
    Row("Llama-3.2-3B", 1, 1024, "RTX 3060 12GB"),
    Row("Llama-3.1-8B", 1, 1024, "RTX 4090"),
)
TIED, FUSED = {"sparse_tied_embedding": True}, {"fused_cross_entropy": True}
ROUNDED = {"rounding": "stochastic"}
STEPS: Mapping[str, Mapping[str, Any]] = {
    "stock's backward pass": {},
    "tied embeddings as rows": TIED,
    "loss without logits": FUSED,
    "both": {**TIED, **FUSED},
    "both, stochastic rounding": {**TIED, **FUSED, **ROUNDED},
}
UNTIED_STEPS: Mapping[str, Mapping[str, Any]] = {  # without a tied weight there is none to make rows of
    "stock's backward pass": {},
    "loss without logits": FUSED,
    "loss without logits, stochastic rounding": {**FUSED, **ROUNDED},
    "and stock's offloaded activations": {**FUSED, **ROUNDED, "checkpointing": {"offload": True}},
}
UNTIED = ("Llama-3.1-8B",)
LOGITS = {"model": "Llama-3.2-1B", "batch_size": 2, "seq_len": 512, "gpu": "RTX 3060 12GB"}


def set_ups(row: Row) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings of each step for a row."""
    return UNTIED_STEPS if row.model in UNTIED else STEPS


def figures_of(row: Row, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Estimate one row with these techniques."""
    found = estimate(row.model, batch_size=row.batch_size, seq_len=row.seq_len, gpu=row.gpu, **{**COMMON, **changes})
    settings = found.settings
    assert found.gpu is not None
    return {
        "total_bytes": found.total_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "to_spare_bytes": found.gpu.usable_bytes - found.total_bytes,
        "components": found.components,
        "effective_batch": found.batch_size * settings.gradient_accumulation_steps,
        "clipping": "none" if settings.max_grad_norm <= 0 else f"global norm {settings.max_grad_norm:g}",
    }


def model_figures() -> dict[str, dict[str, Any]]:
    """Return the figures of every row and step."""
    return {
        f"{row.model} {row.batch_size} x {row.seq_len}, {row.gpu}": {
            name: figures_of(row, changes) for name, changes in set_ups(row).items()
        }
        for row in ROWS
    }


def most_of(found: Estimate, component: str) -> int:
    """Return the most bytes that a component has at any time."""
    from hf_memopt.prediction.memory.tracking import COMPONENTS

    return int(found.timeline.components[:, COMPONENTS.index(component)].max())


def logits_figures() -> dict[str, int]:
    """Return the most bytes of logits and loss in a step, in the set-up of the table."""
    return {
        how: most_of(estimate(**LOGITS, **{**COMMON, **TIED, **changes}), "logits and loss")
        for how, changes in (("stock", {}), ("fused", FUSED))
    }


def table(figures: dict[str, Any]) -> str:
    """Return what each step needs."""
    rows = [
        (
            row,
            name,
            format_bytes(found["total_bytes"]),
            _signed(found["to_spare_bytes"]),
            str(found["effective_batch"]),
        )
        for row, steps in figures["rows"].items()
        for name, found in steps.items()
    ]
    note = (
        "Computed, not measured (`python benchmarks/large_models.py`). *Needed* is reserved bytes and the CUDA "
        "context. Released gradients are neither accumulated nor clipped by their global norm."
    )
    return markdown("| examples x tokens, GPU | set-up | needed | free | effective batch |", rows, note)


def _signed(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes >= 0 else f"-{format_bytes(-size_bytes)}"


def main() -> None:
    """Estimate, print the table, append the row."""
    figures = {"rows": model_figures(), "logits_and_loss": {"16-bit weights": logits_figures()}, "common": dict(COMMON)}
    show("large_models", figures, table(figures))


if __name__ == "__main__":
    main()
