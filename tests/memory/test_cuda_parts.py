"""The tiles of attention are those of torch's own kernels."""

from __future__ import annotations

import re

import pytest
from blocks import A100, H100, L4, P100, RTX_3090, T4, V100, header

from hf_memopt.prediction.memory.cuda import attention
from hf_memopt.training.devices import Chip


@pytest.mark.parametrize("capability", [P100, V100, T4, A100, RTX_3090, L4, H100, (12, 0)])
@pytest.mark.parametrize("dtype", ["half_t", "float"])
@pytest.mark.parametrize("dropout", [False, True])
def test_tiles_are_those_of_torchs_own_kernels(capability: tuple[int, int], dtype: str, dropout: bool) -> None:
    text = header("ATen", "native", "transformers", "cuda", "mem_eff_attention", "kernels", "cutlassB.h")
    arch = max(sm for sm in (50, 70, 75, 80) if sm <= capability[0] * 10 + capability[1])
    pattern = rf"cb\(AttentionBackwardKernel<cutlass::arch::Sm{arch}, (?:cutlass::)?{dtype}, true, "
    pattern += rf"{str(dropout).lower()}, \w+, (\d+), (\d+), (\d+)"
    tiles = {tuple(map(int, match)) for match in re.findall(pattern, text)}
    chip = Chip(capability, 1)
    for width in (32, 64, 96, 128, 256):
        queries, keys, in_registers = attention._efficient_tile(chip, dtype == "half_t", width, dropout)
        widths = {most for i, j, most in tiles if (i, j) == (queries, keys) and most >= width}
        assert widths
        assert in_registers is (dtype == "half_t" and min(widths) <= queries)
