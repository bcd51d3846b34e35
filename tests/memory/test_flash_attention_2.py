"""The private flag that says which models FlashAttention-2 is told to serve."""

from __future__ import annotations

import transformers


def test_the_private_flag_of_support_is_there() -> None:
    assert transformers.LlamaForCausalLM._supports_flash_attn is True
    assert transformers.DebertaV2ForSequenceClassification._supports_flash_attn is False
