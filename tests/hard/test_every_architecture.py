"""Every model type of transformers whose task ``estimate`` knows: full training, LoRA, and LoRA on 4-bit weights.

Default configurations, cut to four layers. What cannot be estimated stands in ``every_architecture.csv`` with the
reason; a type that is not there and fails, or is there and works, fails the test.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from hf_memopt import estimate
from hf_memopt.prediction.memory.models.loading import _usual_task
from hf_memopt.training.binding.model import HEADS

ALLOWED = Path(__file__).with_name("every_architecture.csv")
UNTRAINABLE = re.compile(r"transformers cannot build|needs \w+, which is not installed")
"""Reasons why stock transformers, as installed, does not train a type either."""
GOALS = {"full": 0.95, "lora": 0.90, "nf4": 0.90}
"""Of the types of text that stock trains."""

LAYERS = 4
COUNTS = {
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"),
    *("num_encoder_layers", "num_decoder_layers", "num_blocks", "encoder_num_hidden_layers"),
}
WIDTHS = {"out_hidden_size", "projection_dim", "output_dim", "text_hidden_size", "output_hidden_size", "mm_hidden_size"}
"""Of what reads pictures, in some default configurations another one than the text model's."""
WITHOUT_TEXT = {"image-classification", "semantic-segmentation", "object-detection", "ctc", "audio-classification"}
WITHOUT_LENGTH = {*WITHOUT_TEXT, "image-text-to-text"}
OTHERS = {*WITHOUT_LENGTH, "speech-seq2seq", "zero-shot-image-classification"}
TASKS_OF_TEXT = [task for task in HEADS if task not in OTHERS]
CONSISTENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "idefics3": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096, "projector_output_dim": 4096}},
    "llava_next": {"vision_config": {"image_size": 336, "patch_size": 14}},
    "llava_onevision": {"vision_config": {"image_size": 384, "patch_size": 14}},
    "longt5": {"decoder_start_token_id": 0},
    "ministral": {"head_dim": 128},
    "mllama": {"vision_config": {"num_hidden_layers": 32}},
    "moonshine": {"pad_token_id": 0},
    "nemotron": {"num_key_value_heads": 8},
    "paligemma": {"projection_dim": 3072, "vision_config": {"projection_dim": 3072}},
    "qwen2_audio": {"ignore_index": -100},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen3_asr": {"audio_config": {"output_dim": 4096}},
    "reformer": {"axial_pos_shape": [8, 8]},
    "smolvlm": {"vision_config": {"image_size": 364, "patch_size": 14}},
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "udop": {"decoder_start_token_id": 0},
    "voxtral": {"audio_token_id": 24},
    "wav2vec2-bert": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 12},
}
"""What default configurations lack, or have in sizes that do not fit each other; as in published checkpoints."""


IN_FLOAT32 = {"fnet", "yoso"}
"""Their own code runs in float32 alone."""


def small_config(model_type: str) -> PretrainedConfig:
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config()
    options = _cut(default, getattr(text, "hidden_size", None))
    for name, value in CONSISTENT.get(model_type, {}).items():
        options[name] = {**options.get(name, {}), **value} if isinstance(value, dict) else value
    try:
        return AutoConfig.for_model(model_type, **options)
    except Exception:  # of a class that checks its layers: as it is
        return AutoConfig.for_model(model_type, **CONSISTENT.get(model_type, {}))


def _cut(config: PretrainedConfig, width: int | None, *, visual: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            inner = _cut(value, width, visual="text" not in name and "decoder" not in name)
            options[name] = {"model_type": value.model_type, **inner} if inner else None
        elif name in COUNTS and isinstance(value, int) and value > LAYERS:
            options[name] = LAYERS
        elif visual and name in WIDTHS and width is not None and isinstance(value, int) and value != width:
            options[name] = width
    return {name: value for name, value in options.items() if value is not None}


def arguments_of(config: PretrainedConfig, task: str, way: str) -> dict[str, Any]:
    model_type = config.model_type
    with_audio = task in ("seq2seq", "speech-seq2seq") and not config.is_encoder_decoder
    length = None if with_audio or task in WITHOUT_LENGTH or hasattr(config, "vision_config") else 64
    ways = {"full": {}, "lora": {"lora": 8}, "nf4": {"lora": 8, "load_in": "nf4"}}
    shape = {"batch_size": 1, "seq_len": length, "gpu": "RTX 3090"}
    wide = model_type in IN_FLOAT32
    precision = {"precision": "fp32" if wide else "bf16", "weights_dtype": "float32" if wide else "bfloat16"}
    return {**shape, **precision, "images": 1 if hasattr(config, "vision_config") else None, **ways[way]}


def outcome(model_type: str, way: str) -> str:
    """Return why a model type cannot be estimated in a way; "" where it can."""
    try:
        config = small_config(model_type)
        estimate(config, **arguments_of(config, str(_usual_task(config)), way))
    except Exception as error:  # transformers' own errors come from building default configurations
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["full", "lora", "nf4"])
def test_every_architecture_is_estimated_or_has_a_reason(way: str) -> None:
    with ALLOWED.open(newline="") as file:
        allowed = {row["model_type"]: row["reason"] for row in csv.DictReader(file) if way in row["ways"].split()}
    text = {one for task in TASKS_OF_TEXT for one in HEADS[task].types}
    types = sorted({one for head in HEADS.values() for one in head.types})
    failed = {one: why for one in types if (why := outcome(one, way))}
    counts = Counter((one in text) for one in failed)
    estimated = len(text) - counts[True]
    trained = len(text) - sum(bool(UNTRAINABLE.match(allowed.get(one, ""))) for one in text)
    of_text = f"{estimated} of {len(text)} of text, of which stock trains {trained}"
    print(f"{way}: {len(types) - len(failed)} of {len(types)} types, {of_text}")
    assert {one: why for one, why in failed.items() if one not in allowed} == {}
    assert sorted(set(allowed) - set(failed)) == []
    assert estimated >= GOALS[way] * trained
