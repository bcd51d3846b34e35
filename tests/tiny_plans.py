"""Plans of tiny language models on GPUs of a few MiB; two of them are made once for all tests of a process."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tiny
from hf_memopt import Plan, plan
from hf_memopt.gpus import Gpu, custom_gpu
from hf_memopt.units import parse_bytes

LENGTHS = [64] * 20 + [40] * 10 + [8] * 70


def config(hidden_size: int = 256, layers: int = 2, vocab_size: int = 4000, positions: int = 128) -> Any:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return tiny.llama_config(**sizes, **heads, vocab_size=vocab_size, max_position_embeddings=positions)


def gpu_of(memory: str, name: str = "") -> Gpu:
    """Return a GPU with so much for torch's allocator, beside CUDA's context."""
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes or 0
    return custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=name or f"a GPU with {memory}")


def planned(memory: str, model: Any = None, *, name: str = "", **options: Any) -> Plan:
    """Return a plan of a tiny Llama, or of another model, for a GPU with so much beside the context."""
    given = {"seq_len": 64, "effective_batch_size": 2, **options}
    return plan(model or config(layers=given.pop("layers", 2), positions=256), gpu=gpu_of(memory, name), **given)


def shown(found: Plan) -> list[Any]:
    """Return the candidates that the table of a plan shows."""
    return [found.candidates[place] for place in json.loads(found.to_json())["shown"]]


def is_easy(one: Any) -> bool:
    """Return whether a candidate leaves 8 % of the GPU and has nothing in host memory."""
    on_host = any(word in one.name for word in ("paged", "on the host", "offload", "streamed"))
    return one.fits and one.spare_bytes >= 0.08 * one.usable_bytes and not on_host


@cache
def fitting_plan() -> Plan:
    return planned("120MiB", config(), method="full", effective_batch_size=4, seq_len=None, lengths=LENGTHS)


@cache
def missing_plan() -> Plan:
    return planned("12MiB", config(64, 1, 500), method="full", effective_batch_size=4)
