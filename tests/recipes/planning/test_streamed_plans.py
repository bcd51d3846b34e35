"""Plans whose layers wait in host memory: where nothing else fits, with what the host has, and what is written."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from hf_memopt import Plan, custom_gpu, plan
from hf_memopt.devices.readings import read_memory
from hf_memopt.units import parse_bytes


def planned(memory: str, **options: Any) -> Plan:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    context_bytes = custom_gpu("1GiB", "8.6").context_bytes
    assert context_bytes is not None
    gpu = custom_gpu(parse_bytes(memory) + context_bytes, "8.6", name=f"a GPU with {memory}")
    model = tiny.llama_config(**sizes, **heads, max_position_embeddings=128)
    return plan(model, gpu=gpu, seq_len=64, effective_batch_size=2, **{"method": "full", **options})


def test_layers_wait_on_the_host_where_nothing_else_fits() -> None:
    found = planned("56MiB", host_memory="1GB")
    one = found.chosen
    assert one is not None
    assert one.recipe.streamed
    assert not any(other.fits for other in found.candidates if not other.recipe.streamed)
    assert 60e6 < one.host_bytes < 1e8  # 10 bytes of 6.3 M parameters, with 8-bit state
    assert "nothing fits without host memory, of which this takes" in one.reason
    assert "copies hide from" in one.reason
    assert any("of 953.7 MiB of host memory are used, as given" in note for note in found.notes)
    script = found.script()
    assert script is not None
    assert script.index("hf_memopt.stream_layers(model") < script.index("transformers.Trainer(")
    assert "hf_memopt.StreamedLayersCallback(" in script
    assert "MicrobatchCallback" not in script


def test_too_little_host_memory_is_said() -> None:
    found = planned("56MiB", host_memory="50MB")
    assert found.chosen is None
    assert any("of host memory, and there are 47.7 MiB, as given" in note for note in found.notes)
    assert found.shortfall is not None
    assert not found.shortfall.nearest.recipe.streamed


@pytest.mark.parametrize(
    ("memory", "options"),
    [("56MiB", {"host_memory": 0}), ("1GiB", {"host_memory": "1TB"}), ("56MiB", {"world_size": 2})],
)
def test_it_is_not_looked_for_where_it_is_not_needed_or_refused(memory: str, options: dict[str, Any]) -> None:
    assert not any(one.recipe.streamed for one in planned(memory, **options).candidates)


def test_the_memory_of_this_machine_is_the_default() -> None:
    found = planned("56MiB")
    assert found.simulation is not None
    assert found.simulation.host_memory_bytes == read_memory("cpu").host_total_bytes
    assert any("this machine's; host_memory= plans for another" in note for note in found.notes)


def test_a_wrong_amount_is_refused() -> None:
    with pytest.raises(ValueError, match="host_memory='much'"):
        planned("56MiB", host_memory="much")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpu", "options", "host_gib"),
    [
        ("Llama-3.1-8B", "RTX 4060", {"effective_batch_size": 8, "host_memory": "48GB"}, 32),
        ("Qwen2.5-14B", "RTX 4060 Ti 16GB", {"effective_batch_size": 16, "host_memory": "64GiB"}, 58),
        ("Llama-3.1-70B", "RTX 4090", {"method": "qlora", "allow": (), "host_memory": "64GB"}, 33),
    ],
)
def test_models_larger_than_the_gpu(model: str, gpu: str, options: dict[str, Any], host_gib: int) -> None:
    full = {"method": "full", "allow": ("release_clipping", "bf16_weights"), "seq_len": 512}
    found = plan(model, gpu=gpu, **{**full, **options})
    assert found.chosen is not None
    assert found.chosen.verdict == "fits"
    assert found.chosen.host_bytes == pytest.approx(host_gib * 2**30, rel=0.02)
