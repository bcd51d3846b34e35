"""What settings of a step change in an estimate: hand-written loops, losses without logits, kernels, experts."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import transformers
from recorded import OptimizerMemory, uncounted
from slow_cases import slow_except
from transformers import AutoConfig

import tiny
from hf_memopt import estimate
from tests.memory.small_configs import CONFIGS

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def test_a_hand_written_loop_is_named_and_recorded_apart() -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 32, "precision": "fp32"}
    trainer, manual, function = (estimate("gpt2", **sizes, loop=loop) for loop in ("trainer", "manual", "function"))
    logits = 2 * 32 * 50257 * 4
    assert manual.phases["forward"].allocated_bytes - trainer.phases["forward"].allocated_bytes >= logits  # held
    assert "hand-written loop" in str(manual)
    assert function.phases["forward"].allocated_bytes < manual.phases["forward"].allocated_bytes
    assert function.phases["optimizer"].allocated_bytes == manual.phases["optimizer"].allocated_bytes
    assert "hand-written step function" in str(function)
    assert estimate("gpt2", **sizes).peak_allocated_bytes == trainer.peak_allocated_bytes


def test_own_optimizer_replaces_optim() -> None:
    def one_average(parameters: Any) -> OptimizerMemory:
        return OptimizerMemory(tuple(fact.size_bytes for fact in parameters), 0, (), ())

    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "precision": "fp32", "max_grad_norm": 0}
    own = estimate("gpt2", **settings, optimizer_memory=one_average)
    released = estimate("gpt2", **settings, optimizer_memory=one_average, gradient_release=True)
    assert own.components["optimizer state"] == pytest.approx(own.components["weights"], rel=0.02)
    assert released.peak_allocated_bytes < own.peak_allocated_bytes
    assert "one_average" in str(own)


def tied_llama(**changed: Any) -> transformers.LlamaConfig:
    return tiny.llama_config(num_hidden_layers=8, vocab_size=4000, **{"tie_word_embeddings": True, **changed})


def found(**settings: Any) -> Any:
    return estimate(tied_llama(), batch_size=2, seq_len=32, gpu="RTX 3060 12GB", precision="fp32", **settings)


def test_losses_without_logits_are_recorded_apart_and_counted_as_logits_and_loss() -> None:
    """A chunk of 64 MiB holds all logits here: one tensor is logits, softmax and gradient in turn."""
    both = {"sparse_tied_embedding": True, "fused_cross_entropy": True}
    settings: list[dict[str, Any]] = [{}, {"sparse_tied_embedding": True}, {"fused_cross_entropy": True}, both, {}]
    released = {"gradient_release": True, "max_grad_norm": 0, "checkpointing": True}
    stock, tied, fused, least, again = (found(**released, **one).peak_allocated_bytes for one in settings)
    assert stock == again
    assert len({stock, tied, fused, least}) == 4
    assert least <= stock - 4000 * 32 * 4
    with_logits, without = (int(found(**settings[i]).timeline.components[:, 4].max()) for i in (1, 3))
    assert 2 * 32 * 4000 * 4 <= without <= with_logits / 2


def test_an_evaluation_makes_logits_unless_it_keeps_the_loss_alone() -> None:
    settings = {"fused_cross_entropy": True, "eval_batch_size": 400}
    alone, kept = (found(**settings, prediction_loss_only=only).phases["evaluation"] for only in (True, False))
    stock = found(eval_batch_size=400).phases["evaluation"]
    assert kept.components == stock.components
    assert kept.components["logits and loss"] >= 2 * 400 * 32 * 4000 * 4
    assert alone.components["logits and loss"] <= 3 * 64 * 2**20  # of a chunk: logits and their softmax, not kept


def test_padding_costs_flash_attention_2_what_is_gathered_and_scattered() -> None:
    sizes = {"batch_size": 4, "seq_len": 64, "precision": "bf16", "attn_implementation": "flash_attention_2"}
    padded, full = (estimate(tiny.llama_config(), **sizes, padding=padding) for padding in (True, False))
    assert estimate(tiny.llama_config(), **sizes).components == padded.components
    alone = {**sizes, "batch_size": 1}  # a row alone has none
    expected = estimate(tiny.llama_config(), **alone, padding=False).components
    assert estimate(tiny.llama_config(), **alone).components == expected
    tokens, hidden, layers = 4 * 64, 32, 2
    more_bytes = padded.components["activations"] - full.components["activations"]
    assert more_bytes == layers * (tokens * hidden * 2 + tokens * 8)  # the scattered output, the indices of tokens
    torchs = estimate(tiny.llama_config(), **{**sizes, "attn_implementation": "sdpa"}, padding=False)
    assert torchs.components == full.components  # its kernel is the same one


SET_UPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"attn_implementation": "eager", "checkpointing": True, "label_smoothing_factor": 0.1},
    "T4": {"gpu": "T4", "precision": "fp16", "micro_batch_size": 1, "eval_batch_size": 2},
    "H100": {"gpu": "H100", "precision": "bf16"},
    "4 bits": {"lora": 4, "load_in": "nf4"},
    "8 bits": {"lora": 4, "load_in": "int8"},
}


KERNELS = [*product(("llama",), SET_UPS), ("vit", "plain")]


@pytest.mark.parametrize(("name", "set_up"), slow_except(KERNELS, product(CONFIGS, SET_UPS)))
def test_what_every_kernel_allocates_is_known(name: str, set_up: str) -> None:
    """Otherwise read the operator's source: a rule in kernel_buffers.py, or a line of no_buffers.csv."""
    assert uncounted(CONFIGS[name](), **SET_UPS[set_up], **({} if name == "vit" else {"seq_len": 24})) == []


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4}


def routed(kind: str) -> Any:
    sizes = {**dict.fromkeys(("vocab_size", "hidden_size", "d_model", "d_ff"), 64), "num_layers": 2}
    sizes |= {"d_kv": 16, "num_heads": 4}
    experts = {"num_experts": 4, "num_local_experts": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    layers = dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2)
    jetmoe = {"num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 64}
    sparse = {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_sparse_encoder_layers": 1}
    nllb = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **sparse}
    own = {"jetmoe": jetmoe, "nllb-moe": nllb, "switch_transformers": sparse}
    return AutoConfig.for_model(kind, **sizes, **experts, **layers, **own[kind])


@pytest.mark.parametrize("kind", ["jetmoe", "nllb-moe", "switch_transformers"])
@pytest.mark.parametrize("way", slow_except([{}], [{}, {"eval_batch_size": 2}, {"lora": 4}]))
def test_each_expert_is_assumed_to_get_as_many_tokens(kind: str, way: dict[str, Any]) -> None:
    """Their code reads which experts a router chose; one of them has its experts' numbers in a text."""
    found = estimate(routed(kind), batch_size=2, seq_len=10, gpu="RTX 3090", precision="bf16", **way)
    assert "each expert is assumed to get as many tokens as the others" in found.notes


@pytest.mark.skipif(VERSION < (5, 23), reason="older code reads how many cells there are")
def test_tokens_of_tables_have_kinds_in_columns() -> None:
    config = AutoConfig.for_model(
        "tapas", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    assert estimate(config, batch_size=2, seq_len=16, gpu="RTX 3090", precision="bf16").total_bytes
