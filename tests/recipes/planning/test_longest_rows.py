"""Plans for the longest rows: tiles and offloaded inputs, the host's memory, and what is written."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from hf_memopt import Plan, custom_gpu, estimate, plan
from hf_memopt.units import parse_bytes


def planned(model: Any = None, **options: Any) -> Plan:
    gpu = custom_gpu("1GiB", "8.6")
    assert gpu.context_bytes is not None
    gpu = custom_gpu(parse_bytes("300MiB") + gpu.context_bytes, "8.6", name="a GPU with 300 MiB")
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = model or tiny.llama_config(**sizes, vocab_size=500, max_position_embeddings=100_000)
    return plan(model, gpu=gpu, **{"goal": "longest", "effective_batch_size": 1, "host_memory": "1TB", **options})


def test_tiles_make_rows_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(method="full")
    one = found.chosen
    assert one is not None
    assert one.recipe.tiled
    assert one.recipe.offload
    assert found.allow == one.consents == ()
    again = estimate(tiny_of(found), recipe=one.recipe, batch_size=1, seq_len=one.seq_len, gpu=found.gpu)
    assert again.total_bytes == one.total_bytes
    script = found.script()
    assert script is not None
    assert "hf_memopt.TiledLayersCallback()" in script
    monkeypatch.setattr("hf_memopt.recipes.planning.planner.can_tile", lambda *_: False)
    plain = planned(method="full").chosen
    assert plain is not None
    assert (one.seq_len or 0) > 1.3 * (plain.seq_len or 0)


def tiny_of(found: Plan) -> Any:
    assert found.simulation is not None
    return found.simulation.model


def test_the_host_holds_the_inputs_of_layers() -> None:
    """In page-locked memory, a power of two for each layer; less memory makes rows shorter."""
    found = planned(method="full").chosen
    assert found is not None
    settings = {"batch_size": 1, "precision": "fp32", "checkpointing": {"offload": True}}
    model = tiny.llama_config(max_position_embeddings=4096)
    host_bytes = [estimate(model, seq_len=tokens, **settings).host_bytes for tokens in (1024, 1032, 2048)]
    assert 2 * host_bytes[0] == host_bytes[1] == host_bytes[2] > 0
    less = planned(method="full", host_memory=found.host_bytes // 3)
    assert less.chosen is not None
    assert not less.chosen.recipe.offload or less.chosen.host_bytes <= found.host_bytes // 3
    assert (less.chosen.seq_len or 0) < (found.seq_len or 0)
    enough = planned(method="full", host_memory=2 * found.host_bytes)
    assert any("of host memory are used, as given" in note for note in enough.notes)


def test_dropout_within_mlps_leaves_tiles_out() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=8192)
    for dropout in (0.1, 0.0):
        config.resid_pdrop = dropout
        found = planned(config, method="full")
        assert found.simulation is not None
        assert found.simulation.facts.tiles is (dropout == 0)


@pytest.mark.parametrize(("tokens", "is_considered"), [(2048, False), (4096, True)])
def test_other_goals_consider_tiles_for_long_rows(tokens: int, is_considered: bool) -> None:
    found = planned(goal="memory", method="full", seq_len=tokens)
    assert any(one.recipe.tiled for one in found.candidates) is is_considered
