"""What every parameter of Llama-3 needs on 4 to 24 GB, technique by technique: python benchmarks/large_models.py

Estimated, without a GPU: weights in bfloat16, no autocast, checkpointing, gradients released, paged 8-bit AdamW. To
that come the gradient of the tied embeddings as rows, the loss without logits, and stochastic rounding of the weights.
Each row says what the bytes at the peak are for, the effective batch, and how gradients are clipped: released gradients
are neither accumulated nor clipped by their global norm, so the effective batch is the rows of one pass. For
Llama-3.1-8B, where 1 GiB of gradient of the head stands beside all activations, the allocator's gaps decide: the row to
use is the one with expandable segments (``use_expandable_segments()``), with offload where less is to be had.

The second table compares logits and loss of Llama-3.2-1B, 2 x 512 tokens: the most of them at any time of a step.

    python benchmarks/large_models.py [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_memopt import Estimate, estimate
from hf_memopt.units import format_bytes

GIB = 2**30
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
    """A model, its batch and a GPU, and what is aimed at."""

    model: str
    batch_size: int
    seq_len: int
    gpu: str
    most_bytes: int | None = None  # in all: reserved bytes and the context
    least_to_spare_bytes: int = 0


ROWS = (
    Row("Llama-3.2-1B", 1, 512, "RTX 3050 4GB", most_bytes=int(3.5 * GIB)),
    Row("Llama-3.2-3B", 1, 1024, "RTX 3060 12GB", least_to_spare_bytes=2 * GIB),
    Row("Llama-3.1-8B", 1, 1024, "RTX 4090", most_bytes=17 * GIB),
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
UNTIED = ("Llama-3.1-8B",)
LOGITS = {"model": "Llama-3.2-1B", "batch_size": 2, "seq_len": 512, "gpu": "RTX 3060 12GB"}


def set_ups(row: Row) -> dict[str, dict[str, Any]]:
    """Return the settings of each step for a row; without a tied weight there is none to make rows of."""
    if row.model not in UNTIED:
        return {name: dict(changes) for name, changes in STEPS.items()}
    rounded = {**FUSED, **ROUNDED}
    return {
        "stock's backward pass": {},
        "loss without logits": FUSED,
        "loss without logits, stochastic rounding": rounded,
        "and expandable segments": {**rounded, "expandable_segments": True},
        "and stock's offloaded activations": {
            **rounded,
            "expandable_segments": True,
            "checkpointing": {"offload": True},
        },
    }


def estimated(row: Row, changes: Mapping[str, Any]) -> Estimate:
    """Estimate one row with these techniques."""
    return estimate(row.model, batch_size=row.batch_size, seq_len=row.seq_len, gpu=row.gpu, **{**COMMON, **changes})


def figures_of(found: Estimate) -> dict[str, Any]:
    """Return what the tables show of an estimate."""
    settings = found.settings
    assert found.gpu is not None
    return {
        "total_bytes": found.total_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "allocated_bytes": found.peak_allocated_bytes,
        "context_bytes": found.context_bytes,
        "to_spare_bytes": found.gpu.usable_bytes - found.total_bytes,
        "host_bytes": found.host_bytes,
        "components": found.components,
        "phase": found.phase,
        "effective_batch": found.batch_size * settings.gradient_accumulation_steps,
        "clipping": "none" if settings.max_grad_norm <= 0 else f"global norm {settings.max_grad_norm:g}",
    }


def model_figures() -> dict[str, dict[str, Any]]:
    """Return the figures of every row and step."""
    return {
        f"{row.model} {row.batch_size} x {row.seq_len}, {row.gpu}": {
            name: figures_of(estimated(row, changes)) for name, changes in set_ups(row).items()
        }
        for row in ROWS
    }


def most_of(found: Estimate, component: str) -> int:
    """Return the most bytes that a component has at any time."""
    from hf_memopt.memory.timeline import COMPONENTS

    return int(found.timeline.components[:, COMPONENTS.index(component)].max())


def logits_figures() -> dict[str, dict[str, int]]:
    """Return the most bytes of logits and loss in a step, in the set-up of the table and in bfloat16 autocast."""
    weights = {"16-bit weights": {**COMMON, **TIED}, "32-bit weights, bf16 autocast": {"precision": "bf16", **TIED}}
    return {
        name: {
            how: most_of(estimate(**LOGITS, **{**settings, **changes}), "logits and loss")
            for how, changes in (("stock", {}), ("fused", FUSED))
        }
        for name, settings in weights.items()
    }


def table(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| model, tokens, GPU | set-up | in all | to spare | reserved | allocated | weights | gradients | optimizer "
        "| activations | logits and loss | temporaries | effective batch | clipping |",
        "|" + "---|" * 14,
    ]
    for row, steps in figures.items():
        for name, found in steps.items():
            parts = ("weights", "gradients", "optimizer state", "activations", "logits and loss", "temporaries")
            sizes = [
                found[name_of] for name_of in ("total_bytes", "to_spare_bytes", "reserved_bytes", "allocated_bytes")
            ]
            sizes += [found["components"][part] for part in parts]
            cells = [row, name, *(_signed(size) for size in sizes), str(found["effective_batch"]), found["clipping"]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _signed(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes >= 0 else f"-{format_bytes(-size_bytes)}"


def missed() -> list[str]:
    """Return which aims the last step of a row misses."""
    found = []
    for row in ROWS:
        name, changes = list(set_ups(row).items())[-1]
        reached = figures_of(estimated(row, changes))
        if row.most_bytes is not None and reached["total_bytes"] > row.most_bytes:
            found.append(f"{row.model}, {name}: {format_bytes(reached['total_bytes'])} in all")
        if reached["to_spare_bytes"] < row.least_to_spare_bytes:
            found.append(f"{row.model}, {name}: {_signed(reached['to_spare_bytes'])} to spare")
    return found


def main() -> int:
    """Estimate, print the tables, append the figures to the results."""
    from results_file import append

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    figures = {"rows": model_figures(), "logits_and_loss": logits_figures(), "common": dict(COMMON)}
    print(table(figures["rows"]))
    print("\nLogits and loss of Llama-3.2-1B, 2 x 512, at most:")
    for name, found in figures["logits_and_loss"].items():
        print(f"{name}: stock {format_bytes(found['stock'])}, fused {format_bytes(found['fused'])}")
    for aim in missed():
        print(f"missed: {aim}")
    print(f"appended to {append('large_models', figures, path=options.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
