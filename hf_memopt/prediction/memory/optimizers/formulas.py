"""The memory of each family of optimizers, and the names of ``TrainingArguments(optim=...)`` that belong to it.

Source: torch 2.13, transformers 5.8 to 5.23, bitsandbytes 0.50, schedulefree 1.4.1, torch-optimi 0.3.3, lomo-optim
0.1.1 and grokadamw 0.1.2.

On a GPU torch's own optimizers update all tensors of one dtype and one parameter group together (``foreach``); stock
``Trainer`` makes two groups, with weight decay and without. ``adamw_torch_fused`` needs no temporaries, but keeps its
step counters on the GPU. A loop over parameters holds a temporary of the last parameter while it computes the next one,
since Python frees a tensor only when its variable is assigned again: the formulas call it ``left``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hf_memopt.prediction.memory.optimizers.parameters import (
    FLOAT_BYTES,
    Family,
    Groups,
    OptimizerMemory,
    OptimizerRequest,
    ParameterFacts,
    in_order,
    memory_of,
    trainer_groups,
    with_previous,
)

_BLOCK = 256  # elements per absmax value, bitsandbytes 0.50.0 and 0.50.2
_MIN_8BIT = 4096  # elements below which bitsandbytes keeps 32 bits
_MIN_PAGED = 100_000  # elements from which a paged optimizer uses managed memory
_TABLE_BYTES = 256 * FLOAT_BYTES  # a quantisation table of bitsandbytes
_AVERAGES = {"ademamix": (2, 1), "lion": (1, 0), "rmsprop": (1, 0)}
"""How many averages a bitsandbytes optimizer has in state1 and in state2; the others, kinds of AdamW, one in each."""
_BITSANDBYTES = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit"),
)


# ---- torch


def _adamw(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """torch.optim.AdamW, foreach: torch/optim/adam.py."""
    return _with_counters(parameters, 2, _foreach(parameters, request, lambda decay: 1))


def _fused_adamw(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """torch.optim.AdamW, fused: its kernels work in place and read their step counters from the GPU."""
    state = [size for p in in_order(parameters) for size in (FLOAT_BYTES, p.size_bytes, p.size_bytes)]
    return memory_of(state, ())


def _sgd(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """torch.optim.SGD: torch/optim/sgd.py. Weight decay adds the weights to a copy of the gradients."""
    momentum = request.number("momentum", 0.0) != 0
    state = [parameter.size_bytes for parameter in in_order(parameters)] if momentum else []
    return memory_of(state, _foreach(parameters, request, int))


def _adagrad(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """torch.optim.Adagrad: torch/optim/adagrad.py. The roots of the sums, and the gradients times the rate."""
    return _with_counters(parameters, 1, _foreach(parameters, request, lambda decay: 2))


def _rmsprop(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """torch.optim.RMSprop: torch/optim/rmsprop.py. The roots of the averages, and with weight decay the gradients."""
    averages = 1 + (request.number("momentum", 0.0) > 0) + request.flag("centered")
    return _with_counters(parameters, averages, _foreach(parameters, request, lambda decay: 1 + decay))


def _with_counters(parameters: Sequence[ParameterFacts], averages: int, step: Groups) -> OptimizerMemory:
    """Return the memory of an optimizer with averages on the GPU, and a step counter on the host, of each parameter."""
    state = [p.size_bytes for p in in_order(parameters) for _ in range(averages)]
    return memory_of(state, step, host_state_bytes=FLOAT_BYTES * len(parameters))


def _foreach(parameters: Sequence[ParameterFacts], request: OptimizerRequest, copies: Callable[[bool], int]) -> Groups:
    """Yield the temporaries of a foreach step: whole copies of a parameter group, one dtype after the other.

    ``copies`` gives their number by whether the group has weight decay.
    """
    for group in trainer_groups(parameters):
        count = copies(group[0].decays and request.settings.weight_decay != 0)
        sizes: tuple[int, ...] = ()
        for element_size in dict.fromkeys(parameter.element_size for parameter in group):
            left = sizes[: len(sizes) // count] if count else ()  # the last dtype's, until assigned again
            sizes = tuple(p.size_bytes for p in group if p.element_size == element_size) * count
            yield (*left, *sizes)


# ---- bitsandbytes


def _bitsandbytes(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """Optimizer1State, Optimizer2State and AdEMAMix: bitsandbytes/optim. The kernels update in place."""
    optim = request.settings.optim
    first, second = next((averages for kind, averages in _AVERAGES.items() if kind in optim), (1, 1))
    state: list[int] = []
    host_state_bytes = 0
    has_tables = request.has_tables
    for parameter in in_order(parameters):
        elements = parameter.elements
        is_8bit = (
            optim.endswith("8bit")
            and elements >= _MIN_8BIT
            and not (parameter.is_embedding and request.settings.embedding_bits == 32)
        )
        element_size = 1 if is_8bit else FLOAT_BYTES
        averages = [count * elements * element_size for count in (first, second) if count]
        scales = [count * math.ceil(elements / _BLOCK) * FLOAT_BYTES for count in (first, second) if count and is_8bit]
        if is_8bit and not has_tables:  # shared by all parameters
            state += [_TABLE_BYTES] * len(averages)
            has_tables = True
        if optim.startswith("paged") and elements >= _MIN_PAGED:
            host_state_bytes += sum(averages)
            averages = []
        state += [*scales, *averages] if first == 2 else [*averages, *scales]  # AdEMAMix creates its scales first
    return memory_of(state, (), host_state_bytes=host_state_bytes)


# ---- transformers, and optimizers derived from it


def _rows_and_columns(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the elements of a factored second moment, or of a whole one below two dimensions."""
    if len(shape) < 2:
        return (math.prod(shape),)
    return math.prod(shape[:-1]), math.prod((*shape[:-2], shape[-1]))


def _casts(parameter: ParameterFacts) -> tuple[int, ...]:
    """Return the float32 copies of gradient and weights in which a 16-bit parameter is updated."""
    full_bytes = parameter.elements * FLOAT_BYTES
    return (full_bytes, full_bytes) if parameter.element_size < FLOAT_BYTES else ()


def _adafactor(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """transformers.optimization.Adafactor, in float32 whatever the weights are.

    Two tensors of the gradient's size are held at once, and the last parameter's update while they are first computed.
    """
    state: list[int] = []
    step: list[tuple[int, ...]] = []
    update_bytes = 0  # what the last parameter left
    for parameter in in_order(parameters):
        full_bytes = parameter.elements * FLOAT_BYTES
        casts = _casts(parameter)
        factors = tuple(count * FLOAT_BYTES for count in _rows_and_columns(parameter.shape))
        state += [*factors, FLOAT_BYTES]  # and the root mean square of the weights
        step += [
            (update_bytes, *casts, full_bytes, full_bytes),
            (*casts, full_bytes, full_bytes, *(factors if len(parameter.shape) > 1 else ())),
        ]
        update_bytes = full_bytes
    return memory_of(state, step)


def _lomo(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """LOMO: no state. 16-bit weights and gradients are cast to float32 for the update, here and in AdaLOMO."""
    return memory_of((), [_casts(parameter) for parameter in parameters], releases_gradients=True)


def _adalomo(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """AdaLOMO: factored second moments (of frozen parameters too, which are not counted here)."""
    state: list[int] = []
    step: list[tuple[int, ...]] = []
    for parameter in parameters:
        full_bytes = parameter.elements * FLOAT_BYTES
        factors = tuple(count * FLOAT_BYTES for count in _rows_and_columns(parameter.shape))
        state += factors
        two = (full_bytes, full_bytes, *(factors if len(parameter.shape) > 1 else ()))
        step.append((*_casts(parameter)[:1], *two))  # the weights are cast when one of the two is freed
    return memory_of(state, step, releases_gradients=True)


def _grokadamw(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """GrokAdamW keeps three averages on the host and copies those of one parameter at a time to the GPU."""
    pairs = [(left, parameter.size_bytes) for left, parameter in with_previous(parameters)]
    step = [group for left, own in pairs for group in ((*(left,) * 4, own, own), (left, *(own,) * 5))]
    return memory_of((), step, host_state_bytes=3 * sum(p.size_bytes for p in parameters))


def _schedule_free(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """Schedule-free optimizers: the iterate z, and the second moment but for SGD; one foreach step per group.

    RAdam divides by the second moment only from its fifth step on (with beta2=0.999).
    """
    averages = 1 if request.settings.optim == "schedule_free_sgd" else 2
    state = [size for p in in_order(parameters) for size in (p.size_bytes,) * averages]
    step: list[tuple[int, ...]] = []
    left: tuple[int, ...] = ()
    for group in trainer_groups(parameters) if averages == 2 else ():
        sizes = tuple(parameter.size_bytes for parameter in group)
        step.append((*left, *sizes))
        left = sizes  # until their variable is assigned again
    return memory_of(state, step, first_step=() if request.settings.optim == "schedule_free_radam" else None)


def _stable_adamw(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """StableAdamW of torch-optimi: two moments, the squared epsilon, and for 16-bit weights what rounding lost.

    Its Triton kernels work in place, and keep one byte and one float per parameter as scratch.
    """
    state: list[int] = []
    for parameter in in_order(parameters):
        size, element_size = parameter.size_bytes, parameter.element_size
        state += [size, size, element_size, size if element_size < FLOAT_BYTES else 1, FLOAT_BYTES]
    return memory_of(state, ())


FAMILIES: dict[str, Family] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": _fused_adamw,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    "lomo": _lomo,
    "adalomo": _adalomo,
    "grokadamw": _grokadamw,
    **dict.fromkeys(("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"), _schedule_free),
    "stable_adamw": _stable_adamw,
    **dict.fromkeys(_BITSANDBYTES, _bitsandbytes),
}
"""The formula of each optimizer."""

ELEMENTWISE = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"), True),
    **{name: False for name in _BITSANDBYTES if "ademamix" not in name},
}
"""Those that ``low_memory_optimizer`` takes, and whether their first step makes the state of each slice."""
