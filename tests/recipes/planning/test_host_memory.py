"""Plans that use the host's memory: streamed layers, and for the longest rows tiles and offloaded inputs."""

from __future__ import annotations

from functools import cache
from typing import Any

import psutil
import pytest
import transformers
from slow_cases import slow_except
from tiny_plans import gpu_of

import tiny
from hf_memopt import Plan, estimate, plan

# ---- Streamed layers


def streamed(memory: str, **options: Any) -> Plan:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 500}
    model = tiny.llama_config(**sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128)
    given = {"method": "full", "seq_len": 64, "effective_batch_size": 2, **options}
    return plan(model, gpu=gpu_of(memory), **given)


@pytest.mark.slow
def test_layers_wait_on_the_host_where_nothing_else_fits() -> None:
    """In the memory of this machine, unless another is given."""
    found = streamed("56MiB")
    one = found.chosen
    assert one.recipe.streamed
    assert not any(other.fits for other in found.candidates if not other.recipe.streamed)
    assert 60e6 < one.host_bytes < 1e8  # 10 bytes of 6.3 M parameters, with 8-bit state
    assert "nothing fits on the GPU alone: " in one.reason
    assert " layers wait in " in one.reason
    assert found.simulation.host_memory_bytes <= psutil.virtual_memory().total
    assert any("this machine's; host_memory='64GiB' plans for another" in note for note in found.notes)
    script = found.script() or ""
    assert 0 < script.index("hf_memopt.stream_layers(model") < script.index("transformers.Trainer(")
    assert "hf_memopt.StreamedLayersCallback(" in script
    assert "MicrobatchCallback" not in script


def test_as_many_layers_stay_as_fit() -> None:
    """One more would not, and without them a step is longer."""
    found = streamed("75MiB")
    one = found.chosen
    resident = one.recipe.resident
    assert 0 < resident < 6
    assert one.fits
    assert (one.recipe.streamed, one.recipe.checkpointing) == (True, True)
    more = one.recipe.replace(resident=resident + 1)
    assert found.simulation.spare_bytes(more, one.seq_len) < 0 <= found.simulation.spare_bytes(one.recipe, one.seq_len)
    [without] = [
        other
        for other in found.candidates
        if (other.rows, other.recipe.optim, other.recipe.precision, other.recipe.resident)
        == (one.rows, one.recipe.optim, one.recipe.precision, 0)
        if other.recipe.streamed and not other.recipe.embeddings_on_host
    ]
    assert one.cost < without.cost
    assert f"{6 - resident} of 6 layers streamed" in one.name
    assert f"on the GPU alone: {6 - resident} of 6 layers wait in " in one.reason
    assert " of RAM, which costs " in one.reason
    assert one.waiting_seconds < without.waiting_seconds
    script = found.script() or ""
    assert f"hf_memopt.stream_layers(model, resident={resident})" in script
    assert f"hf_memopt.StreamedLayersCallback(resident={resident})" in script


@pytest.mark.slow
def test_too_little_host_memory_is_said() -> None:
    found = streamed("56MiB", host_memory="50MB")
    assert found.chosen is None
    assert any("of host memory; there is 47.7 MiB, as given" in note for note in found.notes)
    assert not found.shortfall.nearest.recipe.streamed


@pytest.mark.slow
def test_optimizer_state_waits_on_the_host_on_every_system() -> None:
    found = plan("Llama-3.2-1B", gpu="RTX 4060 Ti 16GB", method="full", host_memory="64GB", os="windows", seq_len=512)
    assert found.chosen.name == "full, bf16, 8-bit AdamW state on the host, checkpointing"
    assert 4e9 < found.chosen.host_bytes < 4.1e9  # 2 bytes a parameter, and 8 of the embedding
    assert "\n        hf_memopt.OptimizerStateOnHostCallback(),  # " in found.script()
    little = plan("Llama-3.2-1B", gpu="RTX 4060 Ti 16GB", method="full", host_memory="2GB", os="windows", seq_len=512)
    assert not any(one.fits and one.recipe.optimizer_state_on_host for one in little.candidates)


NOT_WANTED = [("56MiB", {"host_memory": 0}), ("1GiB", {"host_memory": "1TB"})]


@pytest.mark.parametrize(("memory", "options"), slow_except(NOT_WANTED[:1], NOT_WANTED))
def test_it_is_not_looked_for_where_it_is_not_needed_or_refused(memory: str, options: dict[str, Any]) -> None:
    assert not any(one.recipe.streamed for one in streamed(memory, **options).candidates)


LARGE = [
    ("Llama-3.1-8B", "RTX 4060", {"effective_batch_size": 8, "host_memory": "48GB"}, 32),
    ("Qwen2.5-14B", "RTX 4060 Ti 16GB", {"effective_batch_size": 16, "host_memory": "64GiB"}, 58),
    ("Llama-3.1-70B", "RTX 4090", {"method": "qlora", "allow": (), "host_memory": "64GB"}, 33),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "options", "host_gib"), LARGE)
def test_models_larger_than_the_gpu(model: str, gpu: str, options: dict[str, Any], host_gib: int) -> None:
    full = {"method": "full", "allow": ("release_clipping", "bf16_weights"), "seq_len": 512}
    found = plan(model, gpu=gpu, **{**full, **options})
    assert found.chosen.verdict == "fits"
    assert found.chosen.host_bytes == pytest.approx(host_gib * 2**30, rel=0.02)


# ---- The longest rows


def longest(model: Any = None, **options: Any) -> Plan:
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = model or tiny.llama_config(**sizes, vocab_size=500, max_position_embeddings=100_000)
    given = {"goal": "longest", "effective_batch_size": 1, "host_memory": "1TB", "method": "full", **options}
    return plan(model, gpu=gpu_of("300MiB"), **given)


@cache
def roomy() -> Plan:
    return longest()


@pytest.mark.skipif(tiny.IS_BEFORE_5_17, reason="transformers before 5.17 does not offload")
@pytest.mark.slow
def test_tiles_make_rows_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = roomy()
    one = found.chosen
    assert (one.recipe.tiled, one.recipe.offload) == (True, True)
    assert found.allow == one.consents == ()
    asked = {"batch_size": 1, "seq_len": one.seq_len, "gpu": found.gpu}
    assert estimate(found.simulation.model, recipe=one.recipe, **asked).total_bytes == one.total_bytes
    assert "hf_memopt.TiledLayersCallback()" in str(found.script())
    monkeypatch.setattr("hf_memopt.prediction.recipes.planning.planner.can_tile", lambda *_: False)
    plain = longest().chosen
    assert one.seq_len > 1.3 * plain.seq_len


@pytest.mark.skipif(tiny.IS_BEFORE_5_17, reason="transformers before 5.17 does not offload")
def test_the_host_holds_the_inputs_of_layers() -> None:
    """In page-locked memory, a power of two for each layer."""
    settings = {"batch_size": 1, "precision": "fp32", "checkpointing": {"offload": True}}
    model = tiny.llama_config(max_position_embeddings=4096)
    host_bytes = [estimate(model, seq_len=tokens, **settings).host_bytes for tokens in (1024, 1032, 2048)]
    assert 2 * host_bytes[0] == host_bytes[1] == host_bytes[2] > 0


@pytest.mark.slow
def test_less_host_memory_makes_rows_shorter() -> None:
    found = roomy().chosen
    less = longest(host_memory=found.host_bytes // 3).chosen
    assert not less.recipe.offload or less.host_bytes <= found.host_bytes // 3
    assert less.seq_len < found.seq_len
    enough = longest(host_memory=2 * found.host_bytes)
    assert any(note.startswith("uses ") and "of host memory, as given" in note for note in enough.notes)


@pytest.mark.slow
def test_dropout_within_mlps_leaves_tiles_out() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=8192)
    for dropout in (0.1, 0.0):
        config.resid_pdrop = dropout
        found = longest(config)
        assert found.simulation.facts.tiles is (dropout == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "is_considered"), [(2048, False), (4096, True)])
def test_other_goals_consider_tiles_for_long_rows(tokens: int, is_considered: bool) -> None:
    found = longest(goal="memory", seq_len=tokens)
    assert any(one.recipe.tiled for one in found.candidates) is is_considered
