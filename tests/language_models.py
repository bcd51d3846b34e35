"""Tiny language models of every family that the fused cross entropy is tested on, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

VOCABULARY = 499
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MIDDLE = {**SIZES, "intermediate_size": 64}
GROUPED = {**MIDDLE, "num_key_value_heads": 2}
ENCODER = {**MIDDLE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64}
SEQ2SEQ |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 64, "dropout": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _build(kind: str, config: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(T, kind)(getattr(T, config)(**settings))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _build("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "llama-tied": _build("LlamaForCausalLM", "LlamaConfig", **GROUPED, tie_word_embeddings=True),
    "qwen3": _build("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=16),
    "gemma2": _build("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=16, final_logit_softcapping=20.0),
    "gemma3": _build("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=16, final_logit_softcapping=20.0),
    "cohere": _build("CohereForCausalLM", "CohereConfig", **GROUPED, logit_scale=0.25),
    "granite": _build("GraniteForCausalLM", "GraniteConfig", **GROUPED, logits_scaling=3.0),
    "gpt2": _build("GPT2LMHeadModel", "GPT2Config", **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt-neox": _build("GPTNeoXForCausalLM", "GPTNeoXConfig", **MIDDLE),
    "opt": _build("OPTForCausalLM", "OPTConfig", **SIZES, **OPT),
    "phi": _build("PhiForCausalLM", "PhiConfig", **MIDDLE),
    "mistral": _build("MistralForCausalLM", "MistralConfig", **GROUPED),
    # float64 has no grouped matrix product
    "mixtral": _build("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=2, output_router_logits=True),
    "bert": _build("BertForMaskedLM", "BertConfig", **ENCODER),
    "roberta": _build("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    "modernbert": _build("ModernBertForMaskedLM", "ModernBertConfig", **MIDDLE, pad_token_id=0),
    "t5": _build("T5ForConditionalGeneration", "T5Config", **T5, dropout_rate=0.0, decoder_start_token_id=0),
    "bart": _build("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ, **SPECIAL),
    "whisper": _build(
        "WhisperForConditionalGeneration", "WhisperConfig", **SEQ2SEQ, **SPECIAL, max_source_positions=24
    ),
}
ENCODERS = ("bert", "roberta", "modernbert")
FEW = ("llama-tied", "gemma2", "bert", "t5", "whisper")
"""Families that differ in what happens between head and loss, for the default run."""
LOW = ("autocast bfloat16", "autocast float16", "bfloat16")
"""Precisions of 16 bits."""


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return the model of a family in training mode, weights drawn from one seed."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().train()
    if family == "mixtral":
        model.set_experts_implementation("eager")
    if family == "bart":
        model.final_logits_bias.normal_()
    return model.to(dtype)


def batch(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Return 3 rows of 24 tokens, or of sound; 15 % of the labels count for an encoder, two thirds for the others."""
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(3, VOCABULARY, (3, 24), generator=generator)
    share = 0.15 if family in ENCODERS else 0.67
    ignored = torch.rand(ids.shape, generator=generator) > share
    labels = ids.masked_fill(ignored, -100)
    labels[0, 1:3] = ids[0, 1:3]
    if family == "whisper":
        return {"input_features": torch.randn(3, 80, 48, generator=generator).to(dtype), "labels": labels}
    return {"input_ids": ids, "labels": labels}


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter in float64."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients over their norm."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return float((difference / sum(float(each.square().sum()) for each in expected.values())) ** 0.5)
