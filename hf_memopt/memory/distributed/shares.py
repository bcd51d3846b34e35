"""One process's share of a step that several processes train together: what is sharded, and DDP's buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hf_memopt.memory.distributed.fully_sharded import FullyShardedStep
from hf_memopt.memory.distributed.units import shard_shape
from hf_memopt.memory.settings import NotEstimableError

if TYPE_CHECKING:
    from torch import nn

    from hf_memopt.memory.optimizers.parameter_facts import OptimizerMemory, ParameterFacts
    from hf_memopt.memory.settings import StepSettings

__all__ = ["bucket_bytes", "notes_of_sharing", "on_host", "shard_facts", "sharded_step"]

_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20  # torch's defaults, which accelerate leaves


def sharded_step(model: nn.Module, settings: StepSettings) -> FullyShardedStep | None:
    """Return what shards a model while its step is recorded; None where every process has a whole one."""
    if not settings.is_sharded:
        return None
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        raise NotEstimableError(
            f"not estimable: strategy={settings.strategy!r} with quantised weights, which FSDP2 leaves whole or packs "
            "into another dtype; expected weights as they are. Pass strategy='ddp'"
        )
    dtype = _COMPUTE.get(settings.precision)
    return FullyShardedStep(model, settings.world_size, compute_dtype=dtype, offload=settings.offload)


def shard_facts(facts: Sequence[ParameterFacts], settings: StepSettings) -> tuple[ParameterFacts, ...]:
    """Return the trainable parameters as the optimizer of the first process sees them."""
    if not settings.is_sharded:
        return tuple(facts)
    is_cast = settings.precision in _COMPUTE
    return tuple(
        replace(
            fact,
            shape=shard_shape(fact.shape, settings.world_size),
            element_size=4 if is_cast else fact.element_size,
        )
        for fact in facts
    )


def on_host(optimizer: OptimizerMemory) -> OptimizerMemory:
    """Return the memory of an optimizer whose parameters, gradients and states are on the host."""
    host_bytes = optimizer.host_state_bytes + optimizer.state_bytes
    return replace(optimizer, state=(), step=(), first_step=(), host_state_bytes=host_bytes)


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


def notes_of_sharing(settings: StepSettings) -> tuple[str, ...]:
    """Return what an estimate for several processes leaves out."""
    if settings.world_size == 1:
        return ()
    engine = "FSDP2 as accelerate wraps it" if settings.is_sharded else "DDP"
    return (
        f"bytes of one of {settings.world_size} GPUs, {engine}; not in the total are NCCL's own buffers, which are "
        "outside of torch's allocator, and the time has no communication",
    )
