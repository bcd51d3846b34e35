"""Models on the meta device: built as they are published, copied without weights, and their batches."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from slow_cases import slow_except
from tables import tables
from test_refusals import TASKS
from torch import nn
from torch.fx.experimental import _config as symbolic_settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification, DataCollatorWithPadding

import tiny
from hf_memopt import estimate
from hf_memopt.prediction.memory.models import example_batch, known_models, load_model, most_tokens
from hf_memopt.prediction.memory.models.config_files import known_name
from hf_memopt.training.binding.model import HEADS, task_of

TABLES = tables(__file__)

# Elements of the parameters, with ("all") or without ("base") the head, or with the vision tower that text does without
# ("pictures"), as published:
# - "params" in keras-team/keras-hub, keras_hub/src/models/*/*_presets.py: BERT (macbert-base as bert_base_zh),
#   DeBERTa-v3, GPT-2, T5, Whisper to medium, Gemma 3, Mistral, Qwen2.5-0.5B, Qwen2.5-1.5B and -7B (as the
#   Math models of the same shape), Qwen3-1.7B, Qwen3.5;
# - the safetensors totals that the hub gives: Llama, SmolLM2, phi-2, Whisper large, Qwen2.5-Coder, Qwen3-30B, GLM,
#   Olmo 3, gpt-oss (its model card too), Granite 4 micro, Falcon-H1, Mamba, LFM2, EmbeddingGemma, Qwen3-Embedding, BGE,
#   MPNet, DINOv2, MiT (the last five without what the head trained here leaves out), DeepSeek (V3 without
#   the 14,848 biases of its routers, which are buffers here), Qwen2.5-VL, Qwen3-VL, Llama 4, Ministral
#   3, CLIP, wav2vec2;
# - tanganke/fusion_bench's documentation of Flan-T5: what transformers counts in the loaded checkpoint.
# In millions, rounded as the papers' tables (RoBERTa, ELECTRA, DeBERTa-v3: 304 + 131 of the embedding, ModernBERT, ViT,
# DistilBERT, GPT-2), the model GPUs (MiniLM, Qwen3, Phi-3.5), the README of MacBERT and the announcement of Mistral 7B
# give it, and the model cards of GLM-4.7-Flash, Granite 4 and Gemma 3n (of its text); XLM-R, T5, ALBERT and Gemma 4 as
# keras-hub's presets do.
PUBLISHED = {
    row["model"]: row
    for row in csv.DictReader(Path(__file__).with_name("published_parameters.csv").read_text().splitlines())
}

LAYERS = {"num_hidden_layers": 2}
TINY = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, **LAYERS}
ARCHITECTURES: dict[str, dict[str, Any]] = TABLES["architectures"]


class _AnswersItems(TorchDispatchMode):
    """Answer what a model asks of a meta tensor's values (is every row full?) with 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nonzero_on_meta() -> Iterator[None]:
    """DeBERTa-v2 asks where its mask is nonzero; without this torch refuses to guess the shape."""
    with symbolic_settings.patch(meta_nonzero_assume_all_nonzero=True):
        yield


def _step(model: nn.Module, **sizes: Any) -> torch.Tensor:
    """Run forward and backward of the model's own batch and return the loss."""
    batch = example_batch(model, **{"batch_size": 2, "seq_len": 16, **sizes})
    with _AnswersItems():
        loss: torch.Tensor = model(**batch)["loss"]
        loss.backward()
    return loss


def _shapes(batch: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}


def _is_all_meta(model: nn.Module) -> bool:
    attributes = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.parameters(), *model.buffers(), *(v for v in attributes if isinstance(v, torch.Tensor))]
    return all(tensor.is_meta for tensor in tensors)


def _config(model_type: str, **settings: Any) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **{**ARCHITECTURES[model_type], **settings})


def _built(model_type: str, task: str | None = None, **settings: Any) -> Any:
    return load_model(_config(model_type, **settings), task=task).model


@pytest.mark.parametrize("name", slow_except([*PUBLISHED][::24], PUBLISHED))
def test_known_model_is_the_published_one_and_gives_a_batch(name: str) -> None:
    loaded, facts = load_model(name), known_models()[name]
    model: Any = loaded.model
    assert (loaded.name, task_of(model)) == (name, facts["task"])
    assert _is_all_meta(model)
    assert model.training
    assert model.config.use_cache is False
    batch = example_batch(model, batch_size=2, seq_len=tiny.LENGTHS.get(facts["task"], 16))
    assert all(value.is_meta for value in batch.values() if isinstance(value, torch.Tensor))
    row = PUBLISHED[name]
    if row["part"] == "pictures":
        model = load_model(name, task="image-text-to-text").model
    count = sum(weight.numel() for weight in (model.base_model if row["part"] == "base" else model).parameters())
    if row["parameters"]:
        assert count == int(row["parameters"])
    else:
        assert count / 1e6 == pytest.approx(float(row["millions"]), rel=0.015)  # they round, and count other heads


def test_every_known_model_has_its_count_checked_and_its_source() -> None:
    assert set(known_models()) == set(PUBLISHED)
    assert tuple(HEADS) == TASKS
    for name, facts in known_models().items():
        assert facts["source"] == f"https://huggingface.co/{facts['organisation']}/{name}/blob/main/config.json"
        assert facts["task"] in TASKS


SPELLINGS = TABLES["spellings"]


def test_known_name_in_any_spelling() -> None:
    assert {spelling: known_name(spelling) for spelling in SPELLINGS} == SPELLINGS


def test_flan_t5_keeps_the_head_of_its_checkpoint_apart() -> None:
    flan, t5 = (load_model(name).model for name in ("flan-t5-base", "t5-base"))
    assert flan.get_output_embeddings().weight is not flan.get_input_embeddings().weight
    assert t5.get_output_embeddings().weight is t5.get_input_embeddings().weight


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in known_models()])
def test_every_known_model_is_estimated(name: str) -> None:
    seq_len = tiny.LENGTHS.get(known_models()[name]["task"], 16)
    found = estimate(name, batch_size=1, seq_len=seq_len, gpu="H200", optim="sgd", precision="bf16")
    assert found.peak_allocated_bytes > 7.9 * found.parameters  # float32 weights, gradients of those in use


HEADS_OF_TASKS: list[tuple[str, dict[str, Any], str | None, str]] = [*map(tuple, TABLES["heads"])]


@pytest.mark.parametrize(("model_type", "settings", "task", "head"), slow_except(HEADS_OF_TASKS[::4], HEADS_OF_TASKS))
def test_task_and_architectures_pick_the_head(
    model_type: str, settings: dict[str, Any], task: str | None, head: str
) -> None:
    config = _config(model_type, **settings)
    before = config.to_json_string(use_diff=False)
    loaded = load_model(config, task=task, attn_implementation="eager", weights_dtype="bfloat16")
    assert loaded.name == type(loaded.model).__name__ == head
    assert task is None or task_of(loaded.model) == task
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert _step(loaded.model).shape == ()
    assert config.to_json_string(use_diff=False) == before
    assert torch.get_default_dtype() == torch.float32


ATTENTIONS = {  # asked of BERT and of DeBERTa, which has no sdpa, and what they have then
    ("bert", "eager"): "eager",
    ("bert", "sdpa"): "sdpa",
    ("bert", None): "sdpa",
    ("deberta-v2", "eager"): "eager",
    ("deberta-v2", "sdpa"): "eager",
    ("deberta-v2", None): "eager",
    ("llama", "flash_attention_2"): "hf_memopt_fa2",  # built without its package
}


def test_attention_is_the_one_asked_for_and_eager_where_there_is_no_sdpa() -> None:
    # the resolved implementation has no public name; seen in transformers 5.8.1, 5.17.0 and 5.23.0
    found = {
        (kind, asked): load_model(_config(kind), attn_implementation=asked).model.config._attn_implementation
        for kind, asked in ATTENTIONS
    }
    assert found == ATTENTIONS
    given = _built("llama")
    given.config._attn_implementation = "flash_attention_2"  # as from_pretrained leaves it where the package is
    assert load_model(given).model.config._attn_implementation == "hf_memopt_fa2"
    assert given.config._attn_implementation == "flash_attention_2"


def test_tied_weights_stay_tied_and_a_copy_of_a_meta_module_is_private() -> None:
    with torch.device("meta"):
        model = tiny.llama(tie_word_embeddings=True)
    copied: Any = load_model(nn.DataParallel(model)).model
    assert type(copied) is type(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert len(list(copied.parameters())) == len(list(model.parameters()))
    _step(copied)
    assert all(weight.grad is None for weight in model.parameters())


def test_autocast_that_accelerate_hangs_around_forward_is_taken_off() -> None:
    model = tiny.bert()
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier Trainer's, without mixed precision
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "_original_forward" in vars(prepared)  # pins accelerate's private name
    copied = load_model(prepared).model
    assert "_original_forward" not in vars(copied)
    assert copied.forward.__self__ is copied
    assert copied.forward.__func__ is transformers.BertForSequenceClassification.forward
    assert "_original_forward" in vars(prepared)


def test_batch_is_what_the_stock_collators_give() -> None:
    row = {"input_ids": [5] * 8, "token_type_ids": [0] * 8, "attention_mask": [1] * 8}
    causal = [{name: value for name, value in row.items() if name != "token_type_ids"}] * 2
    tokenizer = tiny.tokenizer()
    collated = {
        "sequence-classification": DataCollatorWithPadding(tokenizer)([{**row, "label": 1}] * 2),
        "token-classification": DataCollatorForTokenClassification(tokenizer)([{**row, "labels": [1] * 8}] * 2),
        "masked-lm": DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)([row] * 2),
        "causal-lm": DataCollatorForLanguageModeling(tokenizer, mlm=False)(causal),
    }
    for task, expected in collated.items():
        model = _built("llama" if task == "causal-lm" else "bert", task)
        assert _shapes(example_batch(model, batch_size=2, seq_len=8)) == _shapes(dict(expected))


IDS, FLOATS = torch.int64, torch.float32
ROW = ((2, 8), IDS)
MASKED = {"input_ids": ROW, "attention_mask": ROW}
TYPED = {**MASKED, "token_type_ids": ROW}
ANSWERS = {"start_positions": ((2,), IDS), "end_positions": ((2,), IDS)}
CHOICES = dict.fromkeys(MASKED, ((2, 4, 8), IDS))
PICTURES, SEVERAL_LABELS = {"pixel_values": ((2, 1, 32, 32), FLOATS)}, {"problem_type": "multi_label_classification"}
BATCHES: list[tuple[str, str | None, dict[str, Any], dict[str, Any], dict[str, Any]]] = [  # the model, sizes, entries
    ("bert", None, {"num_labels": 3}, {}, {**TYPED, "labels": ((2,), IDS)}),
    ("bert", None, {"num_labels": 1}, {}, {**TYPED, "labels": ((2,), FLOATS)}),
    ("bert", None, {"num_labels": 3, "problem_type": "regression"}, {}, {**TYPED, "labels": ((2, 3), FLOATS)}),
    ("bert", None, {"num_labels": 1, "problem_type": "regression"}, {}, {**TYPED, "labels": ((2,), FLOATS)}),
    ("bert", None, {"num_labels": 3, **SEVERAL_LABELS}, {}, {**TYPED, "labels": ((2, 3), FLOATS)}),
    ("bert", "question-answering", {}, {}, {**TYPED, **ANSWERS}),
    ("roberta", "multiple-choice", {}, {}, {**CHOICES, "labels": ((2,), IDS)}),
    ("t5", None, {}, {}, {**MASKED, "labels": ROW}),
    ("t5", None, {}, {"labels_length": 5}, {**MASKED, "labels": ((2, 5), IDS)}),
    ("vit", None, {"num_channels": 1}, {"seq_len": None}, {**PICTURES, "labels": ((2,), IDS)}),
    ("whisper", None, {}, {}, {"input_features": ((2, 80, 40), FLOATS), "labels": ROW}),
]


@pytest.mark.parametrize(("model_type", "task", "settings", "sizes", "entries"), slow_except(BATCHES[::3], BATCHES))
def test_entries_of_a_batch(model_type: str, task: Any, settings: Any, sizes: Any, entries: dict[str, Any]) -> None:
    model = _built(model_type, task, **settings)
    sizes = {"seq_len": 8, **sizes}
    assert _shapes(example_batch(model, batch_size=2, **sizes)) == entries
    assert _step(model, **sizes).shape == ()


def test_frames_of_audio_that_are_one_row_are_counted_together() -> None:
    """Of 160 numbers, two frames of 80 bins; ten seconds have 100 frames each."""
    config = transformers.Wav2Vec2BertConfig(**TINY, feature_projection_input_dim=160)
    batch = example_batch(load_model(config, task="ctc").model, batch_size=2, seq_len=None)
    assert tuple(batch["input_features"].shape) == (2, 500, 160)


@pytest.mark.parametrize(("model_type", "positions"), [("bert", 64), ("roberta", 62), ("mpnet", 62), ("opt", 64)])
def test_limit_is_the_one_that_the_real_model_has(model_type: str, positions: int) -> None:
    """The last allowed length runs on real tensors, one more is out of the table."""
    config = _config(model_type, max_position_embeddings=64)
    loaded = load_model(config).model
    assert most_tokens(loaded) == positions
    model = type(loaded)(config)
    ids = torch.full((1, positions + 1), 7)
    model(input_ids=ids[:, :positions])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)


@pytest.mark.parametrize("given", [{"images": 2}, {"image_size": 224}, {"audio_seconds": 5.0}])
def test_media_that_a_model_does_not_read_are_named(given) -> None:
    found = estimate(tiny.bert_config(), batch_size=1, seq_len=8, **given)
    ((name, value),) = given.items()
    assert f"{name}={value!r} has no effect on {found.model}" in found.notes


@pytest.mark.parametrize("images", [0, 2])
def test_a_decoder_of_one_picture_takes_no_other_number(images: int) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision, text = transformers.ViTConfig(**sizes, image_size=16, patch_size=8), tiny.bert_config(**sizes)
    kind = transformers.VisionEncoderDecoderConfig
    config = kind.from_encoder_decoder_configs(vision, text, pad_token_id=0, decoder_start_token_id=1)
    one, default = (estimate(config, batch_size=2, seq_len=8, images=given) for given in (1, None))
    assert one.total_bytes == default.total_bytes
    with pytest.raises(ValueError, match="images") as error:
        estimate(config, batch_size=2, seq_len=8, images=images)
    assert str(error.value) == (
        f"images={images} is not what VisionEncoderDecoderModel reads, one picture in each example; expected 1. "
        "Leave images out"
    )
