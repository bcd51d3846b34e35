"""The memory of an optimizer, by its name in ``TrainingArguments(optim=...)``: its state and the temporaries of a step.

The sizes are formulas, read from the sources of torch, transformers, bitsandbytes and four further packages
(``formulas``) and checked against the real classes by the tests. So an estimate takes milliseconds, and
the package of an optimizer need not be installed. Bytes of state per fp32 parameter: AdamW 8, and without ``fused`` 4
more during a step; 8-bit AdamW 2.03; Lion half of AdamW; Adafactor 4 x (rows + columns) / elements.

Limitations: sharded states, scalars within a step (512 bytes each). GaLore and APOLLO are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from hf_memopt.errors import nearest
from hf_memopt.plain_data import packaged_rows
from hf_memopt.prediction.memory.optimizers.formulas import ELEMENTWISE, FAMILIES
from hf_memopt.prediction.memory.optimizers.parameters import (
    FLOAT_BYTES,
    Family,
    Groups,
    OptimizerMemory,
    OptimizerRequest,
    ParameterFacts,
    in_order,
    memory_of,
)
from hf_memopt.prediction.memory.settings import NotEstimableError
from hf_memopt.state_chunks import SMALLEST_BYTES, cut_into_chunks

if TYPE_CHECKING:
    from torch import nn

    from hf_memopt.prediction.memory.settings import StepSettings

SLICE_ELEMENTS = 2**21
"""Elements of a slice that is rounded; a test compares it with that of ``sixteen_bit_weights``."""
_COMPENSATION_BYTES = 2  # of Kahan's rounding, per element
_CHUNK = 65_536  # elements per block of a foreach kernel, aten/src/ATen/native/cuda/MultiTensorApply.cuh
_WITHOUT_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""As in ``Trainer.get_decay_parameter_names``, which a test compares; seen in transformers 5.8.1, 5.17.0 and 5.23.0."""
_NOT_ESTIMABLE = {
    row["optim"]: row["reason"] for row in packaged_rows("hf_memopt.prediction.memory.optimizers", "not_estimable.csv")
}


def parameter_facts(model: nn.Module) -> list[ParameterFacts]:
    """Return the facts of the trainable parameters in the model's order, tied ones once.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4))
        >>> [(fact.name, fact.shape, fact.is_embedding, fact.decays) for fact in parameter_facts(model)]
        [('0.weight', (10, 4), True, True), ('1.weight', (4,), False, False), ('1.bias', (4,), False, False)]
    """
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names  # transformers.trainer would import PEFT with it

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying = set(get_parameter_names(model, [nn.LayerNorm], _WITHOUT_DECAY))  # type: ignore[no-untyped-call]
    return [
        ParameterFacts(
            name=name,
            shape=tuple(parameter.shape),
            element_size=parameter.element_size(),
            is_embedding=id(parameter) in embeddings,
            decays=name in decaying,
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def check_optimizer(optim: str) -> None:
    """Refuse an optimizer that is unknown or whose memory is not, without importing torch or transformers."""
    if optim in _NOT_ESTIMABLE:
        raise NotEstimableError(f"not estimable: optim={optim!r}: {_NOT_ESTIMABLE[optim]}")
    if optim not in FAMILIES:
        near, known = nearest(optim, FAMILIES), (*FAMILIES, *_NOT_ESTIMABLE)
        rule = f"{near!r}, or another of {len(known)} names" if near else f"one of {', '.join(known)}"
        raise ValueError(
            f"optim={optim!r} is not an optimizer whose memory is known; expected {rule}. "
            f"Pass optim={near or 'adamw_torch_fused'!r}"
        )


def optimizer_memory(parameters: Sequence[ParameterFacts], settings: StepSettings) -> OptimizerMemory:
    """Return the memory of the optimizer that stock ``Trainer`` builds for these parameters, or of the user's own.

    Raises:
        ValueError: ``optim`` is unknown, or does not work element by element, which ``rounding`` needs; ``optim_args``
            cannot be parsed.
        NotEstimableError: the memory of this optimizer cannot be predicted; the message says why.

    Examples:
        >>> from hf_memopt.types import StepSettings
        >>> weight = ParameterFacts("weight", (1000, 1000), 4, is_embedding=False)
        >>> optimizer_memory([weight], StepSettings(optim="adamw_torch_fused")).state
        (4, 4000000, 4000000)
        >>> optimizer_memory([weight], StepSettings(optim="adamw_8bit")).state  # tables, averages, their scales
        (1024, 1024, 1000000, 1000000, 15628, 15628)
    """
    family = _family(settings)
    request = OptimizerRequest(settings, _read_arguments(settings.optim_args))
    whole = family(parameters, request)
    releases = settings.steps_in_backward or whole.releases_gradients
    if not (releases or settings.optimizer_state_on_host):
        return whole
    if not releases:
        parameters = in_order(parameters)
    alone = []
    for parameter in parameters:
        alone.append(replace(family([parameter], request), releases_gradients=releases))
        request = _after(family, [parameter], request, alone[-1])
    whole = replace(whole, releases_gradients=releases, alone=tuple(alone))
    return whole if releases else _in_chunks(whole, family, parameters, request)


def _in_chunks(
    whole: OptimizerMemory, family: Family, parameters: Sequence[ParameterFacts], request: OptimizerRequest
) -> OptimizerMemory:
    """Return the memory of an optimizer whose state waits on the host, as ``optimizer_state_on_host`` cuts it."""
    waiting = [tuple(size for size in one.state if size >= SMALLEST_BYTES) for one in whole.alone]
    chunks = tuple(
        replace(family(parameters[chunk], request), state=tuple(chain.from_iterable(waiting[chunk])))
        for chunk in cut_into_chunks(map(sum, waiting))
    )
    staying = tuple(size for size in whole.state if size < SMALLEST_BYTES)
    on_host = whole.host_state_bytes + sum(map(sum, waiting))
    return replace(whole, state=staying, host_state_bytes=on_host, step=(), first_step=(), chunks=chunks)


def _after(
    family: Family, parameters: Sequence[ParameterFacts], request: OptimizerRequest, found: OptimizerMemory
) -> OptimizerRequest:
    """Return the request for later parameters: the tables that all parameters of an 8-bit optimizer share come once."""
    later = replace(request, has_tables=True)
    return request if family(parameters, later).state == found.state else later


def clipping_temporaries(parameters: Sequence[ParameterFacts]) -> tuple[int, ...]:
    """Return the temporaries of ``torch.nn.utils.clip_grad_norm_`` on a GPU, in order of creation.

    Per dtype of the gradients: partial norms of every chunk of 65,536 elements, as many per tensor as the largest of
    that dtype has, and one norm per gradient; then their stack, the total norm and the coefficient. The gradients
    themselves are scaled in place.

    Source: torch/nn/utils/clip_grad.py and aten/src/ATen/native/cuda/ForeachReduceOp.cu (``foreach_tensor_norm_cuda``).
    """
    sizes: list[int] = []
    norm_sizes: list[int] = []
    for element_size in dict.fromkeys(parameter.element_size for parameter in parameters):
        elements = [p.elements for p in parameters if p.element_size == element_size]
        chunks = max(math.ceil(count / _CHUNK) for count in elements)
        sizes += [len(elements) * chunks * FLOAT_BYTES, *[element_size] * len(elements)]
        norm_sizes += [element_size] * len(elements)
    if not sizes:
        return ()
    norm_size = max(norm_sizes)  # a stack has the widest dtype
    return (*sizes, norm_size * len(norm_sizes), norm_size, norm_size, norm_size)


# ---- names and arguments


def _family(settings: StepSettings) -> Family:
    """Return the formula of this optimizer."""
    own, optim, rounding = settings.optimizer_memory, settings.optim, settings.rounding
    if own is not None:
        return lambda parameters, request: own(parameters)
    check_optimizer(optim)
    if rounding == "nearest":
        return FAMILIES[optim]
    if optim not in ELEMENTWISE:
        raise ValueError(
            f"optim={optim!r}, rounding={rounding!r} are incompatible: its update does not go element by element; "
            f"expected one of {', '.join(ELEMENTWISE)}. Pass optim='adamw_8bit', or rounding='nearest'"
        )
    return _rounded(FAMILIES[optim], rounding, makes_slices=ELEMENTWISE[optim])


def _read_arguments(optim_args: str | None) -> dict[str, str]:
    """Return ``optim_args``, split as stock ``Trainer`` does."""
    arguments = {}
    for mapping in (optim_args or "").replace(" ", "").split(","):
        name, sign, value = mapping.partition("=")
        if (mapping and not (name and sign)) or "=" in value:
            raise ValueError(
                f"optim_args={optim_args!r} cannot be parsed at {mapping!r}; expected name=value pairs, separated by "
                "commas. Pass, for example, optim_args='rank=64,update_proj_gap=100'"
            )
        if mapping:
            arguments[name] = value
    return arguments


# ---- 16-bit weights


def _rounded(family: Family, rounding: str, *, makes_slices: bool) -> Family:
    """Return the formula of an optimizer that updates 16-bit weights in float32, as ``low_memory_optimizer`` does.

    Slice by slice the weights and their gradient are copied to float32, and the optimizer runs on the slice; what
    rounding needs afterwards is smaller than the gradient's copy, which is gone then. ``makes_slices`` says whether the
    first step makes the state of each slice, as in torch, or of a whole parameter, as in bitsandbytes.
    """

    def memory(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
        wide = [parameter for parameter in parameters if parameter.element_size >= FLOAT_BYTES]
        found = family(wide, request)
        request = _after(family, wide, request, found)
        state, host_state_bytes = [*found.state], found.host_state_bytes
        step, first_step = [*found.step], [*found.first_step]
        for parameter in in_order(parameter for parameter in parameters if parameter.element_size < FLOAT_BYTES):
            full = replace(parameter, element_size=FLOAT_BYTES)
            own = family([full], request)
            request = _after(family, [full], request, own)
            lost = (_COMPENSATION_BYTES * parameter.elements,) if rounding == "kahan" else ()
            state += [*lost, *own.state] if makes_slices else [*own.state, *lost]
            host_state_bytes += own.host_state_bytes
            step += _slices(family, full, request)
            first_step += _slices(family, full, request, makes_state=makes_slices)
        return memory_of(state, step, host_state_bytes=host_state_bytes, first_step=first_step)

    return memory


def _slices(
    family: Family, parameter: ParameterFacts, request: OptimizerRequest, *, makes_state: bool = False
) -> Groups:
    """Yield the temporaries of a parameter's largest slice: weights, gradient, and those of its update.

    In the first step each slice may have a state of its own, until it is copied into the whole one.
    """

    def of_slice(elements: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = family([replace(parameter, shape=(elements,))], request)
        weights_bytes = elements * FLOAT_BYTES
        return (weights_bytes, weights_bytes, *max(found.step, key=sum, default=())), found.state

    elements = min(parameter.elements, SLICE_ELEMENTS)
    update, state = of_slice(elements)
    yield update
    if makes_state and elements < parameter.elements:
        yield elements * FLOAT_BYTES, *state  # the whole one is made now
        update, state = of_slice(min(elements, parameter.elements - elements))
        yield *update, *state
