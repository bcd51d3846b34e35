"""What allocated bytes are for: the names of the components of memory, in the order of tables and pictures."""

from __future__ import annotations

__all__ = ["COMPONENTS"]

COMPONENTS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits and loss",
    "temporaries",
    "workspace",
    "inputs",
)
