"""The memory of an optimizer that updates 16-bit weights in float32, as ``hf_memopt.sixteen_bit_optimizer`` does.

Slice by slice the weights and their gradient are copied to float32, and the optimizer runs on the slice; what rounding
needs afterwards is smaller than the gradient's copy, which is gone then. The state of torch's optimizers is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_memopt.memory.optimizers.parameter_facts import (
    FLOAT_BYTES,
    Family,
    Groups,
    OptimizerMemory,
    OptimizerRequest,
    ParameterFacts,
    in_order,
    memory_of,
)

__all__ = ["SLICE_ELEMENTS", "rounded"]

SLICE_ELEMENTS = 2**21
"""Elements of a slice; a test compares it with that of ``sixteen_bit_weights``."""
_COMPENSATION_BYTES = 2  # per element


def rounded(family: Family, rounding: str, *, makes_slices: bool) -> Family:
    """Return the formula of an optimizer for 16-bit weights.

    Args:
        family: the plain optimizer's.
        rounding: ``"stochastic"`` or ``"kahan"``.
        makes_slices: whether the first step makes the state of each slice, as in torch, or of a whole parameter, as in
            bitsandbytes.
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
            first_step += _first_slices(family, full, request) if makes_slices else _slices(family, full, request)
        return memory_of(state, step, host_state_bytes=host_state_bytes, first_step=first_step, notes=found.notes)

    return memory


def _after(
    family: Family, parameters: Sequence[ParameterFacts], request: OptimizerRequest, found: OptimizerMemory
) -> OptimizerRequest:
    """Return the request for later parameters: tables that all share come once."""
    later = replace(request, has_tables=True)
    return request if family(parameters, later).state == found.state else later


def _slices(family: Family, parameter: ParameterFacts, request: OptimizerRequest) -> list[tuple[int, ...]]:
    """Return the temporaries of a parameter's largest slice: weights, gradient, and those of its update."""
    elements = min(parameter.elements, SLICE_ELEMENTS)
    return [_update(family, parameter, request, elements)]


def _first_slices(family: Family, parameter: ParameterFacts, request: OptimizerRequest) -> Groups:
    """Return the same of the first step: each slice has a state of its own, until it is copied into the whole one."""
    elements = min(parameter.elements, SLICE_ELEMENTS)
    if elements == parameter.elements:  # which is the whole one
        return _slices(family, parameter, request)
    later = min(elements, parameter.elements - elements)
    return [
        (elements * FLOAT_BYTES, *_state(family, parameter, request, elements)),  # the whole one is made now
        (*_update(family, parameter, request, later), *_state(family, parameter, request, later)),
    ]


def _update(family: Family, parameter: ParameterFacts, request: OptimizerRequest, elements: int) -> tuple[int, ...]:
    heaviest: tuple[int, ...] = max(family([replace(parameter, shape=(elements,))], request).step, key=sum, default=())
    return (elements * FLOAT_BYTES, elements * FLOAT_BYTES, *heaviest)


def _state(family: Family, parameter: ParameterFacts, request: OptimizerRequest, elements: int) -> tuple[int, ...]:
    return family([replace(parameter, shape=(elements,))], request).state
