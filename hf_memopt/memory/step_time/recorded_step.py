"""Put a recorded step together for ``prices``: its passes as often as they run, and the optimizer's step.

After the backward pass follow unscaling, clipping, and the optimizer's step. torch's optimizers run their own code on
the meta device, on one parameter of all elements, and what transformers' Adafactor does is run there for each shape. Of
kernels that torch cannot run there (fused AdamW, bitsandbytes) the bytes follow from ``OptimizerMemory``: weights and
state are read and written, gradients are read. A paged state crosses PCIe both ways at every step, the most that it can
cost. Not counted are optimizers whose step is neither of these: ``UNPRICED_OPTIMIZERS``.

The first forward and backward pass of a step has new gradients, all later ones add to them; of a run with batches of
differing lengths the mean step counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.memory.optimizers.parameter_facts import OptimizerMemory, ParameterFacts
from hf_memopt.memory.step_time.communication import communication_of_step
from hf_memopt.memory.step_time.operations import (
    FOREACH_CHUNK,
    FOREACH_CHUNKS_PER_KERNEL,
    Operation,
    operation_of,
)
from hf_memopt.memory.step_time.prices import StepCosts, StepTime, missing_figures

if TYPE_CHECKING:
    from hf_memopt.devices.gpus import Gpu
    from hf_memopt.memory.allocator.replay_plan import ReplayPlan
    from hf_memopt.memory.optimizers.parameter_facts import OptimizerMemory, ParameterFacts
    from hf_memopt.memory.recording.step_trace import StepTrace
    from hf_memopt.memory.settings import StepSettings

__all__ = ["optimizer_operations", "timing_of_step"]

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
        optimizer=Counter() if settings.offload_params else operations,  # which the host does, see ``communication``
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


# ---- The optimizer step


_OF_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
UNPRICED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "grokadamw", "schedule_free", "stable_adamw")
"""How the names begin of those whose step is not counted."""

_LAUNCHES_PER_TENSOR = 0.05  # of a foreach call
_LAUNCHES_OF_BITSANDBYTES = 5  # a call from Python for each parameter


def optimizer_operations(
    parameters: Sequence[ParameterFacts],
    memory: OptimizerMemory,
    optim: str | None,
    *,
    weight_decay: float = 0.0,
    clips: bool = True,
    unscales: bool = False,
    zeroes: bool = False,
) -> Counter[Operation]:
    """Return the costs of a step of the optimizer.

    Args:
        parameters: the trainable ones.
        memory: of the optimizer.
        optim: as ``TrainingArguments`` takes it, none of ``UNPRICED_OPTIMIZERS``; None for an optimizer that is only
            known by its memory, which counts as one kernel for each parameter.
        weight_decay: as ``TrainingArguments`` takes it.
        clips: whether the norm of the gradients is clipped.
        unscales: whether fp16's gradient scaler divides them.
        zeroes: whether they are kept between steps, and set to zero.
    """
    gradients = sum(fact.size_bytes for fact in parameters)
    found: Counter[Operation] = Counter()
    if not parameters:
        return found
    together = -(-sum(fact.elements for fact in parameters) // (FOREACH_CHUNK * FOREACH_CHUNKS_PER_KERNEL))
    of_lists = _LAUNCHES_PER_TENSOR * len(parameters)
    if unscales:  # reads and writes them
        found[Operation("memory", moved_bytes=2 * gradients, kernels=together, launches=together + of_lists)] += 1
    if clips:  # the norm reads, the scaling reads and writes
        launches = 2 * together + 2 * of_lists
        found[Operation("memory", moved_bytes=3 * gradients, kernels=2 * together, launches=launches)] += 1
    if zeroes:
        found[Operation("memory", moved_bytes=gradients, kernels=together, launches=together + of_lists)] += 1
    if optim in _OF_TORCH or optim == "adafactor":
        tensors = len(parameters) if memory.releases_gradients else 0
        alone = tuple(replace(fact, name="") for fact in parameters)  # layers share shapes, and so the cached run
        return found + _recorded(optim, tuple(Counter(alone).items()), weight_decay, _momentum(memory), tensors)
    moved = 2 * gradients + gradients + 2 * memory.state_bytes  # the weights are as large as their gradients
    kernels, launches = together, together + 2 * of_lists
    if optim != "adamw_torch_fused" or memory.releases_gradients:
        kernels, launches = len(parameters), float(_LAUNCHES_OF_BITSANDBYTES * len(parameters))
    found[Operation("memory", moved_bytes=moved, kernels=kernels, launches=launches)] += 1
    if memory.host_state_bytes:
        found[Operation("pcie", moved_bytes=2 * memory.host_state_bytes, kernels=len(parameters))] += 1
    return found


def _momentum(memory: OptimizerMemory) -> bool:
    """Return whether SGD has one, which is then its only state."""
    return memory.state_bytes > 0


@lru_cache(maxsize=64)
def _recorded(
    optim: str, parameters: tuple[tuple[ParameterFacts, int], ...], weight_decay: float, momentum: bool, releases: int
) -> Counter[Operation]:
    """Return the operations of torch's own code, or of Adafactor; ``parameters`` are different ones and their number.

    ``releases`` is the number of tensors that step alone, 0 where all step together.
    """
    found: Counter[Operation] = Counter()
    if optim == "adafactor":
        for fact, times in parameters:
            ran = _adafactor_step(fact.shape, fact.element_size)
            found.update({cost: times * number for cost, number in ran.items()})
        return found
    options: dict[str, Any] = {"momentum": 0.9} if optim == "sgd" and momentum else {}
    for decays, size in dict.fromkeys((fact.decays, fact.element_size) for fact, _ in parameters):
        group = [(fact, times) for fact, times in parameters if (fact.decays, fact.element_size) == (decays, size)]
        elements, tensors = sum(fact.elements * times for fact, times in group), sum(times for _, times in group)
        whole = replace(group[0][0], shape=(elements,))
        decay = weight_decay if decays else 0.0
        build = partial(_OF_TORCH[optim], lr=1e-3, weight_decay=decay, foreach=True, **options)
        ran = _run(build, [whole])
        for cost, number in ran.items():
            kernels = max(cost.kernels, tensors) if releases and cost.kernels else cost.kernels
            launches = float(tensors) if releases else cost.kernels + _LAUNCHES_PER_TENSOR * tensors
            found[cost._replace(kernels=kernels, launches=launches)] += number
    return found


@cache
def _adafactor_step(shape: tuple[int, ...], element_size: int) -> Counter[Operation]:
    """Return the operations of transformers' Adafactor for one parameter that has its state, as the Trainer builds it.

    They are written out because the module of the class imports PEFT, which takes longer than a whole estimate; a test
    compares both. Seen in transformers 5.8.1, 5.17.0 and 5.23.0.
    """
    new = partial(torch.empty, device="meta")
    weight, gradient = new(shape, dtype=_dtype(element_size)), new(shape, dtype=_dtype(element_size))
    is_factored = len(shape) >= 2
    averages = [new(shape[:-1]), new(shape[:-2] + shape[-1:])] if is_factored else [new(shape)]
    counter = _Counting()
    with torch.no_grad(), counter:
        gradient, exact = gradient.float(), weight.float()  # themselves where they are float32
        _root_mean_square(exact)
        update = gradient**2 + 1e-30
        if is_factored:
            rows, columns = averages
            rows.mul_(0.9).add_(update.mean(dim=-1), alpha=0.1)
            columns.mul_(0.9).add_(update.mean(dim=-2), alpha=0.1)
            of_rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(of_rows, columns.unsqueeze(-2).rsqrt()).mul_(gradient)
        else:
            update = averages[0].mul_(0.9).add_(update, alpha=0.1).rsqrt().mul_(gradient)
        update.div_((_root_mean_square(update) / 1.0).clamp_(min=1.0)).mul_(1e-3)
        exact.add_(-update)
        if exact is not weight:
            weight.copy_(exact)
    return counter.found


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.norm(2) / tensor.numel() ** 0.5
    return found


def _run(build: Callable[[Any], torch.optim.Optimizer], facts: Iterable[ParameterFacts]) -> Counter[Operation]:
    """Return the operations of a step of an optimizer that has its state already, on the meta device."""
    parameters = [
        nn.Parameter(torch.empty(fact.shape, dtype=_dtype(fact.element_size), device="meta")) for fact in facts
    ]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = build(parameters)
    optimizer.step()  # makes the state
    counter = _Counting()
    with counter:
        optimizer.step()
    return counter.found


def _dtype(element_size: int) -> torch.dtype:
    return torch.float32 if element_size == 4 else torch.bfloat16


class _Counting(TorchDispatchMode):
    """Counts the operations of code that runs on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[Operation] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if func.namespace != "profiler":  # step() marks where it begins and ends
            self.found[operation_of(func, args, kwargs or {}, out)] += 1
        return out
