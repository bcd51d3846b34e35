"""Train with the stock ``Trainer`` and DeepSpeed on a CPU, in processes that gloo connects.

DeepSpeed (seen: 0.19.8) builds an operator for shared memory with a compiler before it connects them, which is only
faster than gloo. Without it nothing is built, and weights, gradients and states are partitioned as on GPUs.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch


def arguments(stage: int) -> dict[str, Any]:
    """Return the ``TrainingArguments`` of a stage."""
    zero = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    names = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        "deepspeed": {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **dict.fromkeys(names, "auto")}
    }


def build_nothing() -> None:
    """Let DeepSpeed run on a CPU without its own operators; call it before a Trainer is built."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed")
    communication: Any = sys.modules["deepspeed.comm.torch"]
    communication.build_shm_op = lambda: None


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a weight in one piece; all processes have to call it."""
    deepspeed: Any = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()
