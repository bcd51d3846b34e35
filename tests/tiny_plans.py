"""Two plans of tiny language models, made once for all tests of a process: one that fits and one that does not."""

from __future__ import annotations

from functools import cache
from typing import Any

import tiny
from hf_memopt import Plan, custom_gpu, plan
from hf_memopt.units import parse_bytes

LENGTHS = [64] * 20 + [40] * 10 + [8] * 70


def config(hidden_size: int, layers: int, vocab_size: int) -> Any:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return tiny.llama_config(**sizes, **heads, vocab_size=vocab_size, max_position_embeddings=128)


def _planned(model: Any, memory: str, **options: Any) -> Plan:
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    assert context_bytes is not None
    gpu = custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=f"a GPU with {memory}")
    return plan(model, gpu=gpu, method="full", effective_batch_size=4, **options)


@cache
def fitting_plan() -> Plan:
    return _planned(config(256, 2, 4000), "120MiB", lengths=LENGTHS)


@cache
def missing_plan() -> Plan:
    return _planned(config(64, 1, 500), "12MiB", seq_len=64)
