"""What optimizers keep: slices of bfloat16 weights, rounded without bias or with nothing lost; the bytes of a state."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_memopt.training.devices.precision_support import Precision
from hf_memopt.training.techniques.optimizers import optimizer_state_bytes, sixteen_bit_weights
from hf_memopt.training.techniques.optimizers.weight_slices import part_of, round_weights, widened


def rounded(value: float | torch.Tensor, count: int = 1, seed: int = 0) -> torch.Tensor:
    updated = torch.full((count,), value) if isinstance(value, float) else value.clone()
    weight = torch.empty(updated.shape, dtype=torch.bfloat16)
    round_weights(updated, weight, None, torch.Generator().manual_seed(seed))
    return weight


@settings(max_examples=25, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), st.integers(0, 2**31))
def test_the_expectation_is_the_float32_weight(value: float, seed: int) -> None:
    count = 4096
    found = rounded(value, count, seed).double()
    step = (found.max() - found.min()).item()
    assert found.min() <= value <= found.max() or step == 0.0
    distance = 2.0 ** math.floor(math.log2(abs(value)) - 7) if value else 0.0  # between neighbours
    assert step <= distance * 2
    assert abs(found.mean().item() - value) <= 6 * distance / 2 / count**0.5


def test_what_is_no_number_stays_none() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    values = bits.view(torch.float32)  # NaN of a GPU, of a CPU, with the smallest payload, negative; infinities
    for lost in (None, torch.zeros(6, dtype=torch.int16)):
        for seed in range(20):
            weight = torch.empty(6, dtype=torch.bfloat16)
            round_weights(values.clone(), weight, lost, torch.Generator().manual_seed(seed))
            assert weight.isnan().tolist() == [True] * 4 + [False] * 2
            assert weight[4:].tolist() == [math.inf, -math.inf]


def test_bfloat16_numbers_are_left_alone() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[~every.isnan()]
    assert torch.equal(rounded(every.float()).view(torch.int16), every.view(torch.int16))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_with_what_was_cut_off_nothing_is_lost(bits: list[int]) -> None:
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    weight, lost = torch.empty(values.shape, dtype=torch.bfloat16), torch.zeros(values.shape, dtype=torch.int16)
    round_weights(values.clone(), weight, lost, torch.Generator())
    assert torch.equal(widened(weight, lost).view(torch.int32), values.view(torch.int32))
    nearest = values.bfloat16()  # halves to even, ours away from zero
    assert ((weight.float() - values).abs() <= (nearest.float() - values).abs())[nearest.isfinite()].all()


def test_the_mark_of_managed_memory_goes_with_a_slice() -> None:
    """Bitsandbytes takes a state on the host for one on the GPU only by this mark (0.50.0 and 0.50.2)."""
    state: Any = torch.zeros(1000, dtype=torch.uint8)
    assert not hasattr(part_of("state1", state, state, slice(256, 512)), "is_paged")
    state.is_paged = True
    part = part_of("state1", state, state, slice(256, 512))
    assert part.is_paged
    assert part.data_ptr() == state.data_ptr() + 256
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:0"))
    assert bitsandbytes.functional.is_on_gpu([on_gpu, part])


def test_weights_are_refused_on_a_gpu_that_emulates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = Precision("fp16", "Tesla T4 (compute capability 7.5) only emulates bfloat16", emulates_bf16=True)
    monkeypatch.setattr(sixteen_bit_weights, "choose_precision", lambda: emulated)
    on_gpu: Any = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"), shape=(2, 3))
    with pytest.raises(ValueError) as error:
        sixteen_bit_weights._check_parameter(on_gpu)
    assert str(error.value) == (
        "dtype=torch.bfloat16 of a parameter of shape (2, 3) is emulated here: Tesla T4 (compute capability 7.5) only "
        "emulates bfloat16; expected float32 weights on this GPU. Load the model with dtype=torch.float32."
    )


class Wrapped(torch.Tensor):
    """A tensor subclass that holds its data in other tensors, as sharded and quantised ones do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


FLAT = torch.zeros(100)


@pytest.mark.parametrize(
    ("state", "sizes"),
    [
        ({}, {}),
        ({"views of one": [FLAT[:10], (FLAT[10:20],)], "step": 3}, {"float32": 400}),
        (
            {"one": torch.zeros(3, dtype=torch.float64), "qmap1": FLAT, "two": torch.zeros(1)},
            {"float32": 4, "float64": 24},
        ),
        ({key: torch.zeros(1000, device="meta") for key in ("one", "two")}, {"float32": 8000}),
        ({"one": Wrapped(torch.zeros(256, dtype=torch.uint8), torch.zeros(1))}, {"float32": 4, "uint8": 256}),
    ],
)
def test_the_bytes_of_a_state(state: dict[str, Any], sizes: dict[str, int]) -> None:
    """Each storage once and as a whole; tables that all parameters share are left out."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = state
    assert optimizer_state_bytes(optimizer) == sizes
