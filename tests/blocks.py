"""What the tests of the CUDA kernels' blocks share: meta tensors, a mode that asks for blocks, torch's own headers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.prediction.memory import cuda
from hf_memopt.training.devices import Chip

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T4, A100, RTX_3090, L4, V100, P100, H100 = (7, 5), (8, 0), (8, 6), (8, 9), (7, 0), (6, 0), (9, 0)
HEADERS = os.path.join(os.path.dirname(torch.__file__), "include")


def empty(*shape: int, dtype: torch.dtype = FP32, requires_grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def hidden_bytes(
    func: Any, args: Any, kwargs: Any, out: Any, capability: tuple[int, int], *, multiprocessors: int | None = None
) -> tuple[int, ...]:
    return cuda.hidden_bytes(func, args, kwargs, out, chip=Chip.of(capability, multiprocessors))


class Blocks(TorchDispatchMode):
    """What ``hidden_bytes`` says of each operator that runs, by its name."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self.capability = capability
        self.seen: dict[str, list[tuple[int, ...]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.setdefault(str(func), []).append(hidden_bytes(func, args, kwargs or {}, out, self.capability))
        return out


def header(*path: str) -> str:
    with open(os.path.join(HEADERS, *path), encoding="utf-8") as file:
        return file.read()
