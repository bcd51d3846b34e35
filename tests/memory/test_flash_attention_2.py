"""FlashAttention-2's stand-in: the shapes it returns, what it allocates, and which models and dtypes it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tiny
from hf_memopt.memory import estimate
from hf_memopt.memory.cuda import CudaSemantics, use_stand_in
from hf_memopt.memory.cuda.flash_attention_2 import STAND_IN, attend
from hf_memopt.memory.models import load_model
from hf_memopt.memory.recording.step import recording
from hf_memopt.memory.settings import NotEstimableError
from hf_memopt.memory.tracking import StorageTracker

BATCH, SEQ, HEADS, WIDTH = 2, 16, 4, 8


def tensors(dtype: torch.dtype = torch.bfloat16, key_heads: int = HEADS, keys: int = SEQ) -> tuple[torch.Tensor, ...]:
    shapes = ((HEADS, SEQ), (key_heads, keys), (key_heads, keys))
    return tuple(
        torch.empty(BATCH, heads, seq, WIDTH, dtype=dtype, device="meta", requires_grad=True) for heads, seq in shapes
    )


def module(causal: bool = False) -> nn.Module:
    made = nn.Module()
    made.is_causal = causal
    return made


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_shape_and_dtype(padded: bool, causal: bool, key_heads: int) -> None:
    mask = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta") if padded else None
    with CudaSemantics():
        out, weights = attend(module(causal), *tensors(key_heads=key_heads), mask)
    assert (out.shape, out.dtype, weights) == ((BATCH, SEQ, HEADS, WIDTH), torch.bfloat16, None)


def test_cross_attention_over_other_tokens() -> None:
    with CudaSemantics():
        out, _ = attend(module(), *tensors(keys=24), None)
    assert out.shape == (BATCH, SEQ, HEADS, WIDTH)


def allocations(mask: torch.Tensor | None, **options: Any) -> list[int]:
    """Return the sizes of what one call allocates and keeps for its backward pass."""
    inputs = tensors()
    tracker = StorageTracker()
    for tensor in (*inputs, *(() if mask is None else (mask,))):
        tracker.add(tensor)
    begin = len(tracker.events)
    with recording(tracker, CudaSemantics(tracker=tracker)):
        out, _ = attend(module(), *inputs, mask, **options)
        events = tracker.events[begin:]
    assert out.requires_grad
    dead = {number for number, size in events if size < 0}
    return sorted(size for number, size in events if size > 0 and number not in dead)


TENSOR_BYTES = BATCH * SEQ * HEADS * WIDTH * 2


def test_without_padding_output_and_one_number_per_row_are_kept() -> None:
    kept = allocations(None)
    assert kept.count(TENSOR_BYTES) == 1
    assert BATCH * HEADS * SEQ * 4 in kept
    assert sum(kept) < 1.5 * TENSOR_BYTES


def test_with_padding_the_gathered_copies_are_kept_too() -> None:
    kept = allocations(torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta"))
    assert kept.count(TENSOR_BYTES) == 5  # query, key, value, the kernel's output, what it is scattered into
    assert BATCH * SEQ * 8 in kept  # the indices


def test_a_backward_pass_reaches_all_three() -> None:
    inputs = tensors()
    with CudaSemantics():
        out, _ = attend(module(), *inputs, torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta"))
        out.backward(torch.empty_like(out))
    assert [tensor.grad.shape for tensor in inputs] == [tensor.shape for tensor in inputs]


def test_float32_is_refused_as_by_the_kernel() -> None:
    with pytest.raises(NotEstimableError) as error, CudaSemantics():
        attend(module(), *tensors(torch.float32), None)
    message = (
        "not estimable: attn_implementation='flash_attention_2' computes in 16 bits only; expected 16-bit weights or "
        "autocast. Pass precision='bf16'"
    )
    assert str(error.value) == message
    with pytest.raises(NotEstimableError) as error:
        estimate(
            tiny.llama_config(), batch_size=1, seq_len=8, precision="fp32", attn_implementation="flash_attention_2"
        )
    assert str(error.value) == message


@pytest.mark.parametrize("make", [tiny.bert_config, tiny.llama_config])
@pytest.mark.parametrize("set_up", [{"precision": "bf16"}, {"precision": "fp32", "weights_dtype": "float16"}])
def test_models_run_with_it(make: Any, set_up: dict[str, Any]) -> None:
    sizes = {"batch_size": 4, "seq_len": 64, **set_up}
    flash, eager = (estimate(make(), **sizes, attn_implementation=name) for name in ("flash_attention_2", "eager"))
    assert flash.peak_allocated_bytes < eager.peak_allocated_bytes


def test_padding_costs_what_is_gathered_and_scattered() -> None:
    sizes = {"batch_size": 4, "seq_len": 64, "precision": "bf16", "attn_implementation": "flash_attention_2"}
    padded, full = (estimate(tiny.llama_config(), **sizes, padding=padding) for padding in (True, False))
    tokens, hidden, layers = 4 * 64, 32, 2
    more_bytes = padded.components["activations"] - full.components["activations"]
    assert more_bytes == layers * (tokens * hidden * 2 + tokens * 8)  # the scattered output, the indices of tokens


def test_tokens_are_gathered_in_16_bits() -> None:
    queries = tensors(torch.float32)
    mask = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    tracker = StorageTracker()
    semantics = CudaSemantics(autocast=torch.bfloat16, tracker=tracker)
    for tensor in (*queries, mask):
        tracker.add(tensor)
    with recording(tracker, semantics), semantics.autocast_region():
        out, _ = attend(module(), *queries, mask)
    born = [size for _, size in tracker.events[4:] if size > 0]
    assert out.dtype == torch.bfloat16
    assert max(born) == TENSOR_BYTES


def test_an_architecture_without_support_is_refused() -> None:
    config = transformers.DebertaV2Config(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    with torch.device("meta"):
        model = transformers.DebertaV2ForSequenceClassification(config)
    with pytest.raises(NotEstimableError) as error:
        use_stand_in(model)
    assert str(error.value) == (
        "not estimable: DebertaV2ForSequenceClassification does not support attn_implementation='flash_attention_2'; "
        "expected 'sdpa' or 'eager'. Pass attn_implementation='sdpa'"
    )


def test_the_private_flag_of_support_is_there() -> None:
    assert transformers.LlamaForCausalLM._supports_flash_attn is True
    assert transformers.DebertaV2ForSequenceClassification._supports_flash_attn is False


def test_the_name_does_not_let_transformers_look_for_the_package() -> None:
    assert "flash" not in STAND_IN
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny.llama_config())
    before = set(transformers.AttentionInterface().valid_keys())
    use_stand_in(model)
    assert model.config._attn_implementation == STAND_IN
    assert set(transformers.AttentionInterface().valid_keys()) - before <= {STAND_IN}


def test_a_model_that_asks_for_it_itself_gets_the_stand_in() -> None:
    config = tiny.llama_config()
    assert load_model(config, attn_implementation="flash_attention_2").model.config._attn_implementation == STAND_IN
