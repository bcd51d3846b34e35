"""Every head of the auto mappings of transformers that can be made tiny from its config, with uneven rows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

ROWS, LENGTH, SAMPLES, VOCABULARY, CLASSES = 5, 12, 1600, 99, 3
MOST_PARAMETERS = 3_000_000
TOO_LARGE = ("FalconH1ForCausalLM",)  # 40 GiB for a batch of 5 x 12 tokens in 5.8.1

TASKS: dict[str, Mapping[str, Any]] = {
    "causal language model": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked language model": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "regression": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "several labels": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question answering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "multiple choice": auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,
    "sequence to sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech to sequence": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "image classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio classification": auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "ctc": auto.MODEL_FOR_CTC_MAPPING_NAMES,
}

# Sizes by the names that configs have for them; what a config does not have is left out.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size", "n_words"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_dim"), 32),
    **dict.fromkeys(("model_dim", "embed_dim", "d_embed", "output_hidden_size", "d_kv_total", "conv_dim_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_num_attention_heads", "encoder_num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "dim_feedforward", "hidden_dim"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "n_inner", "ffn_hidden_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_selected_experts", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions"), 64),
    **dict.fromkeys(("max_target_positions", "n_ctx", "max_sequence_length"), 64),
    "head_dim": 16,
    "d_kv": 16,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "num_mel_bins": 16,
    "max_length": 64,
    "attention_window": 4,
    "attention_type": "original_full",
    "apply_spec_augment": False,
    "router_jitter_noise": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "use_cache": False,
}


def heads(task: str) -> Iterator[tuple[str, str]]:
    """Yield the type of the config and the name of the class of each head of a task."""
    for kind, names in TASKS[task].items():
        for name in names if isinstance(names, (tuple, list)) else (names,):
            if name not in TOO_LARGE:
                yield kind, name


def build(task: str, kind: str, name: str) -> Any:
    """Return a tiny head in float64 without any randomness, in training mode.

    Raises:
        Exception: whatever the config or the model raise that have other sizes than these.
    """
    config = _config(task, type(transformers.AutoConfig.for_model(kind)))
    head = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in head(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = head(config).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _config(task: str, config_class: type[Any]) -> Any:
    """Return a tiny config, with as many of ``SIZES`` as it takes."""
    defaults = config_class().to_dict()
    taken = {*inspect.signature(config_class).parameters, *defaults, *config_class.attribute_map}
    settings = {key: value for key, value in SIZES.items() if key in taken}
    settings |= {key: 0.0 for key, value in defaults.items() if isinstance(value, float) and "drop" in key}
    if task.endswith("classification") or task == "several labels":
        settings["num_labels"] = CLASSES
    if task == "regression":
        settings["num_labels"] = 1
    if task == "several labels":
        settings["problem_type"] = "multi_label_classification"
    while True:
        try:
            config = config_class(**settings)
            break
        except Exception as error:  # a size of another kind: a list for each stage
            named = [key for key in settings if f"field '{key}'" in str(error)]
            if not named:
                raise
            settings.pop(named[0])
    for key, value in (("decoder_start_token_id", 2), ("pad_token_id", 1), ("default_language", "en_XX")):
        if getattr(config, key, None) is None:
            setattr(config, key, value)
    config._attn_implementation = config._experts_implementation = "eager"
    if task == "causal language model" and not config.is_encoder_decoder:
        config.is_decoder = True
    return config


def batch(task: str, model: Any) -> dict[str, Any]:
    """Return a batch of rows that differ in length and in how many labels they have."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    parameters = inspect.signature(model.forward).parameters
    lengths = torch.tensor([12, 5, 9, 7, 11])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()  # (rows, length)
    ids = draw(5, VOCABULARY, ROWS, LENGTH).masked_fill(mask == 0, 1)
    ids[torch.arange(ROWS), lengths - 1] = 3  # the end of the text, which BART classifies
    text = {"input_ids": ids, "attention_mask": mask}
    if "attention_mask" not in parameters:
        text.pop("attention_mask")
    ignored = (mask == 0) | (torch.rand(ROWS, LENGTH, generator=generator) < 0.3)
    of_row = draw(0, CLASSES, ROWS)
    if task in ("causal language model", "masked language model"):
        return {**text, "labels": ids.masked_fill(ignored, -100)}
    if task == "token classification":
        return {**text, "labels": draw(0, CLASSES, ROWS, LENGTH).masked_fill(ignored, -100)}
    if task in ("sequence classification", "regression", "several labels"):
        shape = (ROWS, CLASSES) if task == "several labels" else (ROWS,)
        floats = torch.rand(*shape, generator=generator, dtype=torch.float64).round(decimals=0 if len(shape) > 1 else 3)
        return {**text, "labels": of_row if task == "sequence classification" else floats}
    if task == "question answering":
        return {**text, "start_positions": draw(0, 4, ROWS), "end_positions": draw(0, 5, ROWS)}
    if task == "multiple choice":
        ids = draw(5, VOCABULARY, ROWS, 2, LENGTH)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": of_row % 2}
    labels = draw(5, VOCABULARY, ROWS, 6).masked_fill(torch.arange(6) >= torch.tensor([6, 2, 4, 5, 3])[:, None], -100)
    if task == "sequence to sequence":
        return {**text, "labels": labels}
    name = model.main_input_name
    if name == "pixel_values":
        size, channels = getattr(model.config, "image_size", 32), getattr(model.config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.randn(ROWS, channels, height, width, generator=generator, dtype=torch.float64)
        return {name: pixels, "labels": of_row}
    shape = (ROWS, SAMPLES)
    if name == "input_features":
        frames = 2 * getattr(model.config, "max_source_positions", 32)
        shape = (ROWS, getattr(model.config, "num_mel_bins", 16), frames)  # type: ignore[assignment]
    if hasattr(model.config, "max_length") and name == "input_values" and hasattr(model.config, "num_mel_bins"):
        shape = (ROWS, model.config.max_length, model.config.num_mel_bins)  # type: ignore[assignment]
    sounds = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return {name: sounds, "labels": of_row if task == "audio classification" else labels}
