"""``ReplayPlan``: how often the parts of a recorded step run, and what is allocated beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_memopt.prediction.memory.cuda import workspace_bytes
from hf_memopt.prediction.memory.optimizers import OptimizerMemory, ParameterFacts, clipping_temporaries
from hf_memopt.prediction.memory.settings import StepSettings
from hf_memopt.training.devices import Chip


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How the recorded parts follow each other.

    The Trainer holds the batches of all accumulation steps from the start of an optimizer step; a hand-written loop
    holds one batch, and its outputs until the next forward pass is over. ``order`` has for every step of a run over
    differing batches the index of each accumulation step's recording; it is empty for three steps of one recording.
    """

    settings: StepSettings
    optimizer: OptimizerMemory | Sequence[OptimizerMemory]  # the latter of each trainable parameter, if released
    clipping: tuple[int, ...]  # temporaries of gradient clipping
    micro_batches: int  # that each accumulation step is cut into
    workspaces: tuple[int, ...]  # blocks that cuBLAS keeps for the forward thread, then for the backward thread
    order: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls,
        facts: tuple[ParameterFacts, ...],
        settings: StepSettings,
        optimizer: OptimizerMemory,
        batch_size: int,
        chip: Chip,
    ) -> ReplayPlan:
        """Return the plan of steps with the trainable parameters that one process holds."""
        clips = settings.max_grad_norm > 0 and not optimizer.releases_gradients
        return cls(
            settings,
            optimizer=optimizer.alone if optimizer.releases_gradients else optimizer,
            clipping=clipping_temporaries(facts) if clips else (),
            micro_batches=math.ceil(batch_size / (settings.micro_batch_size or batch_size)),
            workspaces=workspace_bytes(chip.capability, settings.cublas_workspace_bytes),
        )

    @property
    def is_manual(self) -> bool:
        """Whether a hand-written loop trains."""
        return self.settings.loop != "trainer"

    @property
    def eval_batches(self) -> int:
        """Evaluation batches whose outputs are gathered on the GPU; 0 for no evaluation."""
        settings = self.settings
        if settings.eval_batch_size is None or settings.batch_eval_metrics:
            return int(settings.eval_batch_size is not None)
        return min(settings.eval_batches, settings.eval_accumulation_steps or settings.eval_batches)

    def passes(self, batches: Sequence[int], micro_batches: int, *, adds: bool) -> list[tuple[int, int]]:
        """Return the passes of a step, each as (recording, which of its passes): the first two are recorded.

        ``batches`` are the recordings of the accumulation steps; ``adds`` says whether gradients of the step before are
        there.
        """
        every = [index for index in batches for _ in range(micro_batches)]
        return [(index, min(place + adds, 1)) for place, index in enumerate(every)]
