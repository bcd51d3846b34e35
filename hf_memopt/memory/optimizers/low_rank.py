"""The memory of the low-rank optimizers: AdamW of galore-torch 1.0 and of apollo-torch 1.0.3, and their projections.

A target (``is_linear``) has its moments in the low-rank space, and a matrix that projects onto it. The step counted is
one that computes the projection anew: the first, and every ``update_proj_gap``-th.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_memopt.memory.optimizers.parameters import (
    FLOAT_BYTES,
    OptimizerMemory,
    OptimizerRequest,
    ParameterFacts,
    memory_of,
)
from hf_memopt.memory.settings import NotEstimableError

SVD_NOTE = "GaLore: the workspace of cuSOLVER's singular value decomposition is not counted"


@dataclass(frozen=True, slots=True)
class Projection:
    """The projection of one weight matrix onto low rank."""

    low_shape: tuple[int, int]  # of the projected gradient
    matrix_bytes: tuple[int, ...]  # of each projecting matrix
    making_bytes: tuple[int, ...]  # temporaries while they are computed


def low_rank_order(parameters: Sequence[ParameterFacts]) -> list[ParameterFacts]:
    """Return the parameters in the groups that stock ``Trainer`` makes then: other parameters, targets."""
    return sorted(parameters, key=lambda parameter: parameter.is_linear)


def projection(parameter: ParameterFacts, request: OptimizerRequest, element_size: int) -> Projection:
    """Return the projection of one weight matrix: by singular vectors (GaLore), or a random one (APOLLO's own)."""
    rows, columns = parameter.shape
    rank = int(request.number("rank", 128))
    sides = _sides(rows, columns, request.arguments.get("proj_type", "std"))
    if _by_singular_vectors(request):
        return _singular_vectors(rows, columns, min(rank, rows, columns), sides, element_size)
    if sides == ("left", "right"):
        raise NotEstimableError(
            f"not estimable: optim={request.settings.optim!r}, optim_args='proj_type=full': apollo-torch does not "
            "implement it; expected std, reverse_std, left or right. Pass optim_args='proj_type=std'"
        )
    elements = rank * (columns if sides == ("right",) else rows)
    cast = (rows * columns * FLOAT_BYTES,) if element_size < FLOAT_BYTES else ()
    making_bytes = (*cast, elements * FLOAT_BYTES, elements * FLOAT_BYTES)
    return Projection(_low_shape(rows, columns, rank, sides), (elements * element_size,), making_bytes)


def _sides(rows: int, columns: int, proj_type: str) -> tuple[str, ...]:
    """Return the sides of a gradient that are projected."""
    if proj_type == "full":
        return ("left", "right")
    if proj_type in ("left", "right"):
        return (proj_type,)
    if proj_type not in ("std", "reverse_std"):
        raise ValueError(
            f"optim_args={'proj_type=' + proj_type!r} is not a projection; expected std, reverse_std, left, right or "
            "full. Pass optim_args='proj_type=std'"
        )
    return ("right",) if (rows >= columns) == (proj_type == "std") else ("left",)


def _by_singular_vectors(request: OptimizerRequest) -> bool:
    return request.settings.optim.startswith("galore") or request.arguments.get("proj", "random") == "svd"


def _low_shape(rows: int, columns: int, rank: int, sides: tuple[str, ...]) -> tuple[int, int]:
    return (rank if "left" in sides else rows, rank if "right" in sides else columns)


def _singular_vectors(rows: int, columns: int, rank: int, sides: tuple[str, ...], element_size: int) -> Projection:
    """Return the projection onto the first ``rank`` singular vectors.

    The matrix is a view: with float32 gradients all singular vectors of its side are kept, whatever the rank is.
    """
    smaller = min(rows, columns)
    in_float32 = element_size == FLOAT_BYTES
    width = smaller if in_float32 else rank
    matrix_bytes = tuple((rows if side == "left" else columns) * width * element_size for side in sides)
    making = [rows * smaller, smaller, smaller * columns, rows * columns]  # U, S, Vh, the copy cuSOLVER overwrites
    if not in_float32:
        making.append(rows * columns)  # in float32
    results_bytes = 0 if in_float32 else sum(matrix_bytes)
    if len(sides) == 1:  # the other side's vectors times the values are computed too, without being used
        making.append(rank * (rows if sides == ("right",) else columns))
        results_bytes = max(results_bytes, rank * rank * FLOAT_BYTES)
    making_bytes = (*(count * FLOAT_BYTES for count in making), results_bytes)
    return Projection(_low_shape(rows, columns, rank, sides), matrix_bytes, making_bytes)


def low_rank_adamw(parameters: Sequence[ParameterFacts], request: OptimizerRequest) -> OptimizerMemory:
    """AdamW of galore_torch and of apollo_torch: a loop over the parameters."""
    apollo = request.settings.optim.startswith("apollo")
    by_channel = apollo and request.arguments.get("scale_type", "channel") == "channel"
    state: list[int] = []
    step: list[tuple[int, ...]] = []
    denominator = update = scaled = channel = 0  # what the last parameter left
    for parameter in low_rank_order(parameters):
        size = parameter.size_bytes
        if not parameter.is_linear:
            state += [size, size]
            step += [(denominator, update, size), (update, size, size)]
            denominator = update = size
            continue
        projected = projection(parameter, request, parameter.element_size)
        low = math.prod(projected.low_shape) * parameter.element_size
        state += [*projected.matrix_bytes, low, low]
        step += [
            (denominator, update, channel, *projected.making_bytes),
            (denominator, update, channel, low, low),
            (update, channel, low, low, low),
        ]
        if apollo:
            state.append(parameter.element_size)  # the norm of the last update
            channel = max(parameter.shape) * parameter.element_size if by_channel else 0
            step += [(scaled, channel, low, low, low, size), (channel, low, low, low, size, size)]
            scaled = size
        else:
            step.append((low, low, low, size, size))
        denominator, update = low, size
    return memory_of(
        state,
        step,
        releases_gradients=request.settings.optim.endswith("layerwise"),
        notes=(SVD_NOTE,) if _by_singular_vectors(request) else (),
    )
