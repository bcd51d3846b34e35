"""Which operators CUDA's autocast casts, and how: the Python functions of the operators in ``autocast.csv``.

torch answers which operators have an autocast kernel, but not what that kernel does to their arguments, so its lists
are repeated there, by the names of its policies; a name without a dot is the default overload.
``tests/memory/test_kernel_buffers.py`` checks them against torch's header and against the operators that the installed
torch registers for the dispatch key ``AutocastCUDA``, which a CPU-only build has too.

Source: torch 2.13, ``aten/src/ATen/autocast_mode.h`` (the ``AT_FORALL_*`` lists) and ``autocast_mode.cpp`` (what it
adds for one device). The lists of 2.14 are the same. Limitations: ``binary_cross_entropy``, which raises under autocast
on CUDA, and the cache of weight casts, which is in ``semantics``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F

from hf_memopt.plain_data import packaged_rows


class Policy(StrEnum):
    """What autocast does to the floating-point arguments of an operator, in the words of ``autocast_mode.h``."""

    LOWER_PRECISION = "lower_precision_fp"  # cast to the autocast dtype; float64 stays
    FLOAT32 = "fp32"  # cast from 16 bits to float32
    FLOAT32_SET_OPT_DTYPE = "fp32_set_opt_dtype"  # not cast: dtype=float32 is passed instead, where there was none
    FLOAT32_APPEND_DTYPE = "fp32_append_dtype"  # the same, through the overload that takes a dtype
    PROMOTE = "promote"  # cast to the widest dtype among them


_ALIASES = {  # torch.Tensor's methods that run the operator themselves, where a function mode is off
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__",),
}


def functions_of(operator: str) -> set[Callable[..., Any]]:
    """Return every Python function that runs an ATen operator: in torch, as a method, in ``torch.nn``."""
    name = operator.partition(".")[0]
    names = {name, name.removeprefix("linalg_"), *_ALIASES.get(name, ())}
    spaces = (torch, F, torch.linalg, torch._C._nn, torch.Tensor)  # _nn is private: pinned by a test, torch 2.6 to 2.13
    return {getattr(space, name) for name in names for space in spaces if hasattr(space, name)}


def casts_of(operators: Mapping[str, Policy]) -> dict[Callable[..., Any], Policy]:
    """Return the policy of each Python function of these operators."""
    return {function: policy for operator, policy in operators.items() for function in functions_of(operator)}


OPERATORS: Mapping[str, Policy] = {
    row["operator"]: Policy(row["policy"]) for row in packaged_rows("hf_memopt.prediction.memory.cuda", "autocast.csv")
}
CUDA_CASTS = casts_of(OPERATORS)
