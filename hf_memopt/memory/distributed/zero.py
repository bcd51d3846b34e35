"""One process's share of a step under DeepSpeed's ZeRO, stages 2 and 3, while a model is recorded on the meta device.

DeepSpeed casts the whole model to 16 bits and computes in them, without autocast; the optimizer has a flat float32 copy
of this process's part. Each gradient is copied into a bucket as soon as it is there, reduced when the bucket is full,
and what belongs to this process is kept in a flat buffer. Stage 3 cuts the weights too; modules gather them before they
run, as many ahead as the limit of live elements allows.

Computed from documentation and sources and not measured: which modules are gathered at the peak is not simulated, the
limit counts instead. Limitations: NCCL's buffers and the copy of the weights during DeepSpeed's initialization are not
counted.

Source: github.com/deepspeedai/DeepSpeed 0.19.6, ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
``partitioned_param_coordinator.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_memopt.memory.distributed.units import swap_parameters
from hf_memopt.memory.distributed.zero_config import ZERO_STAGES, ZeroSizes
from hf_memopt.memory.optimizers.optimizer_memory import parameter_facts
from hf_memopt.memory.optimizers.parameter_facts import FLOAT_BYTES, OptimizerMemory, ParameterFacts, trainer_groups
from hf_memopt.memory.settings import NotEstimableError

if TYPE_CHECKING:
    from hf_memopt.memory.settings import StepSettings

__all__ = ["ZeroStep", "partition_facts", "with_flat_gradients"]

_NORM_ELEMENTS = 250_000_000  # whose norm is computed at once, in float64, where gradients go to the host
_DOUBLE_BYTES = 8


class ZeroStep:
    """A model whose recorded step has the tensors of one process; nothing is communicated.

    Args:
        model: on the meta device; as before after ``sharding``.
        settings: with a strategy of ``ZERO_STAGES``.
        compute_dtype: that the engine casts the weights to; None for none.

    Attributes:
        gradients: the part of them that this process keeps.
        gathered_bytes: of weights that a forward and backward pass gathers, as often as it does.
        notes: what was assumed.
    """

    def __init__(self, model: nn.Module, settings: StepSettings, compute_dtype: torch.dtype | None) -> None:
        self._model, self._settings, self._dtype = model, settings, compute_dtype or torch.float32
        self._stage = ZERO_STAGES[settings.strategy]
        self._sizes = ZeroSizes.of(self._stage, 0 if self._stage == 2 else _hidden_size(model))
        self._facts = parameter_facts(model)
        self.gradients: list[torch.Tensor] = []
        limits = f"{self._sizes.buckets} bucket(s) of {self._sizes.bucket:,} elements"
        if self._stage == 3:
            limits += f", {self._sizes.live:,} live elements"
        self.notes: tuple[str, ...] = (
            f"{settings.strategy} as Recipe.distributed sets it, with {limits}: computed from DeepSpeed's "
            "documentation and sources, and not measured",
        )
        self._is_first = True  # of the passes of a step
        self._filled = 0  # elements of the bucket
        self._of_pass: list[torch.Tensor] = []  # buckets, gathered weights, gradients until they are added
        cut = [one.numel() for one in model.parameters() if one.numel() > self._sizes.persistent]
        self._live_elements = min(sum(cut), self._sizes.live + max(cut, default=0))
        gathers = 3 if settings.checkpointing else 2  # what is recomputed is gathered once more
        self.gathered_bytes = gathers * sum(cut) * self._dtype.itemsize if self._stage == 3 else 0

    @contextmanager
    def sharding(self) -> Iterator[ZeroStep]:
        """Put the engine's weights in the parameters' place; all of it is undone at the end."""
        with ExitStack() as around:
            swapped = {parameter: self._held(parameter) for parameter in self._model.parameters()}
            swap_parameters(self._model, swapped, around)
            for parameter in swapped.values():
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
                    around.callback(handle.remove)
            for name, tensor in self._beside().items():
                self._model._buffers[name] = tensor
                around.callback(self._model._buffers.pop, name)
            if self._stage == 3:
                around.callback(self._model.register_forward_pre_hook(self._gather, prepend=True).remove)
                around.callback(self._model.register_forward_hook(self._free).remove)
            yield self

    def drop_gradients(self) -> None:
        """Drop the gradients that this process keeps."""
        self.gradients.clear()
        self._is_first = True

    def begin(self, *, reduces: bool) -> None:
        """Begin a forward and backward pass; each reduces its gradients."""

    def end(self) -> None:
        """End a backward pass: reduce what is left, and add to the gradients of the passes before."""
        self._flush()
        self._of_pass.clear()
        self._is_first = False

    def _held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter of this shape in the engine's dtype, with the storage of what this process holds."""
        if not parameter.is_floating_point():
            return parameter
        whole = torch.empty(parameter.shape, dtype=self._dtype, device="meta")
        if self._stage == 3:
            part = 0 if self._settings.offload_params else -(-parameter.numel() // self._settings.world_size)
            kept = parameter.numel() if parameter.numel() <= self._sizes.persistent else 0
            whole.untyped_storage().resize_((part + kept) * whole.element_size())
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)

    def _beside(self) -> dict[str, torch.Tensor]:
        """Return what is held from the start beside the weights: float32 copies, or a gradient for the host."""
        if not self._settings.offload_params:
            parts = partition_facts(self._facts, self._settings)
            return {f"zero_float32_{i}": torch.empty(one.shape, device="meta") for i, one in enumerate(parts)}
        if self._stage == 3:
            return {}
        largest = max(fact.elements for fact in self._facts)
        return {"zero_gradient": torch.empty(largest, dtype=self._dtype, device="meta")}

    # ---- Hooks ------------------------------------------------------------------------------------------------------

    def _gather(self, module: nn.Module, args: Any) -> None:
        self._of_pass.append(self._elements(self._live_elements))

    def _free(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            self._of_pass.clear()

    def _reduce(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a parameter into the bucket; one that is larger is reduced by itself, in a copy."""
        if parameter.grad is None:
            return
        count = parameter.grad.numel()
        if not self._has_buckets():
            self._of_pass += [self._elements(self._sizes.bucket) for _ in range(self._sizes.buckets)]
            if not self._settings.offload_params:
                part = self._elements(_kept_gradients(self._facts, self._settings))
                (self.gradients if self._is_first else self._of_pass).append(part)
        if self._filled + count > self._sizes.bucket:
            self._flush()
        if count > self._sizes.bucket:
            self._elements(count)
        else:
            self._filled += count
        if self._settings.offload_params:
            torch.empty(min(count, _NORM_ELEMENTS) * _DOUBLE_BYTES, dtype=torch.uint8, device="meta")
        parameter.grad = None

    def _has_buckets(self) -> bool:
        return len(self._of_pass) > (1 if self._stage == 3 else 0)

    def _flush(self) -> None:
        """Reduce a bucket, by way of a copy."""
        if self._filled:
            self._elements(self._filled)
        self._filled = 0

    def _elements(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device="meta")


def partition_facts(facts: Sequence[ParameterFacts], settings: StepSettings) -> tuple[ParameterFacts, ...]:
    """Return what the optimizer of one process steps on: a flat float32 tensor for each of its groups.

    Stage 2 cuts the weights of a group as one, padded to two elements a process, and stage 3 each weight by itself.
    """
    found = []
    for group in trainer_groups(facts):
        part = _part(group, settings)
        found.append(ParameterFacts("flat", (part,), FLOAT_BYTES, is_embedding=False, decays=group[0].decays))
    return tuple(found)


def with_flat_gradients(
    found: OptimizerMemory, parts: Sequence[ParameterFacts], facts: Sequence[ParameterFacts], settings: StepSettings
) -> OptimizerMemory:
    """Return the memory of an optimizer that steps on flat gradients in float32, one group after the other.

    The norm, in float64, is computed of one gradient after the other, whether it is clipped or not.
    """
    elements = [fact.elements for fact in facts]
    if settings.strategy == "zero3":
        elements = [-(-count // settings.world_size) for count in elements]
    size = 2 if settings.precision in ("bf16", "fp16") else FLOAT_BYTES
    flat = [(part.elements * size, part.size_bytes) if size < FLOAT_BYTES else (part.size_bytes,) for part in parts]
    largest = max(part.size_bytes for part in parts)

    def of_engine(step: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return ((max(elements) * _DOUBLE_BYTES,), *flat, *((largest, *group) for group in step))

    return replace(found, step=of_engine(found.step), first_step=of_engine(found.first_step))


def _part(group: Sequence[ParameterFacts], settings: StepSettings) -> int:
    """Return the elements of a group that a process has."""
    processes = settings.world_size
    if settings.strategy == "zero3":
        return sum(-(-fact.elements // processes) for fact in group)
    return -(-sum(fact.elements for fact in group) // (2 * processes)) * 2


def _kept_gradients(facts: Sequence[ParameterFacts], settings: StepSettings) -> int:
    """Return the elements of gradients that a process keeps, the most that one has.

    In stage 2 a gradient that lies across the border of two parts is kept whole by both.
    """
    groups = trainer_groups(facts)
    if settings.strategy == "zero3":
        return sum(_part(group, settings) for group in groups)
    kept = [0] * settings.world_size
    for group in groups:
        part = _part(group, settings)
        ends = accumulate(fact.elements for fact in group)
        for fact, end in zip(group, ends, strict=True):
            for process in range((end - fact.elements) // part, (end - 1) // part + 1):
                kept[process] += fact.elements
    return max(kept)


def _hidden_size(model: Any) -> int:
    """Return the hidden size by which transformers fills in what is "auto" of stage 3."""
    config = model.config
    for known in (config, getattr(config, "text_config", None)):
        size = getattr(known, "hidden_size", None) or getattr(known, "hidden_sizes", None)
        if size:
            return int(size if isinstance(size, int) else max(size))
    raise NotEstimableError(
        f"not estimable: strategy='zero3' with a configuration of {type(model).__name__} that has no hidden_size, by "
        "which transformers sets DeepSpeed's buckets; expected one. Pass strategy='fsdp2'"
    )
