"""Values of meta tensors that follow from the batch: known where every argument is, forgotten where one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, MixtralConfig
from transformers import __version__ as transformers_version

from hf_memopt import estimate
from hf_memopt.memory.cuda import CudaSemantics
from hf_memopt.memory.recording.step import recording
from hf_memopt.memory.settings import NotEstimableError
from hf_memopt.memory.tracking import StorageTracker

VERSION = tuple(int(part) for part in transformers_version.split(".")[:2])
TINY = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


def _ids() -> torch.Tensor:
    tensor: Any = torch.empty((2, 3), dtype=torch.int64, device="meta")
    tensor.known_values = torch.tensor([[5, 0, 7], [5, 9, 0]])
    found: torch.Tensor = tensor
    return found


@pytest.mark.parametrize(
    "asks",
    [
        lambda ids, hidden: (ids == 5).sum().item(),
        lambda ids, hidden: ids.max(dim=1).values.tolist(),
        lambda ids, hidden: (ids != 0).nonzero().shape,
        lambda ids, hidden: hidden[ids != 0].shape,
        lambda ids, hidden: ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100).cpu().tolist(),
        lambda ids, hidden: torch.repeat_interleave(ids[0], ids[0]).shape,
        lambda ids, hidden: bool((ids.clone().add_(torch.arange(3, device=ids.device)) > 9).any()),
    ],
)
def test_what_follows_from_the_batch_is_as_on_the_host(asks: Callable[[Any, Any], Any]) -> None:
    ids, tracker = _ids(), StorageTracker()
    tracker.know([ids])
    with recording(tracker):
        found = asks(ids, torch.empty(2, 3, 4, device="meta"))
    assert found == asks(ids.known_values, torch.empty(2, 3, 4))  # type: ignore[attr-defined]


def test_what_something_unknown_is_written_to_is_unknown() -> None:
    ids, tracker = _ids(), StorageTracker()
    tracker.know([ids])
    with recording(tracker):
        ids[0].copy_(torch.empty(3, device="meta"))
        largest = ids.max()
        with pytest.raises(NotEstimableError):
            largest.item()


def test_experts_that_stay_as_they_are_stand_in_the_notes() -> None:
    settings = {"lora": 4, "load_in": "nf4", "precision": "bf16", "gpu": "RTX 3090"}
    notes = " ".join(estimate(MixtralConfig(**TINY), batch_size=1, seq_len=8, **settings).notes)
    assert "of weights are not quantised: mlp.experts.gate_up_proj, mlp.experts.down_proj" in notes


def routed(kind: str) -> Any:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "d_model": 64,
        "d_ff": 64,
        "num_layers": 2,
        "d_kv": 16,
        "num_heads": 4,
    }
    experts = {"num_experts": 4, "num_local_experts": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    layers = dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2)
    jetmoe = {"num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 64}
    sparse = {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_sparse_encoder_layers": 1}
    nllb = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, **sparse}
    own = {"jetmoe": jetmoe, "nllb-moe": nllb, "switch_transformers": sparse}
    return AutoConfig.for_model(kind, **sizes, **experts, **layers, **own[kind])


@pytest.mark.parametrize("kind", ["jetmoe", "nllb-moe", "switch_transformers"])
@pytest.mark.parametrize("way", [{}, {"eval_batch_size": 2}, {"lora": 4}])
def test_each_expert_is_assumed_to_get_as_many_tokens(kind: str, way: dict[str, Any]) -> None:
    """Their code reads which experts a router chose; one of them has its experts' numbers in a text."""
    found = estimate(routed(kind), batch_size=2, seq_len=10, gpu="RTX 3090", precision="bf16", **way)
    assert "each expert is assumed to get as many tokens as the others" in found.notes


def test_a_balanced_choice_takes_each_expert_equally_often_and_none_twice_for_a_token() -> None:
    scores, tracker = torch.empty(4, 6, device="meta"), StorageTracker(balanced=True)
    with recording(tracker, CudaSemantics(tracker=tracker)):
        chosen = scores.topk(3, dim=-1).indices
        assert chosen.flatten().bincount(minlength=6).tolist() == [2] * 6
        assert all(len({*row}) == 3 for row in chosen.tolist())
        assert scores.argmax(dim=-1).tolist() == scores.max(dim=1).indices.tolist() == [0, 1, 2, 3]
        assert f"expert_{scores.argmax(dim=-1)[2]}" == "expert_2"
        for unknown in (scores.argmax(dim=0), scores.argmax(), scores.long().argmax(dim=-1)):
            with pytest.raises(NotEstimableError):
                unknown.flatten()[0].item()


def test_without_experts_a_value_that_is_read_is_refused_once() -> None:
    class Reads(torch.nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 4)

        def forward(self, pixel_values: Any = None, labels: Any = None) -> Any:
            type(self).calls += 1
            return {"loss": self.head(pixel_values).sum() * float(self.head.weight.argmax())}

    with pytest.raises((NotEstimableError, ValueError)):
        estimate(Reads(), batch_size=2, gpu="RTX 3090")
    assert Reads.calls <= 1


@pytest.mark.skipif(VERSION < (5, 23), reason="older code reads how many cells there are")
def test_tokens_of_tables_have_kinds_in_columns() -> None:
    config = AutoConfig.for_model(
        "tapas", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    assert estimate(config, batch_size=2, seq_len=16, gpu="RTX 3090", precision="bf16").total_bytes
