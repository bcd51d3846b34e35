"""Pictures, sounds and experts with adapters: a step on the meta device against the same step on real memory.

The batch is the estimate's own; on the host it has the values that the recording knows, and random pixels and samples.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from host_semantics import HostSemantics

from hf_memopt.binding.model_changes import add_adapters
from hf_memopt.memory.models import example_batch
from hf_memopt.memory.recording.sessions import _prepared
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker

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
KINDS: dict[str, tuple[str, str, dict[str, Any], int | None, dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", QWEN, 48, {"image_size": 112}),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {**LLAVA, "vision_config": {**EYES, "patch_size": 8, "model_type": "clip_vision_model"}},
        64,
        {"images": 2},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", WAV2VEC2, None, {"audio_seconds": 1}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 1, 2, 2], "image_size": 64},
        None,
        {},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, "projection_dim": 16}, "vision_config": {**EYES, "patch_size": 8}},
        24,
        {},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_local_experts": 4},
        24,
        {"lora": 4},
    ),
}


def record(kind: str, device: str) -> StorageTracker:
    head, config, options, seq_len, settings = KINDS[kind]
    step = StepSettings(precision="fp32", **settings)
    torch.manual_seed(0)
    random.seed(0)
    configuration = getattr(transformers, config)(**options)
    configuration._attn_implementation = "eager"
    with torch.device(device):
        model: Any = getattr(transformers, head)(configuration).train()
    with torch.device("meta"):
        twin = getattr(transformers, head)(configuration).train()
    batch = example_batch(twin, batch_size=2, seq_len=seq_len, settings=step)
    if kind == "mixtral":
        model.set_experts_implementation("batched_mm")  # the grouped product of float32 is not on meta
    if device == "meta":
        model = _prepared(model, step)
    elif step.lora is not None:
        model = add_adapters(model, step.lora)
    if device == "cpu":
        batch = {name: _real(value) for name, value in batch.items()}
    tracker = StorageTracker(device_type=device)
    semantics = HostSemantics(tracker=tracker)
    semantics._handlers[torch.tensor] = semantics._tensor
    record_step(model, batch, step, tracker=tracker, semantics=semantics)
    return tracker


def _real(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.known_values.clone() if hasattr(value, "known_values") else torch.rand(value.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_meta_is_the_real_one(kind: str) -> None:
    real, meta = record(kind, "cpu"), record(kind, "meta")
    peaks = []
    for tracker in (real, meta):
        held = peak = 0
        for _, delta in tracker.events:
            held += delta
            peak = max(peak, held)
        peaks.append(peak)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.0005)
