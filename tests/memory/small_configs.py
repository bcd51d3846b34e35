"""Configurations of small models, of one architecture each."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from transformers import PretrainedConfig

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
POSITIONS = {"max_position_embeddings": 64}
ODD = {"vocab_size": 1999, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
"""An odd number of tokens: a shard is padded."""
ODD_LLAMA, ODD_BERT = {**ODD, "intermediate_size": 352, "num_key_value_heads": 2}, {**ODD, "intermediate_size": 512}
WIDE_LLAMA = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 4}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "bert": lambda: transformers.BertConfig(**SMALL, **POSITIONS, num_hidden_layers=9),
    "llama": lambda: transformers.LlamaConfig(
        **SMALL, **POSITIONS, num_hidden_layers=8, num_key_value_heads=1, attention_dropout=0.1
    ),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=7, n_head=2),
    "t5": lambda: transformers.T5Config(
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=9,
        num_decoder_layers=8,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=7,
        decoder_layers=8,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    ),
    "deberta": lambda: transformers.DebertaV2Config(
        **SMALL,
        **POSITIONS,
        num_hidden_layers=8,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
    ),
    # sliding and full attention in turn: one period of layers is a unit
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL,
        **POSITIONS,
        num_hidden_layers=16,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 8,
    ),
    "vit": lambda: transformers.ViTConfig(
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        num_hidden_layers=8,
        image_size=32,
        patch_size=8,
        architectures=["ViTForImageClassification"],
    ),
}
