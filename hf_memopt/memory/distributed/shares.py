"""One process's share of a step that several processes train together: what is sharded, and DDP's buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hf_memopt.memory.distributed.fully_sharded import FullyShardedStep, shard_shape
from hf_memopt.memory.distributed.zero import ZeroStep, partition_facts, with_flat_gradients
from hf_memopt.memory.distributed.zero_config import ZERO_STAGES
from hf_memopt.memory.settings import NotEstimableError

if TYPE_CHECKING:
    from torch import nn

    from hf_memopt.memory.optimizers import OptimizerMemory, ParameterFacts
    from hf_memopt.memory.settings import StepSettings

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # torch's defaults, which accelerate leaves


def sharded_step(model: nn.Module, settings: StepSettings) -> FullyShardedStep | ZeroStep | None:
    """Return what shards a model while its step is recorded; None where every process has a whole one."""
    if not settings.is_sharded:
        return None
    dtype = _COMPUTE.get(settings.precision)
    if settings.engine != "zero2":
        _refuse_packed(model, settings)
    if settings.engine in ZERO_STAGES:
        return ZeroStep(model, settings, dtype)
    return FullyShardedStep(model, settings.world_size, compute_dtype=dtype, offload=settings.offload_params)


def _refuse_packed(model: nn.Module, settings: StepSettings) -> None:
    """Refuse quantised weights that are not stored as numbers of the dtype that is computed in."""
    packed = [one for one in model.parameters() if not one.is_floating_point()]
    is_4_bit = any(type(one).__name__ == "Params4bit" for one in model.parameters())
    if settings.engine == "zero3" and (packed or is_4_bit):
        raise NotEstimableError(
            "not estimable: strategy='zero3' with quantised weights, which DeepSpeed cannot cut; expected weights as "
            "they are, or 4 bits under FSDP2. Pass strategy='fsdp2', load_in='nf4'"
        )
    if packed:
        raise NotEstimableError(
            f"not estimable: strategy={settings.strategy!r} with quantised weights stored as {packed[0].dtype}, which "
            "FSDP2 leaves whole or breaks; expected 4 bits in a 16-bit storage. Load with "
            "bnb_4bit_quant_storage='bfloat16', or pass strategy='ddp'"
        )


def without_autocast(settings: StepSettings) -> StepSettings:
    """Return the settings to record with: DeepSpeed casts the model and switches autocast off."""
    is_cast = settings.engine in ZERO_STAGES and settings.precision in _COMPUTE
    return settings.replace(precision="fp32") if is_cast else settings


def shard_facts(facts: Sequence[ParameterFacts], settings: StepSettings) -> tuple[ParameterFacts, ...]:
    """Return the trainable parameters as the optimizer of the first process sees them."""
    if not settings.is_sharded:
        return tuple(facts)
    if settings.engine in ZERO_STAGES:
        return partition_facts(facts, settings)
    is_cast = settings.precision in _COMPUTE
    return tuple(
        replace(
            fact,
            shape=shard_shape(fact.shape, settings.world_size),
            element_size=4 if is_cast else fact.element_size,
        )
        for fact in facts
    )


def as_the_engine_steps(
    optimizer: OptimizerMemory, shards: Sequence[ParameterFacts], settings: StepSettings
) -> OptimizerMemory:
    """Return the memory of an optimizer that steps on ``shards`` of the trainable parameters.

    With offload its parameters, gradients and states are on the host.
    """
    if settings.offload_params:
        held_bytes = 2 * sum(shard.size_bytes for shard in shards)
        host_bytes = optimizer.host_state_bytes + optimizer.state_bytes + held_bytes
        return replace(optimizer, state=(), step=(), first_step=(), host_state_bytes=host_bytes)
    uses_deepspeed = settings.engine in ZERO_STAGES
    return with_flat_gradients(optimizer, shards, settings) if uses_deepspeed else optimizer


def bucket_bytes(facts: Sequence[ParameterFacts], settings: StepSettings) -> tuple[int, ...]:
    """Return the buckets that DDP copies gradients into, from the last parameter to the first; none in one process.

    The gradients stay beside them: ``gradient_as_bucket_view`` is False, as accelerate leaves it. A bucket is full when
    it has reached its size, and has gradients of one dtype.
    """
    if settings.world_size == 1 or settings.is_sharded:
        return ()
    limits = dict.fromkeys((fact.element_size for fact in facts), FIRST_BUCKET_BYTES)
    filled: dict[int, int] = {}
    found = []
    for fact in reversed(facts):
        size = fact.element_size
        filled[size] = filled.get(size, 0) + fact.size_bytes
        if filled[size] >= limits[size]:
            found.append(filled.pop(size))
            limits[size] = BUCKET_BYTES
    return (*found, *filled.values())


ENGINES = {"ddp": "DDP", "fsdp2": "FSDP2 as accelerate wraps it", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def notes_of_sharing(settings: StepSettings) -> tuple[str, ...]:
    """Return what an estimate for several processes leaves out."""
    if settings.world_size == 1:
        return ()
    return (
        f"bytes of one of {settings.world_size} GPUs, {ENGINES[settings.engine]}; not in the total are NCCL's own "
        "buffers, which are outside of torch's allocator",
    )
