"""Every well-known name plans without further options, one of each architecture: a plan, or what would fit."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from hf_memopt import plan
from hf_memopt.memory.models import known_models

NAMES = {facts["model_type"]: name for name, facts in reversed(known_models().items())}
"""The first name of each architecture."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES.values())
def test_a_name_plans_without_further_options(name: str) -> None:
    found = plan(name, gpu="RTX 4090")
    assert (found.chosen is None) == (found.shortfall is not None and found.shortfall.lacks_bytes > 0)
    assert all(one.total_bytes > 0 for one in found.candidates)


def test_the_default_length_of_a_model_that_takes_tokens_one_by_one() -> None:
    """Of 512 tokens a plan of the smallest Mamba takes minutes."""
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=3)
    assert "seq_len=64 by default; better that of your rows: lengths, or --data FILE" in plan(config, gpu="T4").notes


def test_what_cannot_be_simulated_for_one_reason_is_one_note() -> None:
    found = plan("sentence-transformers/all-mpnet-base-v2", gpu="T4", method="full")
    (note,) = [note for note in found.notes if "not simulated" in note]
    assert note.endswith(
        " were not simulated: MPNetForSequenceClassification does not support activation checkpointing"
    )


def test_what_is_trained_with_pictures_is_evaluated_by_its_loss() -> None:
    """Logits of all words for eight examples would decide whether it fits."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    text = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=63, image_token_id=63)
    chosen = plan(config, gpu="T4", seq_len=32, effective_batch_size=1, method="full").chosen
    assert chosen is not None
    assert (chosen.recipe.prediction_loss_only, chosen.recipe.per_device_eval_batch_size) == (True, 1)
    assert chosen.recipe.fused_cross_entropy
