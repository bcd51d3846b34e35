"""Parts of ``CudaSemantics``: the end of a region, and the tiles of attention."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from blocks import A100, BF16, FP32, H100, L4, P100, RTX_3090, T4, V100, header
from blocks import empty as meta
from torch import nn

from hf_memopt.prediction.memory.cuda import CudaSemantics, attention
from hf_memopt.prediction.memory.recording.step import recording
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.training.devices import Chip


def test_a_region_ends_with_its_cache_and_torchs_flags_after_errors_too() -> None:
    """Model code may ask ``torch.is_autocast_enabled("cuda")``; afterwards the answer is the user's again."""
    told = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    weight, x = nn.Parameter(meta(8, 8)), meta(2, 8, dtype=BF16)
    tracker = StorageTracker()
    semantics = CudaSemantics(autocast=BF16, tracker=tracker)
    tracker.add(x)
    tracker.add(weight)

    def fail() -> None:
        with semantics.autocast_region():
            assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == (True, BF16)
            assert F.linear(x, weight).dtype == BF16
            assert [delta for _, delta in tracker.events[2:]] == [128, 32, -32]
            raise KeyError("a model's error")

    with recording(tracker, semantics), torch.no_grad():
        with pytest.raises(KeyError):
            fail()
        assert [delta for _, delta in tracker.events[2:]] == [128, 32, -32, -128]
        assert F.linear(x.float(), weight).dtype == FP32
    assert (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")) == told


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
