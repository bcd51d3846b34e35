"""What memory is for: the names of its components, in the order of tables and pictures, and their colours."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["COLOURS", "COMPONENTS", "CONTEXT", "UNUSED", "parts_of"]

COLOURS = {
    "weights": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#E69F00",
    "activations": "#009E73",
    "logits and loss": "#CC79A7",
    "temporaries": "#F0E442",
    "workspace": "#999999",
    "inputs": "#56B4E9",
}
"""Okabe and Ito's palette for colour-blind readers, with grey instead of black."""
COMPONENTS = tuple(COLOURS)
CONTEXT, UNUSED = "CUDA context", "reserved, not in use"


def parts_of(components: Mapping[str, int], reserved_bytes: int, context_bytes: int | None) -> dict[str, int]:
    """Return what a total is made of: CUDA's context, the components of the peak, and reserved bytes beyond them."""
    known = {name: components.get(name, 0) for name in COMPONENTS}
    return {CONTEXT: context_bytes or 0, **known, UNUSED: max(reserved_bytes - sum(known.values()), 0)}
