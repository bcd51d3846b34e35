"""Values on the stand-in of a GPU: operators, random numbers, limits, failures."""

from __future__ import annotations

import itertools
from typing import Any

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from operator_table import ROWS, inputs
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_memopt.prediction.rehearsal import failed_values, recorded_events

pytestmark = pytest.mark.stand_in
LIMIT_BYTES = 1 << 20  # of a call, where the environment says nothing else

HALF = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""One unit in the last place of 16 bits and a half more: attention sums in float32 here, and in 16 bits on the CPU."""
OTHER_STRIDES = {"efficient attention", "efficient attention, causal", "efficient attention with mask"}
"""Fused kernels on a GPU lay out their output as (batch, queries, heads, width)."""


def _flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(itertools.chain.from_iterable(map(_flat, result)))


def _run(name: str, device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Return the results of an operator and the gradients of what went in."""
    t = inputs(device)
    results = _flat(ROWS[name](t))
    sums = [(r.float() * r.detach().float().cos()).sum() for r in results if r.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()
    return results, {name: getattr(t, name).grad for name in ("x", "w", "image", "q", "k")}


def _assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = HALF.get(expected.dtype, 2e-6)  # the order of sums differs with strides
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", ROWS)
def test_an_operator_comes_to_values_shapes_dtypes_and_strides_of_the_cpu(name: str) -> None:
    failures = dict(failed_values)
    expected, expected_gradients = _run(name, "cpu")
    found, gradients = _run(name, "cuda")
    for result, other in zip(found, expected, strict=True):
        _assert_equal(result, other)
        assert name in OTHER_STRIDES or result.stride() == other.stride()
    for key, gradient in gradients.items():
        assert (gradient is None) == (expected_gradients[key] is None)
        if gradient is not None:
            torch.testing.assert_close(gradient.cpu(), expected_gradients[key], rtol=1e-2, atol=1e-2, equal_nan=True)
    assert failed_values == failures


DRAWS: dict[str, Any] = {
    "rand": lambda: torch.rand(50, device="cuda"),
    "randn": lambda: torch.randn(50, device="cuda"),
    "randint": lambda: torch.randint(1000, (50,), device="cuda"),
    "randperm": lambda: torch.randperm(50, device="cuda"),
    "normal_": lambda: torch.empty(50, device="cuda").normal_(),
    "uniform_ in half": lambda: torch.empty(50, device="cuda", dtype=torch.float16).uniform_(),
    "exponential_": lambda: torch.empty(50, device="cuda").exponential_(),
    "bernoulli": lambda: torch.full((50,), 0.5, device="cuda").bernoulli(),
    "multinomial": lambda: torch.rand(50, device="cuda").multinomial(20),
    "dropout": lambda: torch.dropout(torch.ones(50, device="cuda"), 0.5, True),
    "generator of its own": lambda: torch.rand(50, device="cuda", generator=torch.Generator("cuda").manual_seed(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_restored_generator_draws_the_same_again_and_the_cpu_has_its_own(name: str) -> None:
    torch.cuda.manual_seed(7)
    states = torch.cuda.get_rng_state(), torch.get_rng_state()
    first, second = DRAWS[name](), DRAWS[name]()
    torch.cuda.set_rng_state(states[0])

    assert torch.equal(first, DRAWS[name]())
    assert torch.equal(first, second) == (name == "generator of its own")
    assert first.unique().numel() > 1
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [(SDPBackend.EFFICIENT_ATTENTION, torch.float32, 1e-5), (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 2e-2)],
)
def test_dropout_of_fused_attention_has_one_mask_in_both_passes(
    backend: SDPBackend, dtype: torch.dtype, tolerance: float
) -> None:
    """The output is linear in the values, so ``sum(output * grad) == sum(values * grad of values)``, mask or not."""
    q = inputs("cuda").q.detach().to(dtype)
    v = q.clone().requires_grad_()
    with sdpa_kernel([backend]):
        output = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    direction = torch.ones_like(output) + output.detach()
    output.backward(direction)

    expected = float((output.detach() * direction).sum())
    assert float((v.detach() * v.grad).sum()) == pytest.approx(expected, rel=tolerance)
    with sdpa_kernel([backend]):
        assert not torch.equal(F.scaled_dot_product_attention(q, q, v, dropout_p=0.5), output)


def test_autograd_adds_gradients_in_place_as_without_values() -> None:
    """It asks whether anyone else holds the gradient or its storage, so values must not."""
    y = torch.ones(64, 64, device="cuda", requires_grad=True)
    w = torch.ones(64, 64, device="cuda", requires_grad=True)
    with recorded_events() as found:
        for _ in range(3):
            y = y + y @ w
        y.sum().backward()
    # three of the forward pass, and one to the expanded gradient of the sum
    assert [event.kind for event in found if event.operator == "add.Tensor"] == ["allocate"] * 4


def test_a_call_with_large_tensors_is_left_out_and_its_small_result_is_nought() -> None:
    large = torch.ones(LIMIT_BYTES // 4 + 1, device="cuda")
    assert float(large.sum()) == 0
    assert bool((torch.ones(LIMIT_BYTES + 1, device="cuda", dtype=torch.long) == 1).all())  # decides branches


def test_what_the_cpu_cannot_compute_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        torch.batch_norm_stats(torch.ones(4, 3, device="cuda"), 1e-5)

    reason = failed_values.pop("batch_norm_stats")
    assert reason.startswith("NotImplementedError: Could not run 'aten::batch_norm_stats'")
    assert [record.getMessage() for record in caplog.records] == [
        f"batch_norm_stats was not computed by the CPU and its results are what lay there: {reason}"
    ]


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_4_bit_weights_are_those_of_the_cpu(kind: str, nested: bool) -> None:
    weight = inputs("cpu").image.detach().reshape(-1, 64)
    results = []
    for device in ("cpu", "cuda"):
        packed, state = quantize_4bit(weight.to(device), quant_type=kind, compress_statistics=nested, blocksize=64)
        results.append([packed.cpu(), dequantize_4bit(packed, state).cpu()])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layer", ["Linear4bit", "Linear8bitLt"])
def test_a_quantized_layer_comes_to_the_cpus_output_and_gradient(layer: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        settings = {"quant_type": "nf4"} if layer == "Linear4bit" else {"has_fp16_weights": False}
        module = getattr(bitsandbytes.nn, layer)(64, 64, **settings).to(device)
        x = torch.randn(2, 8, 64).to(device, torch.bfloat16).requires_grad_()
        output = module(x)
        output.square().sum().backward()
        results.append([output.detach().cpu(), x.grad.cpu()])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # the order of sums in bfloat16


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW", "Lion8bit", "PagedAdamW8bit"])
def test_an_optimizer_of_bitsandbytes_steps_as_on_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 8192).to(device))
        optimizer = getattr(bitsandbytes.optim, name)([weight], lr=1e-2)
        for step in range(3):
            weight.grad = torch.sin(weight.detach() * (step + 1))
            optimizer.step()
        results.append(weight.detach().cpu())
    torch.testing.assert_close(*results)
