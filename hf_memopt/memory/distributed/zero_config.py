"""What ``Recipe.distributed`` sets DeepSpeed's ZeRO to, whose own defaults are for clusters; the estimate reads it too.

Source: github.com/deepspeedai/DeepSpeed 0.19.6, ``deepspeed/runtime/zero/config.py``.
"""

from __future__ import annotations

from typing import Any

ZERO_STAGES = {"zero2": 2, "zero3": 3}
BUCKET_ELEMENTS, LIVE_ELEMENTS = 50_000_000, 100_000_000


def zero_options(stage: int) -> dict[str, Any]:
    """Return ``zero_optimization``, without offload; ``transformers`` fills in what is "auto" from the hidden size."""
    options: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 2:
        return {**options, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    limits = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    filled = {**dict.fromkeys(sizes, "auto"), **dict.fromkeys(limits, LIVE_ELEMENTS)}
    return {**options, **filled, "stage3_gather_16bit_weights_on_model_save": True}
