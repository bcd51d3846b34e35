"""Put a recorded step together for ``prices``: its passes as often as they run, and the optimizer's step.

The first forward and backward pass of a step has new gradients, all later ones add to them; of a run with batches of
differing lengths the mean step counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hf_memopt.memory.step_time.communication import communication_of_step
from hf_memopt.memory.step_time.operations import Operation
from hf_memopt.memory.step_time.optimizer_step import UNPRICED_OPTIMIZERS, optimizer_operations
from hf_memopt.memory.step_time.prices import StepCosts, StepTime, missing_figures

if TYPE_CHECKING:
    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.memory.allocator.replay_plan import ReplayPlan
    from hf_memopt.memory.optimizers.parameter_facts import OptimizerMemory, ParameterFacts
    from hf_memopt.memory.recording.step_trace import StepTrace
    from hf_memopt.memory.settings import StepSettings

__all__ = ["Timing", "timing_of_step"]

_OF_EXPERTS = {"experts", "block_sparse_moe", "router"}
"""Names of modules that route tokens to experts; seen in transformers 5.8.1 to 5.23.0."""


class Timing(NamedTuple):
    """What an ``Estimate`` says of a step's time, by the names of its attributes."""

    step_time: StepTime | None
    step_costs: StepCosts | None
    time_unknown: str


def timing_of_step(
    traces: Sequence[StepTrace],
    plan: ReplayPlan,
    parameters: Sequence[ParameterFacts],
    optimizer: OptimizerMemory,
    settings: StepSettings,
    gpu: Gpu | None,
    *,
    batch_size: int,
    lengths: Sequence[int | None],
    trainable: Sequence[ParameterFacts],
) -> Timing:
    """Return the predicted time of a step, or why there is none.

    Args:
        traces: the recorded steps.
        plan: how often their passes run; ``plan.order`` where batches differ in length.
        parameters: the trainable ones, as the optimizer of one process sees them.
        optimizer: its memory.
        settings: of the step.
        gpu: the GPU; None for none, whose time there is nothing to say about.
        batch_size: examples of a batch.
        lengths: tokens of a row of each of ``traces``; None for a model without text.
        trainable: the parameters as they are without sharding.
    """
    if settings.optimizer_memory is None and settings.optim.startswith(UNPRICED_OPTIMIZERS):
        return Timing(None, None, f"the step of optim={settings.optim!r} is not counted" if gpu is not None else "")
    steps = plan.order or ((0,) * plan.batches,)
    batches_of_step = sum(map(len, steps)) / len(steps)
    rows = [lengths[trace] for batches in steps for trace in batches]
    known = [length for length in rows if length is not None]
    micro_batches = batches_of_step * plan.micro_batches
    operations = optimizer_operations(
        parameters,
        optimizer,
        settings.optim if settings.optimizer_memory is None else None,
        weight_decay=settings.weight_decay,
        clips=settings.max_grad_norm > 0 and not optimizer.releases_gradients,
        unscales=settings.precision == "fp16",
        zeroes=plan.keeps_gradients,
    )
    costs = StepCosts(
        passes=_passes(traces, steps, plan),
        optimizer=Counter() if settings.offload else operations,  # which the host does, see ``communication``
        micro_batches=micro_batches,
        communication=communication_of_step(
            trainable, settings, traces[0].gathered_bytes, micro_batches, plan.micro_batches
        ),
        examples=round(batch_size * batches_of_step),
        tokens=batch_size * sum(known) / len(steps) if len(known) == len(rows) else None,
        tf32=settings.precision == "tf32",
        routes_tokens=any(name.rpartition(".")[2] in _OF_EXPERTS for name in traces[0].tracker.modules),
    )
    if gpu is None:
        return Timing(None, costs, "")
    if costs.routes_tokens:
        return Timing(None, costs, "how many tokens each expert gets depends on the data")
    if missing := missing_figures(gpu):
        return Timing(None, costs, f"{gpu.name} has no known {missing}")
    return Timing(costs.on(gpu), costs, "")


def _passes(
    traces: Sequence[StepTrace], steps: Sequence[Sequence[int]], plan: ReplayPlan
) -> tuple[tuple[float, Counter[Operation]], ...]:
    """Return (times per optimizer step, operations) of each different pass of ``steps``."""
    times: Counter[tuple[int, int]] = Counter()  # by trace, and the place of the pass in it
    for batches in steps:
        for part in plan.passes(batches, plan.micro_batches, adds=plan.keeps_gradients):
            times.update(part)
    return tuple(
        (number / len(steps), Counter(traces[trace].tracker.operations[which]))
        for (trace, which), number in times.items()
    )
