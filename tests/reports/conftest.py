"""Two plans of a tiny language model, one that fits and one that does not, and their JSON."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from hf_memopt import Plan, custom_gpu, plan
from hf_memopt.units import parse_bytes

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4000}
LENGTHS = [64] * 20 + [40] * 10 + [8] * 70


def planned(memory: str, **options: Any) -> Plan:
    config = tiny.llama_config(
        **SIZES, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128
    )
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    assert context_bytes is not None
    gpu = custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=f"a GPU with {memory}")
    return plan(config, gpu=gpu, method="full", effective_batch_size=4, **options)


@pytest.fixture(scope="session")
def found() -> Plan:
    return planned("80MiB", lengths=LENGTHS)


@pytest.fixture(scope="session")
def short() -> Plan:
    return planned("14MiB", seq_len=64)


@pytest.fixture(scope="session")
def text(found: Plan) -> str:
    return found.to_json()
