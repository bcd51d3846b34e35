"""FlashAttention-2's stand-in: what it allocates and keeps."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.cuda.flash_attention_2 import attend
from hf_memopt.prediction.memory.recording.step import recording
from hf_memopt.prediction.memory.tracking import StorageTracker

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


def allocations(inputs: tuple[torch.Tensor, ...], mask: torch.Tensor | None, autocast: Any = None) -> list[list[int]]:
    """Return the sizes of what one call allocates, and of what it keeps for its backward pass."""
    tracker = StorageTracker()
    semantics = CudaSemantics(autocast=autocast, tracker=tracker)
    for tensor in (*inputs, *(() if mask is None else (mask,))):
        tracker.add(tensor)
    begin = len(tracker.events)
    with recording(tracker, semantics), semantics.autocast_region():
        out, _ = attend(module(), *inputs, mask)
        events = tracker.events[begin:]
    assert out.requires_grad
    assert out.dtype == torch.bfloat16
    dead = {number for number, size in events if size < 0}
    born = [(number, size) for number, size in events if size > 0]
    return [[size for _, size in born], sorted(size for number, size in born if number not in dead)]


TENSOR_BYTES = BATCH * SEQ * HEADS * WIDTH * 2


def test_output_and_one_number_per_row_are_kept_and_with_padding_the_gathered_copies() -> None:
    _, kept = allocations(tensors(), None)
    assert kept.count(TENSOR_BYTES) == 1
    assert BATCH * HEADS * SEQ * 4 in kept
    assert sum(kept) < 1.5 * TENSOR_BYTES
    mask = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    _, kept = allocations(tensors(), mask)
    assert kept.count(TENSOR_BYTES) == 5  # query, key, value, the kernel's output, what it is scattered into
    assert BATCH * SEQ * 8 in kept  # the indices
    made, _ = allocations(tensors(torch.float32), mask, torch.bfloat16)
    assert max(made) == TENSOR_BYTES  # tokens are gathered in 16 bits


def test_the_private_flag_of_support_is_there() -> None:
    assert transformers.LlamaForCausalLM._supports_flash_attn is True
    assert transformers.DebertaV2ForSequenceClassification._supports_flash_attn is False
