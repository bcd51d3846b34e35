"""Pictures, sounds and experts with adapters: a step on the meta device against the same step on real memory.

The batch is the estimate's own; on the host it has the values that the recording knows, and random pixels and samples.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from recorded import example_batch, peak_bytes, prepared, record

import tiny
from hf_memopt.types import StepSettings

TEXT = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
EYES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}
QWEN = {
    "vision_config": {
        **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32},
        "fullatt_block_indexes": [1],
    },
    "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    **{"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93},
}
LLAVA = {"text_config": {**TEXT, "model_type": "llama"}, "image_token_index": 90}
WAV2VEC2 = {**EYES, "vocab_size": 30, "conv_dim": [16] * 7, "num_feat_extract_layers": 7, "apply_spec_augment": False}
KINDS: dict[str, tuple[str, dict[str, Any], int | None, dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", QWEN, 48, {"image_size": 112}),
    "llava": (
        "LlavaForConditionalGeneration",
        {**LLAVA, "vision_config": {**EYES, "patch_size": 8, "model_type": "clip_vision_model"}},
        64,
        {"images": 2},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", WAV2VEC2, None, {"audio_seconds": 1}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 1, 2, 2], "image_size": 64},
        None,
        {},
    ),
    "clip": (
        "CLIPModel",
        {"text_config": {**TEXT, "projection_dim": 16}, "vision_config": {**EYES, "patch_size": 8}},
        24,
        {},
    ),
    "mixtral": ("MixtralForCausalLM", {**TEXT, "num_local_experts": 4}, 24, {"lora": 4}),
}


def recorded(kind: str, device: str) -> Any:
    name, options, seq_len, given = KINDS[kind]
    settings, head = StepSettings(precision="fp32", **given), getattr(transformers, name)
    torch.manual_seed(0)
    random.seed(0)
    config = head.config_class(**options)
    config._attn_implementation = "eager"
    with torch.device(device):
        model = head(config).train()
    with torch.device("meta"):
        twin = head(config).train()
    batch = example_batch(twin, batch_size=2, seq_len=seq_len, settings=settings)
    if kind == "mixtral":
        model.set_experts_implementation("batched_mm")  # the grouped product of float32 is not on meta
    model = prepared(model, settings)
    if device == "cpu":
        batch = {name: _real(value) for name, value in batch.items()}
    return record(model, batch, settings)


def _real(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.known_values.clone() if hasattr(value, "known_values") else torch.rand(value.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_meta_is_the_real_one(kind: str) -> None:
    if kind == "mixtral" and tiny.IS_BEFORE_5_17:
        pytest.skip("the experts of transformers before 5.17 do not run backward on the meta device")
    real, meta = recorded(kind, "cpu"), recorded(kind, "meta")
    assert peak_bytes(meta) == pytest.approx(peak_bytes(real), rel=0.0005)
