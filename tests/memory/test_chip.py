"""``Chip``: the facts of a chip against torch's header and the GPU table."""

from __future__ import annotations

import re

import pytest
import torch
from blocks import A100, H100, L4, P100, RTX_3090, T4, V100, header

from hf_memopt.training.devices import Chip


@pytest.mark.skipif(torch.__version__.startswith(("2.6.", "2.7.", "2.8.")), reason="another header before torch 2.9")
@pytest.mark.parametrize(
    ("capability", "threads"),
    [
        *((large, 2048) for large in (P100, V100, A100, H100, (10, 0))),
        *((small, 1536) for small in (RTX_3090, (8, 7), L4, (12, 0))),
        (T4, 1024),
    ],
)
def test_resident_threads_are_those_of_torchs_header(capability: tuple[int, int], threads: int) -> None:
    text = header("torch", "headeronly", "macros", "Macros.h")
    branches = re.findall(
        r"#(?:if|elif|else)(.*(?:\\\n.*)?)\nconstexpr uint32_t CUDA_MAX_THREADS_PER_SM = (\d+);", text
    )
    arch = f"{capability[0] * 100 + capability[1] * 10}"
    told = [int(count) for condition, count in branches if re.search(rf"\b{arch}\b", condition) or not condition]
    assert Chip.of(capability).threads_per_multiprocessor == told[0] == threads
