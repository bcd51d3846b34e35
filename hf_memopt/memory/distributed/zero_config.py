"""What ``Recipe.distributed`` sets DeepSpeed's ZeRO to, in one place for its configuration and for the estimate.

DeepSpeed's defaults are for clusters: buckets of 5e8 elements take 1 GB each, two of them in stage 2, and stage 3 keeps
up to 1e9 gathered elements. What is "auto" is filled in by ``transformers`` from the model's hidden size.

Source: github.com/deepspeedai/DeepSpeed 0.19.6, ``deepspeed/runtime/zero/config.py``; transformers 5.8.1 to 5.23.0,
``integrations/deepspeed.py``, ``trainer_config_finalize``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ZERO_STAGES", "ZeroSizes", "zero_options"]

ZERO_STAGES = {"zero2": 2, "zero3": 3}
BUCKET_ELEMENTS = 50_000_000  # 100 MB of 16 bits; DDP's buckets have 25 MiB
LIVE_ELEMENTS = 100_000_000


@dataclass(frozen=True)
class ZeroSizes:
    """Numbers of elements that decide the memory of a stage.

    Attributes:
        bucket: of gradients that are reduced together; a larger gradient is reduced by itself.
        buckets: how many of them are held.
        live: gathered weights at most, but for what a module needs at once; 0 where weights are not cut.
        persistent: a weight of no more elements stays whole.
    """

    bucket: int
    buckets: int
    live: int = 0
    persistent: int = 0

    @classmethod
    def of(cls, stage: int, hidden_size: int) -> ZeroSizes:
        """Return the sizes that ``zero_options`` have for a model."""
        if stage == 2:
            return cls(BUCKET_ELEMENTS, buckets=2)  # two, as communication overlaps
        return cls(hidden_size**2, buckets=1, live=LIVE_ELEMENTS, persistent=10 * hidden_size)


def zero_options(stage: int) -> dict[str, Any]:
    """Return ``zero_optimization`` of DeepSpeed's configuration, without offload."""
    options: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 2:
        return {**options, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    return {
        **options,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": LIVE_ELEMENTS,
        "stage3_max_reuse_distance": LIVE_ELEMENTS,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
