"""What memory is for, by the names of its components, in the order of tables and pictures; whether a total fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

COLOURS = {
    "weights": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#E69F00",
    "activations": "#009E73",
    "logits and loss": "#E377C2",
    "temporaries": "#F0E442",
    "workspace": "#A8A8A8",
    "inputs": "#88CCEE",
}
"""After Okabe and Ito's palette for colour-blind readers; a test holds how far apart these are to a deuteranope."""
COMPONENTS = tuple(COLOURS)
CONTEXT, UNUSED = "CUDA context", "reserved, not in use"


def parts_of(components: Mapping[str, int], reserved_bytes: int, context_bytes: int | None) -> dict[str, int]:
    """Return what a total is made of: CUDA's context, the components of the peak, and reserved bytes beyond them."""
    known = {name: components.get(name, 0) for name in COMPONENTS}
    return {CONTEXT: context_bytes or 0, **known, UNUSED: max(reserved_bytes - sum(known.values()), 0)}


Verdict = Literal["fits", "tight", "over"]

MARGIN_SHARE = 20
"""A set-up fits with a twentieth of the GPU free: so much more, and rarely more, published runs reserved than was
predicted (``benchmarks/published.py`` counts them). What leaves less is too close to tell."""


def verdict_of(spare_bytes: int, margin_bytes: int) -> Verdict:
    """Return whether what is left of a GPU holds the margin ("fits"), less than it ("tight"), or is missing ("over").

    Nothing is called tight that is missing bytes: of published runs that were predicted not to fit, all ran out of
    memory.
    """
    return "over" if spare_bytes < 0 else "tight" if spare_bytes < margin_bytes else "fits"
