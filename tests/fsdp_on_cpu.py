"""Train with the stock ``Trainer`` under FSDP2 on a CPU.

accelerate 1.15 chooses FSDP in ``AcceleratorState.__init__`` for several GPUs only, and for several CPU processes takes
DDP without a word, whatever the ``TrainingArguments`` ask for. Here the same choice is made for them. Everything else,
the plugin included, is stock's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed_on_cpu
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

FSDP_IS_A_FLAG = hasattr(TrainingArguments, "_apply_legacy_fsdp_to_config")  # which came with it, transformers 5.17
ENVIRONMENT = {} if FSDP_IS_A_FLAG else {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
"""What processes need beside ``arguments``: 5.8 does not hand ``state_dict_type`` on to accelerate."""


def arguments() -> dict[str, Any]:
    """Return the ``TrainingArguments`` that shard with FSDP2; 5.8 reads wrapping from the text of ``fsdp``."""
    config = {"version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}
    if FSDP_IS_A_FLAG:
        return {"fsdp": True, "fsdp_config": {**config, "cpu_offload": False}}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


@contextmanager
def sharding() -> Iterator[None]:
    """Let accelerate shard in processes on a CPU, where ``TrainingArguments(fsdp=...)`` ask for it."""
    before = AcceleratorState.__init__

    def choosing(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        before(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin

    with mock.patch.object(AcceleratorState, "__init__", choosing):
        yield


def check_engine(trainer: Any, engine: str) -> None:
    """Raise if it was not this engine that trained the model; under FSDP2 if a weight is in one piece."""
    if engine in ("DeepSpeed", "ZeRO-3"):
        assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
        assert trainer.model_wrapped.zero_optimization_stage() == (3 if engine == "ZeRO-3" else 2)
        return
    if engine != "FSDP2":
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        return
    assert trainer.accelerator.distributed_type == DistributedType.FSDP
    assert trainer.accelerator.is_fsdp2
    assert trainer.is_fsdp_enabled
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter, DTensor), name


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the trained model in one piece; all processes have to call it."""
    named = trainer.model.named_parameters()
    if trainer.is_deepspeed_enabled:
        return {name: deepspeed_on_cpu.whole(value) for name, value in named}
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for name, value in named}
