"""One process's share of a step under DeepSpeed's ZeRO, stages 2 and 3: computed from its sources, not measured.

DeepSpeed casts the model to 16 bits and computes in them, without autocast; its optimizer has a flat float32 copy of
this process's part. Gradients go into buckets as soon as they are there, and this process's part of them is kept in a
flat buffer. Stage 3 cuts the weights too and gathers them before a module runs, up to a limit of live elements, which
counts here. Limitations: without copies of single gradients, NCCL's buffers and the weights at initialization.

Source: github.com/deepspeedai/DeepSpeed 0.19.6, ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_memopt.memory.distributed.fully_sharded import swap_parameters
from hf_memopt.memory.distributed.zero_config import BUCKET_ELEMENTS, LIVE_ELEMENTS, ZERO_STAGES
from hf_memopt.memory.optimizers import FLOAT_BYTES, OptimizerMemory, ParameterFacts, parameter_facts, trainer_groups
from hf_memopt.memory.settings import StepSettings


class ZeroStep:
    """A model whose recorded step has the tensors of one process; what is public is as in ``FullyShardedStep``."""

    def __init__(self, model: Any, settings: StepSettings, compute_dtype: torch.dtype | None) -> None:
        self._model, self._settings, self._dtype = model, settings, compute_dtype or torch.float32
        self._cuts_weights = ZERO_STAGES[settings.strategy] == 3
        self.bucket, self.persistent, self._buckets = BUCKET_ELEMENTS, 0, 2  # two, as communication overlaps
        if self._cuts_weights:  # what transformers fills in, and where it cannot, it stops the run
            hidden = getattr(model.config.get_text_config(), "hidden_size", None) or 1024
            self.bucket, self.persistent, self._buckets = hidden**2, 10 * hidden, 1  # a weight of 10 rows stays whole
        self._parts = partition_facts(parameter_facts(model), settings)
        cut = [one.numel() for one in model.parameters() if one.numel() > self.persistent]
        self._live_elements = min(sum(cut), LIVE_ELEMENTS + max(cut, default=0))
        gathers = (3 if settings.checkpointing else 2) * self._cuts_weights  # what is recomputed once more
        self.gathered_bytes = gathers * sum(cut) * self._dtype.itemsize
        source = "computed from DeepSpeed's documentation and sources, and not measured"
        self.notes = (f"{settings.strategy} as Recipe.distributed sets it: {source}",)
        self.reduces = True  # in every pass
        self.gradients: list[torch.Tensor] = []
        self._gathered: list[torch.Tensor] = []
        self._reduced: list[torch.Tensor] = []  # buckets, and gradients until they are added to those of the step

    @contextmanager
    def sharding(self) -> Iterator[ZeroStep]:
        """Put the engine's weights in the parameters' place; all of it is undone at the end."""
        with ExitStack() as around:
            held = {one: self._held(one) for one in self._model.parameters() if one.is_floating_point()}
            swap_parameters(self._model, held, around)
            for parameter in (one for one in held.values() if one.requires_grad):
                handle = parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
                around.callback(handle.remove)
            for number, tensor in enumerate(self._beside()):
                self._model._buffers[f"zero_{number}"] = tensor
                around.callback(self._model._buffers.pop, f"zero_{number}")
            if self._cuts_weights:
                around.callback(self._model.register_forward_pre_hook(self._gather, prepend=True).remove)
                around.callback(self._model.register_forward_hook(self._free).remove)
            yield self

    def drop_gradients(self) -> None:
        self.gradients.clear()

    def end(self) -> None:
        self._gathered.clear()
        self._reduced.clear()

    def _held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of this shape in the engine's dtype, with the storage of what this process holds."""
        whole = torch.empty(parameter.shape, dtype=self._dtype, device="meta")
        if self._cuts_weights:
            part = 0 if self._settings.offload_params else -(-parameter.numel() // self._settings.world_size)
            kept = parameter.numel() if parameter.numel() <= self.persistent else 0
            whole.untyped_storage().resize_((part + kept) * whole.element_size())
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def _beside(self) -> list[torch.Tensor]:
        """Return what is held from the start beside the weights: float32 copies, or a gradient for the host."""
        if not self._settings.offload_params:
            return [torch.empty(part.shape, device="meta") for part in self._parts]
        return [] if self._cuts_weights else [self._elements(max(one.numel() for one in self._model.parameters()))]

    def _gather(self, module: nn.Module, args: Any) -> None:
        self._gathered.append(self._elements(self._live_elements))

    def _free(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            self._gathered.clear()

    def _reduce(self, parameter: torch.Tensor) -> None:
        """Take a gradient; the first one of a pass makes the buckets, and the buffer of this process's gradients."""
        if not self._reduced:
            self._reduced += [self._elements(self.bucket) for _ in range(self._buckets)]
            if not self._settings.offload_params:
                part = self._elements(sum(part.elements for part in self._parts))
                (self._reduced if self.gradients else self.gradients).append(part)
        parameter.grad = None

    def _elements(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device="meta")


def partition_facts(facts: Sequence[ParameterFacts], settings: StepSettings) -> tuple[ParameterFacts, ...]:
    """Return what the optimizer of one process steps on: a flat, padded float32 tensor for each of its groups."""
    found = []
    for group in trainer_groups(facts):
        part = -(-sum(fact.elements for fact in group) // (2 * settings.world_size)) * 2
        found.append(ParameterFacts("flat", (part,), FLOAT_BYTES, is_embedding=False, decays=group[0].decays))
    return tuple(found)


def with_flat_gradients(
    found: OptimizerMemory, parts: Sequence[ParameterFacts], settings: StepSettings
) -> OptimizerMemory:
    """Return the memory of an optimizer that steps on flat gradients in float32, beside a copy in 16 bits."""
    copies = 2 if settings.precision in ("bf16", "fp16") else 0
    flat = tuple((part.elements * copies, part.size_bytes) for part in parts)
    return replace(found, step=(*flat, *found.step), first_step=(*flat, *found.first_step))
