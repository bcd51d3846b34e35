"""``ReplayPlan``: how often the parts of a recorded step run, and what is allocated beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_memopt.devices import Chip
from hf_memopt.memory.cuda import workspace_bytes
from hf_memopt.memory.distributed import bucket_bytes
from hf_memopt.memory.optimizers import OptimizerMemory, ParameterFacts, clipping_temporaries
from hf_memopt.memory.settings import StepSettings


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How the recorded parts follow each other.

    Attributes:
        optimizer: the optimizer's bytes; of each trainable parameter by itself with gradient release.
        clipping: temporaries of gradient clipping.
        batches: accumulation steps; the Trainer holds the batches of all of them from the start of an optimizer step.
        micro_batches: micro-batches that each of them is cut into.
        workspaces: blocks that cuBLAS keeps for the forward thread, then for the backward thread.
        eval_batches: evaluation batches whose outputs are gathered on the GPU; 0 for no evaluation.
        eval_concat: whether they are concatenated at every batch, or stay a list.
        empty_cache_steps: steps between two calls of ``empty_cache``, each before a backward pass; None for none.
        order: for every step of a run over differing batches the index of each accumulation step's recording; empty
            for three steps of one recording.
        is_manual: whether a hand-written loop holds its outputs until the next forward pass is over, and one batch.
        in_function: whether its steps run in a function, which frees the outputs when it returns.
        keeps_gradients: whether gradients are zeroed, not freed, between steps.
        buckets: that DDP copies gradients into; it holds them from the start.
        reduces_last: whether only the last accumulation step reduces gradients, as under FSDP2; its passes are recorded
            after those of the others.
    """

    optimizer: OptimizerMemory | Sequence[OptimizerMemory]
    clipping: tuple[int, ...]
    batches: int
    micro_batches: int
    workspaces: tuple[int, ...]
    eval_batches: int = 0
    eval_concat: bool = True
    empty_cache_steps: int | None = None
    order: tuple[tuple[int, ...], ...] = ()
    is_manual: bool = False
    in_function: bool = False
    keeps_gradients: bool = False
    buckets: tuple[int, ...] = ()
    reduces_last: bool = False

    def passes(
        self, batches: Sequence[int], micro_batches: int, *, adds: bool
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the passes of a step that leave their gradients to later ones, and those that reduce them.

        Each is (recording, which of its passes): of those that do the same the first two are recorded.

        Args:
            batches: the recording of each accumulation step.
            micro_batches: of each accumulation step.
            adds: whether gradients of the step before are there.
        """
        every = [index for index in batches for _ in range(micro_batches)]
        count = len(every) - micro_batches if self.reduces_last else 0
        waiting = [(index, min(place, 1)) for place, index in enumerate(every[:count])]
        first = min(count, 2)
        return waiting, [(index, first + min(place + adds, 1)) for place, index in enumerate(every[count:])]


def replay_plan(
    facts: tuple[ParameterFacts, ...],
    settings: StepSettings,
    optimizer: OptimizerMemory,
    batch_size: int,
    chip: Chip,
) -> ReplayPlan:
    """Return the plan of a step.

    Args:
        facts: of the trainable parameters, as one process holds them.
        settings: with nothing "auto".
        optimizer: of these parameters.
        batch_size: examples of one accumulation step.
        chip: that of the GPU.
    """
    clips = settings.max_grad_norm > 0 and not optimizer.releases_gradients and not settings.offload_params
    clips = clips and not settings.engine.startswith("zero")  # DeepSpeed's norm is counted with its step
    gathered = settings.eval_batches if settings.eval_batch_size is not None else 0
    if settings.batch_eval_metrics:
        gathered = min(gathered, 1)
    elif settings.eval_accumulation_steps is not None:
        gathered = min(gathered, settings.eval_accumulation_steps)
    return ReplayPlan(
        optimizer=optimizer.alone if optimizer.releases_gradients else optimizer,
        clipping=clipping_temporaries(facts) if clips else (),
        batches=settings.gradient_accumulation_steps,
        micro_batches=math.ceil(batch_size / (settings.micro_batch_size or batch_size)),
        workspaces=workspace_bytes(chip.capability, settings.cublas_workspace_bytes),
        eval_batches=gathered,
        eval_concat=settings.eval_do_concat_batches,
        empty_cache_steps=settings.torch_empty_cache_steps,
        is_manual=settings.loop != "trainer",
        in_function=settings.loop == "function",
        keeps_gradients=not settings.zero_grad_to_none,
        buckets=bucket_bytes(facts, settings),
        reduces_last=settings.engine == "fsdp2",
    )
