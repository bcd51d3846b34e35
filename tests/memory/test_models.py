"""Models and batches on the meta device: what may name a model, what its batch looks like, and what is refused."""

from __future__ import annotations

import copy
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import psutil
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from huggingface_hub import errors
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.fx.experimental import _config as symbolic_settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification, DataCollatorWithPadding

import tiny
from hf_memopt import hub
from hf_memopt.binding.model import task_of
from hf_memopt.binding.model import traits as model_tasks
from hf_memopt.memory.models import assumed_inputs, example_batch, known_models, load_model
from hf_memopt.memory.models import loading as models
from hf_memopt.memory.models.batches import check_sequence
from hf_memopt.memory.models.loading import TASKS
from hf_memopt.memory.models.meta_copy import copy_to_meta
from hf_memopt.memory.recording.step import cut_batch
from hf_memopt.memory.settings import NotEstimableError, StepSettings

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
PUBLISHED = {
    "bert-base-uncased": ("base", 109_482_240),
    "bert-large-uncased": ("base", 335_141_888),
    "bert-base-cased": ("base", 108_310_272),
    "bert-large-cased": ("base", 333_579_264),
    "chinese-macbert-base": ("base", 102_267_648),
    "deberta-v3-small": ("base", 141_304_320),
    "deberta-v3-base": ("base", 183_831_552),
    "flan-t5-base": ("all", 247_577_856),
    "gpt2": ("all", 124_439_808),
    "gpt2-xl": ("all", 1_557_611_200),
    "t5-large": ("all", 737_668_096),
    "SmolLM2-135M": ("all", 134_515_008),
    "SmolLM2-360M": ("all", 361_821_120),
    "SmolLM2-1.7B": ("all", 1_711_376_384),
    "Mistral-7B-v0.3": ("all", 7_248_023_552),
    "phi-2": ("all", 2_779_683_840),
    "Qwen3-1.7B": ("all", 1_720_574_976),
    "Llama-3.2-1B": ("all", 1_235_814_400),
    "Llama-3.2-3B": ("all", 3_212_749_824),
    "Llama-3.1-8B": ("all", 8_030_261_248),
    "Qwen2.5-0.5B": ("all", 494_032_768),
    "Qwen2.5-1.5B": ("all", 1_543_714_304),
    "Qwen2.5-7B": ("all", 7_615_616_512),
    "gemma-3-270m": ("all", 268_098_176),
    "gemma-3-1b-pt": ("all", 999_885_952),
    "whisper-tiny": ("all", 37_760_640),
    "whisper-base": ("all", 72_593_920),
    "whisper-small": ("all", 241_734_912),
    "whisper-medium": ("all", 763_857_920),
    "whisper-large-v3": ("all", 1_543_490_560),
    "whisper-large-v3-turbo": ("all", 808_878_080),
    "Qwen2.5-3B": ("all", 3_085_938_688),
    "Qwen2.5-14B": ("all", 14_770_033_664),
    "Qwen2.5-32B": ("all", 32_763_876_352),
    "Qwen3-14B": ("all", 14_768_307_200),
    "Qwen3-32B": ("all", 32_762_123_264),
    "gemma-2-2b": ("all", 2_614_341_888),
    "gemma-2-9b": ("all", 9_241_705_984),
    "gemma-2-27b": ("all", 27_227_128_320),
    "SmolLM3-3B": ("all", 3_075_098_624),
    "Meta-Llama-3-8B": ("all", 8_030_261_248),
    "Llama-3.1-70B": ("all", 70_553_706_496),
    "Llama-2-7b-hf": ("all", 6_738_415_616),
    "Llama-2-13b-hf": ("all", 13_015_864_320),
    "TinyLlama_v1.1": ("all", 1_100_048_384),
    "Mistral-7B-Instruct-v0.2": ("all", 7_241_732_096),
    "Mistral-Nemo-Base-2407": ("all", 12_247_782_400),
    "Mistral-Small-24B-Base-2501": ("all", 23_572_403_200),
    "Mixtral-8x7B-v0.1": ("all", 46_702_792_704),
    "Phi-3-mini-4k-instruct": ("all", 3_821_079_552),
    "Phi-4-mini-instruct": ("all", 3_836_021_760),
    "phi-4": ("all", 14_659_507_200),
    "OLMo-2-0425-1B": ("all", 1_484_916_736),
    "OLMo-2-1124-7B": ("all", 7_298_617_344),
    "whisper-large-v2": ("all", 1_543_304_960),
    "gpt_bigcode-santacoder": ("all", 1_124_886_528),
    "t5-3b": ("all", 2_851_598_336),
    "flan-t5-small": ("all", 76_961_152),
    "flan-t5-large": ("all", 783_150_080),
    "flan-t5-xl": ("all", 2_849_757_184),
    "pythia-70m": ("all", 70_426_624),
    "pythia-160m": ("all", 162_322_944),
    "pythia-410m": ("all", 405_334_016),
    "pythia-1b": ("all", 1_011_781_632),
    "pythia-1.4b": ("all", 1_414_647_808),
    "pythia-2.8b": ("all", 2_775_208_960),
    "pythia-6.9b": ("all", 6_857_302_016),
    "pythia-12b": ("all", 11_846_072_320),
    "gpt-neox-20b": ("all", 20_554_567_680),
    "deberta-v3-xsmall": ("base", 70_682_112),
    "gemma-3-4b-pt": ("all", 4_300_079_472),
    "opt-125m": ("all", 125_239_296),
    "opt-350m": ("all", 331_196_416),
    "opt-1.3b": ("all", 1_315_758_080),
    "gpt-neo-125m": ("all", 125_198_592),
    "Qwen2.5-Coder-0.5B": ("all", 494_032_768),
    "Qwen2.5-Coder-1.5B": ("all", 1_543_714_304),
    "Qwen2.5-Coder-3B": ("all", 3_085_938_688),
    "Qwen2.5-Coder-7B": ("all", 7_615_616_512),
    "Qwen2.5-Coder-14B": ("all", 14_770_033_664),
    "Qwen2.5-Coder-32B": ("all", 32_763_876_352),
    "DeepSeek-R1-Distill-Qwen-1.5B": ("all", 1_777_088_000),
    "DeepSeek-R1-Distill-Qwen-7B": ("all", 7_615_616_512),
    "DeepSeek-R1-Distill-Llama-8B": ("all", 8_030_261_248),
    "DeepSeek-V3": ("all", 671_026_404_352),
    "Qwen3-30B-A3B": ("all", 30_532_122_624),
    "gpt-oss-20b": ("all", 20_914_757_184),
    "GLM-4-9B-0414": ("all", 9_400_279_040),
    "GLM-4.5-Air": ("all", 106_852_245_504),
    "Olmo-3-1025-7B": ("all", 7_298_011_136),
    "Olmo-3-1125-32B": ("all", 32_233_522_176),
    "granite-4.0-micro": ("all", 3_402_836_480),
    "Falcon-H1-0.5B-Base": ("all", 521_411_104),
    "mamba-130m-hf": ("all", 129_135_360),
    "mamba-370m-hf": ("all", 371_516_416),
    "mamba-790m-hf": ("all", 793_204_224),
    "mamba-1.4b-hf": ("all", 1_372_178_432),
    "mamba-2.8b-hf": ("all", 2_768_345_600),
    "LFM2-350M": ("all", 354_483_968),
    "LFM2-700M": ("all", 742_489_344),
    "LFM2-1.2B": ("all", 1_170_340_608),
    "embeddinggemma-300m": ("base", 302_863_104),
    "Qwen3-Embedding-0.6B": ("base", 595_776_512),
    "Qwen3-Embedding-4B": ("base", 4_021_774_336),
    "Qwen3-Embedding-8B": ("base", 7_567_295_488),
    "bge-m3": ("base", 566_705_152),
    "bge-small-en-v1.5": ("base", 33_360_000),
    "bge-base-en-v1.5": ("base", 109_482_240),
    "bge-large-en-v1.5": ("base", 335_141_888),
    "all-mpnet-base-v2": ("base", 108_895_872),
    "dinov2-small": ("base", 22_056_576),
    "dinov2-base": ("base", 86_580_480),
    "dinov2-large": ("base", 304_368_640),
    "mit-b0": ("base", 3_319_392),
    "mit-b2": ("base", 24_196_288),
    "mit-b5": ("base", 81_443_008),
    "Qwen2.5-VL-3B-Instruct": ("all", 3_754_622_976),
    "Qwen2.5-VL-7B-Instruct": ("all", 8_292_166_656),
    "Qwen3-VL-2B-Instruct": ("all", 2_127_532_032),
    "Qwen3-VL-4B-Instruct": ("all", 4_437_815_808),
    "Qwen3-VL-8B-Instruct": ("all", 8_767_123_696),
    "Qwen3.5-0.8B": ("pictures", 852_985_920),
    "Qwen3.5-2B": ("pictures", 2_213_241_664),
    "Qwen3.5-4B": ("pictures", 4_539_265_536),
    "Qwen3.5-9B": ("pictures", 9_409_813_744),
    "Qwen3.5-27B": ("pictures", 27_356_728_560),
    "Qwen3.5-35B-A3B": ("pictures", 35_107_181_936),
    "gemma-3-12b-pt": ("all", 12_187_325_040),
    "gemma-3-27b-pt": ("all", 27_432_406_640),
    "Llama-3.2-11B-Vision": ("all", 10_670_220_835),
    "Llama-4-Scout-17B-16E": ("pictures", 108_641_793_536),
    "Ministral-3-3B-Base-2512": ("all", 3_849_090_048),
    "Ministral-3-8B-Base-2512": ("all", 8_918_026_240),
    "Ministral-3-14B-Base-2512": ("all", 13_945_031_680),
    "clip-vit-base-patch32": ("all", 151_277_313),
    "wav2vec2-base": ("base", 94_371_712),
}
# In millions, rounded as the papers' tables (RoBERTa, ELECTRA, DeBERTa-v3: 304 + 131 of the embedding, ModernBERT, ViT,
# DistilBERT, GPT-2), the model GPUs (MiniLM, Qwen3, Phi-3.5), the README of MacBERT and the announcement of Mistral 7B
# give it, and the model cards of GLM-4.7-Flash, Granite 4 and Gemma 3n (of its text); XLM-R, T5, ALBERT and Gemma 4 as
# keras-hub's presets do.
ROUNDED = {
    "all-MiniLM-L6-v2": 22.7,
    "chinese-macbert-large": 324,
    "roberta-base": 125,
    "roberta-large": 355,
    "xlm-roberta-base": 278,
    "xlm-roberta-large": 559,
    "deberta-v3-large": 435,
    "distilbert-base-uncased": 66,
    "ModernBERT-base": 149,
    "ModernBERT-large": 395,
    "electra-small-discriminator": 13.5,
    "electra-base-discriminator": 110,
    "electra-large-discriminator": 335,
    "albert-base-v2": 11.7,
    "gpt2-medium": 355,
    "gpt2-large": 774,
    "t5-small": 60.5,
    "t5-base": 223,
    "Qwen3-0.6B": 600,
    "Qwen3-4B": 4000,
    "Qwen3-8B": 8200,
    "Mistral-7B-v0.1": 7300,
    "Phi-3.5-mini-instruct": 3800,
    "vit-base-patch16-224": 86,
    "vit-large-patch16-224": 307,
    "granite-3.1-2b-base": 2530,
    "granite-3.1-8b-base": 8170,
    "PowerLM-3b": 3510,
    "gemma-3n-E2B": 4460,
    "gemma-3n-E4B": 6870,
    "gemma-4-E2B": 5100,
    "gemma-4-E4B": 7900,
    "gemma-4-31B": 31000,
    "gemma-4-26B-A4B": 26000,
    "GLM-4.7-Flash": 30000,
    "granite-4.0-h-micro": 3190,
    "granite-4.0-h-tiny": 6940,
}

LAYERS = {"num_hidden_layers": 2}
TINY = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, **LAYERS}
GROUPED = {**TINY, "num_key_value_heads": 1}
SEQ2SEQ = {"vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
HALVES = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
PADDED = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "albert": {**TINY, "embedding_size": 16},
    "bart": {**SEQ2SEQ, **HALVES, **PADDED},
    "bert": TINY,
    "bloom": {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "camembert": {**TINY, **PADDED},
    "deberta": TINY,
    "deberta-v2": {**TINY, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"vocab_size": 100, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2},
    "electra": {**TINY, "embedding_size": 16},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 8},
    "gpt2": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": {**TINY, "max_position_embeddings": 64},
    "llama": {**GROUPED, **PADDED},
    "mistral": GROUPED,
    "modernbert": {**TINY, **PADDED, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 8},
    "mpnet": {**TINY, **PADDED, "pad_token_id": 1},
    "opt": {**TINY, **PADDED, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": TINY,
    "phi3": {**TINY, **PADDED},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "roberta": {**TINY, **PADDED, "pad_token_id": 1},
    "t5": {
        "vocab_size": 100,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "vit": {**LAYERS, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32},
    "whisper": {**SEQ2SEQ, **HALVES, **PADDED, "decoder_start_token_id": 2, "max_source_positions": 20},
}


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


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Fail every download with the error that the test puts into the list."""
    failures: list[Exception] = []

    def download(*_: Any, **__: Any) -> str:
        raise failures[0]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return failures


def _step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run forward and backward and return the loss."""
    with _AnswersItems():
        loss: torch.Tensor = model(**batch)["loss"]
        loss.backward()
    return loss


def _shapes(batch: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}


def _is_all_meta(model: nn.Module) -> bool:
    attributes = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.parameters(), *model.buffers(), *(v for v in attributes if isinstance(v, torch.Tensor))]
    return all(tensor.is_meta for tensor in tensors)


def _config(model_type: str, **settings: Any) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **{**ARCHITECTURES[model_type], **settings})


# ---- well-known names


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_model_has_the_published_number_of_parameters(name: str) -> None:
    part, count = PUBLISHED[name]
    model = load_model(name, task="image-text-to-text" if part == "pictures" else None).model
    counted = model.base_model if part == "base" else model
    assert sum(weight.numel() for weight in counted.parameters()) == count


@pytest.mark.parametrize("name", ROUNDED)
def test_known_model_has_about_the_published_number_of_parameters(name: str) -> None:
    count = sum(weight.numel() for weight in load_model(name).model.parameters())
    assert count / 1e6 == pytest.approx(ROUNDED[name], rel=0.015)  # they round, and count other heads


def test_every_known_model_has_its_count_checked_and_its_source() -> None:
    assert set(known_models()) == set(PUBLISHED) | set(ROUNDED)
    for name, facts in known_models().items():
        assert facts["source"] == f"https://huggingface.co/{facts['organisation']}/{name}/blob/main/config.json"
        assert facts["task"] in TASKS


@pytest.mark.parametrize("name", known_models())
def test_known_model_is_all_on_meta_and_gives_a_batch(name: str) -> None:
    loaded = load_model(name)
    assert loaded.name == name
    assert task_of(loaded.model) == known_models()[name]["task"]
    assert _is_all_meta(loaded.model)
    assert loaded.model.training
    assert loaded.model.config.use_cache is False
    seq_len = tiny.LENGTHS.get(known_models()[name]["task"], 16)
    batch = example_batch(loaded.model, batch_size=2, seq_len=seq_len)
    assert all(value.is_meta for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(
    ("spelling", "known"),
    [
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B"),
        ("llama-3.2-1b", "Llama-3.2-1B"),
        ("LLAMA-3.2-1B-instruct", "Llama-3.2-1B"),
        ("google/gemma-3-1b-it", "gemma-3-1b-pt"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen2.5-1.5B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-1.5B"),
        ("allenai/Olmo-3-7B-Instruct", "Olmo-3-1025-7B"),
        ("tiiuae/Falcon-H1-0.5B-Instruct", "Falcon-H1-0.5B-Base"),
        ("bge-m3", "bge-m3"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.1-70B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7b-hf"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "TinyLlama_v1.1"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct-v0.2", "SmolLM2-135M"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"),
        ("Mistral-7B-Instruct-v0.2", "Mistral-7B-Instruct-v0.2"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("microsoft/Phi-3.5-mini", "Phi-3.5-mini-instruct"),
        ("allenai/OLMo-2-0425-1B-Instruct", "OLMo-2-0425-1B"),
        ("ibm/PowerLM-3b", "PowerLM-3b"),
        ("EleutherAI/pythia-410m-deduped", "pythia-410m"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("hfl/chinese-macbert-base", "chinese-macbert-base"),
    ],
)
def test_known_name_in_any_spelling_without_the_network(
    unreachable: list[Exception], spelling: str, known: str
) -> None:
    unreachable.append(AssertionError("a known name must not touch the network"))
    assert load_model(spelling).name == known


def test_building_takes_neither_time_nor_memory() -> None:
    load_model("SmolLM2-135M")  # imports
    gc.collect()
    before, start = psutil.Process().memory_info().rss, time.process_time()
    load_model("Llama-3.1-8B")
    assert time.process_time() - start < 1  # seconds of the processor; 0.1 measured: no weight is initialised
    assert psutil.Process().memory_info().rss - before < 20_000_000


def test_flan_t5_keeps_the_head_of_its_checkpoint_apart() -> None:
    flan, t5 = load_model("flan-t5-base").model, load_model("t5-base").model
    assert flan.get_output_embeddings().weight is not flan.get_input_embeddings().weight
    assert t5.get_output_embeddings().weight is t5.get_input_embeddings().weight


# ---- configurations and folders


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architecture_trains_on_its_batch(model_type: str) -> None:
    model = load_model(_config(model_type)).model
    assert _is_all_meta(model)
    seq_len = None if model_type == "vit" else 16
    loss = _step(model, example_batch(model, batch_size=2, seq_len=seq_len))
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    without = {name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None}
    assert without <= {"roberta.pooler.dense.weight"}  # every trainable parameter takes part


@pytest.mark.parametrize(
    ("model_type", "task", "head"),
    [
        ("bert", "masked-lm", "BertForMaskedLM"),
        ("bert", "token-classification", "BertForTokenClassification"),
        ("bert", "question-answering", "BertForQuestionAnswering"),
        ("bert", "multiple-choice", "BertForMultipleChoice"),
        ("bert", "causal-lm", "BertLMHeadModel"),
        ("llama", "sequence-classification", "LlamaForSequenceClassification"),
        ("gpt2", "sequence-classification", "GPT2ForSequenceClassification"),
        ("gpt2", "token-classification", "GPT2ForTokenClassification"),
        ("modernbert", "masked-lm", "ModernBertForMaskedLM"),
    ],
)
def test_task_picks_the_head(model_type: str, task: str, head: str) -> None:
    loaded = load_model(_config(model_type), task=task)
    assert loaded.name == type(loaded.model).__name__ == head
    assert task_of(loaded.model) == task
    assert _step(loaded.model, example_batch(loaded.model, batch_size=2, seq_len=16)).shape == ()


def test_architectures_pick_the_head_and_task_overrides_them() -> None:
    config = _config("bert", architectures=["BertForMaskedLM"])
    assert load_model(config).name == "BertForMaskedLM"
    assert load_model(config, task="token-classification").name == "BertForTokenClassification"
    assert load_model(_config("bert")).name == "BertForSequenceClassification"
    assert load_model(_config("bert", is_decoder=True)).name == "BertLMHeadModel"


def test_configuration_is_not_changed() -> None:
    config = _config("gpt2")
    before = config.to_json_string(use_diff=False)
    load_model(config, task="sequence-classification", attn_implementation="eager", weights_dtype="bfloat16")
    assert config.to_json_string(use_diff=False) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_asked_for(dtype: str) -> None:
    loaded = load_model(_config("llama"), weights_dtype=dtype)
    assert {weight.dtype for weight in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert torch.get_default_dtype() == torch.float32


def test_attention_is_the_one_asked_for_and_eager_where_there_is_no_sdpa() -> None:
    # the resolved implementation has no public name; seen in transformers 5.8.1, 5.17.0 and 5.23.0
    found = {
        (kind, wanted): load_model(_config(kind), attn_implementation=wanted).model.config._attn_implementation
        for kind in ("bert", "deberta-v2")
        for wanted in ("eager", "sdpa", None)
    }
    assert found == {
        ("bert", "eager"): "eager",
        ("bert", "sdpa"): "sdpa",
        ("bert", None): "sdpa",
        ("deberta-v2", "eager"): "eager",
        ("deberta-v2", "sdpa"): "eager",
        ("deberta-v2", None): "eager",
    }


def test_equal_keys_mean_equal_models() -> None:
    key = load_model(_config("bert")).key
    assert key == load_model(_config("bert")).key
    assert hash(key) == hash(load_model(_config("bert")).key)
    others = [
        load_model(_config("bert", hidden_size=64)),
        load_model(_config("bert"), weights_dtype="bfloat16"),
        load_model(_config("bert"), attn_implementation="eager"),
        load_model(_config("bert"), task="masked-lm"),
    ]
    assert all(key != other.key for other in others)
    assert load_model(tiny.bert()).key is None
    assert load_model("t5-small").key == load_model("google-t5/t5-small").key


def test_folder_is_read_and_goes_before_a_known_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpt2"
    tiny.bert().save_pretrained(folder)
    loaded = load_model(folder)
    assert (loaded.name, type(loaded.model).__name__) == ("gpt2", "BertForSequenceClassification")
    assert loaded.model.config.num_labels == 3
    monkeypatch.chdir(tmp_path)
    assert type(load_model("gpt2").model).__name__ == "BertForSequenceClassification"


# ---- modules


def test_module_is_left_as_it_was() -> None:
    model = tiny.bert().eval()
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    model.bert.embeddings.requires_grad_(False)
    seen: list[str] = []
    model.classifier.register_forward_hook(lambda *_: seen.append("hook"))
    model.config.use_cache = True
    before = copy.deepcopy(model.state_dict())

    copied = load_model(model, attn_implementation="eager").model
    _step(copied, example_batch(copied, batch_size=2, seq_len=16))

    assert seen == ["hook"]  # the hook came along
    assert not model.training
    assert copied.training
    assert model.config.use_cache is True
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.classifier.weight.grad, torch.ones_like(model.classifier.weight))
    assert [name for name, weight in model.named_parameters() if weight.grad is not None] == ["classifier.weight"]
    flags = {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert {name: weight.requires_grad for name, weight in copied.named_parameters()} == flags


def test_copy_has_no_gradients_and_the_same_shapes_dtypes_and_buffers() -> None:
    model = tiny.llama().to(torch.bfloat16)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.note = [torch.ones(3), {"deep": torch.ones(2)}]
    copied = load_model(model).model
    assert _is_all_meta(copied)
    assert copied.model.note[0].is_meta
    assert copied.model.note[1]["deep"].is_meta
    assert all(weight.grad is None for weight in copied.parameters())
    for one, other in (
        (model.named_parameters(), copied.named_parameters()),
        (model.named_buffers(), copied.named_buffers()),
    ):
        assert [(n, t.shape, t.dtype, t.stride()) for n, t in one] == [
            (n, t.shape, t.dtype, t.stride()) for n, t in other
        ]


def test_hooks_on_parameters_do_not_come_along() -> None:
    model = tiny.bert()
    stepped: list[Any] = []
    model.classifier.weight.register_post_accumulate_grad_hook(stepped.append)
    copied = load_model(model).model
    _step(copied, example_batch(copied, batch_size=2, seq_len=16))
    assert stepped == []


def test_tied_weights_stay_tied() -> None:
    model = transformers.LlamaForCausalLM(tiny.llama_config(tie_word_embeddings=True))
    copied = load_model(model).model
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert len(list(copied.parameters())) == len(list(model.parameters()))


def test_copy_costs_no_weight_memory() -> None:
    model = nn.Sequential(*(nn.Linear(5_000, 5_000, bias=False) for _ in range(4)))  # 400 MB
    assert sum(weight.nbytes for weight in model.parameters()) == 400_000_000
    load_model(nn.Linear(2, 2))  # imports
    gc.collect()
    before = psutil.Process().memory_info().rss
    copied = load_model(model).model
    assert psutil.Process().memory_info().rss - before < 20_000_000
    assert _is_all_meta(copied)


def test_copy_of_a_meta_module_is_private() -> None:
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(tiny.bert_config())
    copied = load_model(model).model
    _step(copied, example_batch(copied, batch_size=2, seq_len=16))
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft 0.21
def test_peft_model_keeps_its_adapters() -> None:
    model = get_peft_model(tiny.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    loaded = load_model(model)
    assert loaded.name == "LlamaForCausalLM"
    assert type(loaded.model) is type(model)
    assert loaded.model.config.use_cache is False
    _step(loaded.model, example_batch(loaded.model, batch_size=2, seq_len=16))
    with_gradient = {name for name, weight in loaded.model.named_parameters() if weight.grad is not None}
    assert with_gradient == {name for name, weight in model.named_parameters() if "lora_" in name}
    assert len(with_gradient) == 8


def test_wrappers_of_distributed_models_are_taken_off() -> None:
    model = tiny.bert()
    assert type(load_model(nn.DataParallel(model)).model) is type(model)


def _with_compiled_layer(model: Any) -> Any:
    model.bert.encoder.layer[1] = torch.compile(model.bert.encoder.layer[1], backend="eager")
    return model


def _compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def _with_layer_compiled_in_place(model: Any) -> Any:
    model.bert.encoder.layer[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [  # pins _orig_mod and _compiled_call_impl of torch
        (partial(torch.compile, backend="eager"), "<OptimizedModule> is compiled", "Pass model._orig_mod"),
        (
            _with_compiled_layer,
            "<BertForSequenceClassification> is compiled (bert.encoder.layer.1)",
            "Put bert.encoder.layer.1._orig_mod in its place",
        ),
        (
            _compiled_in_place,
            "<BertForSequenceClassification> is compiled",
            "Pass the model before it calls compile()",
        ),
        (
            _with_layer_compiled_in_place,
            "<BertForSequenceClassification> is compiled (bert.encoder.layer.1)",
            "Pass the model before it calls compile()",
        ),
    ],
)
def test_compiled_models_are_not_estimable(change: Any, what: str, fix: str) -> None:
    with pytest.raises(NotEstimableError) as error:
        load_model(change(tiny.bert()))
    assert str(error.value) == (
        f"not estimable: model={what}: what the compiler fuses and saves is decided on the GPU; expected a module "
        f"that runs as it is written. {fix}"
    )


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


def test_quantised_linears_get_their_stand_ins() -> None:
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4")
    linear.weight = bitsandbytes.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4").to("cpu")
    copied = copy_to_meta(nn.Sequential(linear, nn.Linear(64, 2)))
    assert type(copied[0]).__name__ == "Linear4bitStandIn"
    assert _is_all_meta(copied)
    assert _is_all_meta(copy_to_meta(copied))  # and a copy of the copy


def test_parameter_without_a_meta_form_is_not_estimable() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.UninitializedParameter()
    with pytest.raises(NotEstimableError) as error:
        load_model(model)
    assert str(error.value) == (
        "not estimable: Linear.weight is a UninitializedParameter, which has no form on the meta device; expected "
        "plain parameters or bitsandbytes' linears. Pass model.config"
    )


def test_module_that_cannot_be_copied_is_not_estimable() -> None:
    model = tiny.bert()
    model.stream = (number for number in ())
    with pytest.raises(NotEstimableError) as error:
        load_model(model)
    assert str(error.value) == (
        "not estimable: model=<BertForSequenceClassification> holds an object that cannot be copied (cannot pickle "
        "'generator' object); expected a module that copy.deepcopy takes. Pass model.config"
    )


# ---- batches


def _text(count: int = 2, length: int = 8) -> list[dict[str, Any]]:
    return [
        {"input_ids": [5] * length, "token_type_ids": [0] * length, "attention_mask": [1] * length}
        for _ in range(count)
    ]


def test_batch_is_what_the_stock_collators_give() -> None:
    tokenizer = tiny.tokenizer()
    classes = DataCollatorWithPadding(tokenizer)([{**row, "label": 1} for row in _text()])
    tokens = DataCollatorForTokenClassification(tokenizer)([{**row, "labels": [1] * 8} for row in _text()])
    masked = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)(_text())
    causal = DataCollatorForLanguageModeling(tokenizer, mlm=False)(
        [{name: value for name, value in row.items() if name != "token_type_ids"} for row in _text()]
    )
    for task, expected in {
        "sequence-classification": classes,
        "token-classification": tokens,
        "masked-lm": masked,
    }.items():
        batch = example_batch(load_model(_config("bert"), task=task).model, batch_size=2, seq_len=8)
        assert _shapes(batch) == _shapes(dict(expected))
    assert _shapes(example_batch(load_model(_config("llama")).model, batch_size=2, seq_len=8)) == _shapes(dict(causal))


IDS, FLOATS = torch.int64, torch.float32


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 3}, ((2,), IDS)),
        ({"num_labels": 1}, ((2,), FLOATS)),
        ({"num_labels": 3, "problem_type": "regression"}, ((2, 3), FLOATS)),
        ({"num_labels": 1, "problem_type": "regression"}, ((2,), FLOATS)),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, ((2, 3), FLOATS)),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, ((2,), IDS)),
    ],
)
def test_labels_of_classification_follow_the_configuration(settings: dict[str, Any], labels: Any) -> None:
    model = load_model(_config("bert", **settings)).model
    batch = example_batch(model, batch_size=2, seq_len=8)
    assert _shapes(batch)["labels"] == labels
    assert _step(model, batch).shape == ()


def test_entries_of_the_other_heads() -> None:
    def entries(model: nn.Module, seq_len: int | None = 8, **settings: Any) -> dict[str, Any]:
        return _shapes(example_batch(model, batch_size=2, seq_len=seq_len, **settings))

    row = ((2, 8), IDS)
    answers = load_model(_config("bert"), task="question-answering").model
    assert entries(answers) == {
        "input_ids": row,
        "token_type_ids": row,
        "attention_mask": row,
        "start_positions": ((2,), IDS),
        "end_positions": ((2,), IDS),
    }
    choices = load_model(_config("roberta"), task="multiple-choice").model
    assert entries(choices) == {
        "input_ids": ((2, 4, 8), IDS),
        "attention_mask": ((2, 4, 8), IDS),
        "labels": ((2,), IDS),
    }
    t5 = load_model(_config("t5")).model
    assert entries(t5) == {"input_ids": row, "attention_mask": row, "labels": row}
    assert entries(t5, labels_length=5)["labels"] == ((2, 5), IDS)
    images = load_model(_config("vit", num_channels=1)).model
    assert entries(images, None) == {"pixel_values": ((2, 1, 32, 32), FLOATS), "labels": ((2,), IDS)}
    assert entries(load_model("whisper-large-v3").model) == {
        "input_features": ((2, 128, 3000), FLOATS),
        "labels": row,
    }


def test_cut_batch_takes_the_first_rows_as_views() -> None:
    batch = {"input_ids": torch.arange(12).reshape(4, 3), "scale": torch.ones(1), "labels": torch.arange(4)}
    rows = cut_batch(batch, 4, 3)
    assert rows["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert rows["labels"].tolist() == [0, 1, 2]
    assert rows["scale"] is batch["scale"]
    assert rows["input_ids"].untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("bert-base-uncased", 512),
        ("roberta-base", 512),
        ("xlm-roberta-base", 512),
        ("distilbert-base-uncased", 512),
        ("ModernBERT-base", 8192),
        ("gpt2", 1024),
        ("Llama-3.2-1B", 131072),
        ("whisper-tiny", 448),
    ],
)
def test_positions_are_the_limit(name: str, positions: int) -> None:
    model = load_model(name).model
    check_sequence(model, positions)
    with pytest.raises(ValueError) as error:
        check_sequence(model, positions + 1)
    assert str(error.value) == (
        f"seq_len={positions + 1} is beyond the positions of {type(model).__name__}; expected 1 to {positions}. "
        f"Pass seq_len={positions}"
    )


@pytest.mark.parametrize("name", ["t5-small", "deberta-v3-small"])
def test_relative_positions_have_no_limit(name: str) -> None:
    check_sequence(load_model(name).model, 100_000)


@pytest.mark.parametrize(("model_type", "positions"), [("bert", 64), ("roberta", 62), ("mpnet", 62), ("opt", 64)])
def test_limit_is_the_one_that_the_real_model_has(model_type: str, positions: int) -> None:
    """The last allowed length runs on real tensors, one more is out of the table."""
    loaded = load_model(_config(model_type, max_position_embeddings=64)).model
    check_sequence(loaded, positions)
    with pytest.raises(ValueError):
        check_sequence(loaded, positions + 1)
    model = type(loaded)(_config(model_type, max_position_embeddings=64))
    ids = torch.full((1, positions + 1), 7)
    model(input_ids=ids[:, :positions])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)


# ---- what is refused


EXPECTED_NAMES = "expected a folder with config.json, an id on the hub or a well-known name"


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            errors.LocalEntryNotFoundError("no"),
            "and the hub is offline (HF_HUB_OFFLINE is set) and its local cache has nothing of that name",
        ),
        (errors.HFValidationError("no"), "nor can it be an id on the hub"),
    ],
)
def test_unknown_name_tells_why_and_lists_the_nearest(
    unreachable: list[Exception], failure: Exception, told: str
) -> None:
    unreachable.append(failure)
    with pytest.raises(ValueError) as error:
        load_model("bert-larg-uncased")
    assert str(error.value) == (
        f"model='bert-larg-uncased' is neither a well-known name nor a folder, {told}; {EXPECTED_NAMES}. "
        "Did you mean 'bert-large-uncased'? List the well-known names: hf-memopt estimate --list-models"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "Qwen2.5-1.5B-Instruct-Q4_K_M.gguf",
            "GGUF files are for llama.cpp, and the Trainer does not train them. "
            "Pass the original: model='Qwen2.5-1.5B-Instruct'",
        ),
        (
            "someone/Qwen2.5-7B-GGUF",
            "GGUF files are for llama.cpp, and the Trainer does not train them. Pass the original: model='Qwen2.5-7B'",
        ),
        (
            "unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit",
            "It has the original's weights in 4 bits, which QLoRA makes as it loads them. "
            "Pass the original: model='Llama-3.2-1B-Instruct'",
        ),
        (
            "someone/Mistral-7B-v0.3-AWQ",
            "It has the original's weights, quantised to run. Pass the original: model='Mistral-7B-v0.3'",
        ),
    ],
)
def test_name_of_converted_weights_leads_to_the_original(name: str, hint: str) -> None:
    with pytest.raises(ValueError) as error:
        load_model(name)
    assert str(error.value).endswith(
        f"{EXPECTED_NAMES}. {hint}. List the well-known names: hf-memopt estimate --list-models"
    )


def test_notes_of_published_weights() -> None:
    (note,) = load_model("openai/gpt-oss-20b").notes
    assert note == (
        "its published weights are MXFP4, 4 bits each, which transformers runs but does not train "
        "(Mxfp4HfQuantizer.is_trainable): the figures are those of weights dequantised to bf16"
    )
    assert load_model("gpt2").notes == load_model(torch.nn.Linear(1, 1)).notes == ()


@pytest.mark.parametrize("name", ["mamba-130m-hf", "Falcon-H1-0.5B-Base", "granite-4.0-h-micro", "Qwen3.5-0.8B"])
def test_notes_of_kernels_that_are_not_simulated(name: str) -> None:
    assert load_model(name).notes[-1] == (
        "layers with a recurrent state are simulated by transformers' own code; with the kernels of mamba_ssm or "
        "fla (flash-linear-attention) a step keeps other tensors and takes other times"
    )


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (errors.RepositoryNotFoundError, "and the hub has no such repository, or you have no access to it"),
        (errors.GatedRepoError, "and on the hub it is gated: accept its licence there and log in with hf auth login"),
        (errors.RemoteEntryNotFoundError, "and its repository on the hub has no config.json"),
        (errors.HfHubHTTPError, "and the hub failed (no)"),
    ],
)
def test_answer_of_the_hub_is_told(unreachable: list[Exception], kind: Any, told: str) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    unreachable.append(kind("no", response=response))
    with pytest.raises(ValueError) as error:
        load_model("someone/zzzz")
    assert str(error.value) == (
        f"model='someone/zzzz' is neither a well-known name nor a folder, {told}; {EXPECTED_NAMES}. "
        "List the well-known names: hf-memopt estimate --list-models"
    )


@pytest.fixture
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Refuse every connection, without a proxy and not told to be offline; return the list of who was asked for."""
    asked: list[Any] = []

    def refuse(address: Any, timeout: float) -> Any:
        asked.append((*address, timeout))
        raise ConnectionRefusedError

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.example")
    return asked


def test_hub_that_cannot_be_reached_is_asked_once_and_told(nobody_listens: list[Any]) -> None:
    with pytest.raises(ValueError) as error:
        load_model("someone/zzzz")  # with the real client of the hub, which looks at its cache only
    assert nobody_listens == [("hub.example", 443, 3.0)]
    assert str(error.value) == (
        "model='someone/zzzz' is neither a well-known name nor a folder, and the hub is unreachable and its local "
        f"cache has nothing of that name; {EXPECTED_NAMES}. List the well-known names: "
        "hf-memopt estimate --list-models"
    )


def test_offline_hub_answers_by_itself() -> None:
    with pytest.raises(ValueError) as error:
        load_model("someone/zzzz")
    assert str(error.value).startswith(
        "model='someone/zzzz' is neither a well-known name nor a folder, and the hub is offline (HF_HUB_OFFLINE is set)"
    )


def test_id_on_the_hub_is_read_from_its_config(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.bert_config(architectures=["BertForTokenClassification"]).save_pretrained(tmp_path)
    asked: list[tuple[str, str, bool]] = []

    def download(repository: str, file: str, *, local_files_only: bool) -> str:
        asked.append((repository, file, local_files_only))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    loaded = load_model("someone/gpt2")  # a well-known name of another organisation is not the known model
    assert asked == [("someone/gpt2", "config.json", True)]
    assert (loaded.name, type(loaded.model).__name__) == ("someone/gpt2", "BertForTokenClassification")


@pytest.mark.parametrize(
    ("endpoint", "proxies", "connected"),
    [
        ("https://hub.example", {}, [("hub.example", 443)]),
        ("http://127.0.0.1:8080/hub", {}, [("127.0.0.1", 8080)]),
        ("https://hub.example", {"https": "http://proxy.example:3128"}, []),
    ],
)
def test_hub_that_answers_or_stands_behind_a_proxy_is_asked(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, endpoint: str, proxies: dict[str, str], connected: list[Any]
) -> None:
    tiny.bert_config().save_pretrained(tmp_path)
    local: list[bool] = []
    addresses: list[Any] = []

    def connect(address: Any, timeout: float) -> Any:
        addresses.append(address)
        return nullcontext()

    def download(repository: str, file: str, *, local_files_only: bool) -> str:
        local.append(local_files_only)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(hub, "getproxies", lambda: proxies)
    load_model("someone/bert")
    assert (addresses, local) == (connected, [False])


def test_a_hub_that_never_answers_costs_the_patience_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server and every address may each wait for a timeout of their own; together they get the patience."""
    released = threading.Event()

    def wait(address: Any, timeout: float) -> Any:
        released.wait(30)
        return nullcontext()

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(socket, "create_connection", wait)
    started = time.monotonic()
    assert not hub.hub_answers()
    assert time.monotonic() - started < 10
    released.set()


def test_tasks_are_the_heads() -> None:
    assert tuple(model_tasks.HEADS) == models.TASKS


def test_folder_without_config_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError) as error:
        load_model(str(tmp_path))
    assert str(error.value) == (
        f"model={str(tmp_path)!r} is a folder without config.json; expected one that save_pretrained has written. "
        "Pass the folder of a model"
    )


def _foreign_folder(folder: Any, content: str | bytes | None = None, **changed: Any) -> str:
    """Write a config.json that somebody else might have written; return its folder."""
    if content is None:
        content = json.dumps({**tiny.bert_config().to_dict(), **changed})
    (folder / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return str(folder)


NOT_UNDERSTOOD = f"has a config.json that transformers {transformers.__version__} does not understand"
EXPECTED_CONFIG = "expected a configuration that transformers can build. Correct it, or pass the module"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 0}, "cannot be built (ZeroDivisionError: integer modulo by zero)"),
        (
            {"hidden_size": -32, "num_attention_heads": 2},
            "cannot be built (RuntimeError: Trying to create tensor with negative dimension -32: [100, -32])",
        ),
        (
            {"hidden_size": 2**40},
            "cannot be built (RuntimeError: Storage size calculation overflowed with "
            "sizes=[1099511627776, 1099511627776])",
        ),
        ({"hidden_act": "none-such"}, "cannot be built (KeyError: 'none-such')"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": "maybe"}},
            "cannot be built (TypeError: load_in_4bit must be a boolean)",
        ),
        (
            {"num_hidden_layers": 10**9},
            f"{NOT_UNDERSTOOD} (ValueError: num_hidden_layers=1000000000 is more than any model has, at most 500)",
        ),
        (
            {"depths": [2, 10**9]},
            f"{NOT_UNDERSTOOD} (ValueError: depths=[2, 1000000000] is more than any model has, at most 500)",
        ),
        (
            {"num_labels": 10**12},
            f"{NOT_UNDERSTOOD} (ValueError: num_labels=1000000000000 is more than any model has, at most 1,000,000)",
        ),
        ({"num_hidden_layers": -1}, f"{NOT_UNDERSTOOD} (ValueError: num_hidden_layers=-1 is negative)"),
    ],
)
def test_foreign_configuration_that_breaks_transformers_is_one_error(
    tmp_path: Any, changed: dict[str, Any], message: str
) -> None:
    folder = _foreign_folder(tmp_path, **changed)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    name = folder if NOT_UNDERSTOOD in message else tmp_path.name
    assert str(error.value) == f"model={name!r} {message}; {EXPECTED_CONFIG}"
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    "content",
    [
        '{"model_type": "none-such"}',
        '{"model_type": ["bert"]}',
        '{"model_type": "bert", "num_attention_heads": null}',
        '{"model_type": "bert", "hidden_size": 1e999}',
        '{"model_type": "bert", "hidden_size": %s}' % ("9" * 5000),
        '{"model_type": "bert", "id2label": 3}',
        '{"model_type": "bert", "dtype": "none-such"}',
        '{"model_type": "bert", "quantization_config": "4bit"}',
        '{"model_type": "bert", "x": %s}' % ("[" * 100_000 + "]" * 100_000),
        '{"model_type": "bert", "x": %s}' % ("[" * 900 + "]" * 900),
        '{"model_type": "bert"',
        "",
        "[1, 2]",
        "null",
        '"bert"',
        bytes(range(256)),
        '{"model_type": "bert"}'.encode("utf-16"),
    ],
    ids=repr,
)
def test_config_that_transformers_does_not_understand_is_refused(tmp_path: Any, content: str | bytes) -> None:
    folder = _foreign_folder(tmp_path, content)
    with pytest.raises(ValueError) as error:
        load_model(folder)
    text = str(error.value)
    assert text.startswith(f"model={folder!r} {NOT_UNDERSTOOD} (")
    assert text.endswith(f"); {EXPECTED_CONFIG}")
    assert "\n" not in text


@pytest.mark.parametrize("auto_map", ["AutoConfig", "AutoModelForCausalLM"])
def test_code_of_a_folder_is_never_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, auto_map: str) -> None:
    """Nothing is asked, whatever would be answered; a known model type is built without the folder's code."""
    own = {"model_type": "own"} if auto_map == "AutoConfig" else {}
    folder = _foreign_folder(tmp_path, **own, auto_map={auto_map: "code.Own"}, architectures=None)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    if own:
        with pytest.raises(ValueError) as error:
            load_model(folder)
        assert str(error.value) == (
            f"model={folder!r} {NOT_UNDERSTOOD} without Python code of its own, and no such code is run; expected a "
            "model type of transformers. Load it yourself in Python and pass the module"
        )
    else:
        assert type(load_model(folder, task="causal-lm").model).__name__ == "BertLMHeadModel"
    assert not (tmp_path / "ran").exists()


def test_name_that_no_file_can_have_is_refused() -> None:
    name = "a" * 3000
    with pytest.raises(ValueError) as error:
        load_model(name)
    assert str(error.value) == (
        f"model={name!r} cannot be looked up (File name too long); expected a name, or a readable folder. "
        "Pass model='bert-base-uncased'"
    )


@pytest.mark.parametrize("size", [-3, 2**40])
def test_size_of_a_configuration_that_no_batch_can_have_is_refused(size: int) -> None:
    model = load_model(_config("vit")).model
    model.config.image_size = size
    with pytest.raises(ValueError) as error:
        example_batch(model, batch_size=2, seq_len=None)
    assert str(error.value) == (
        f"batch=<tensor of shape (2, 3, {size}, {size})> cannot be created; expected sizes of 1 or more, and below "
        "2**63 bytes in total. Correct the configuration, or pass a smaller batch_size"
    )


BERT_TASKS = (
    "'causal-lm', 'masked-lm', 'sequence-classification', 'token-classification', 'question-answering', "
    "'multiple-choice'"
)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (
            lambda: _config("bert", architectures=["BertForNextSentencePrediction"]),
            {},
            "architectures=['BertForNextSentencePrediction'] is not a head with a known loss and batch; expected "
            f"one for {BERT_TASKS}. Pass task='sequence-classification'",
        ),
        (
            lambda: transformers.VitsConfig(),
            {},
            "model_type='vits' has no head whose batch is known; expected a model type with one of "
            f"{', '.join(map(repr, TASKS))}. Pass a configuration of such a type",
        ),
        (
            lambda: _config("bert"),
            {"task": "seq2seq"},
            f"task='seq2seq' has no head for a model of type 'bert'; expected one of {BERT_TASKS}. Leave it out "
            "for the usual one",
        ),
        (
            lambda: _config("bert"),
            {"task": "casual-lm"},
            f"task='casual-lm' is unknown; expected one of {', '.join(map(repr, TASKS))}. Did you mean 'causal-lm'? "
            "Pass task='sequence-classification'",
        ),
        (
            lambda: _config("llama", quantization_config={"quant_method": "gptq", "bits": 4}),
            {},
            "not estimable: quantization_config of method 'gptq' has no form on the meta device; expected "
            "bitsandbytes, or plain weights. Load the model in bfloat16",
        ),
    ],
)
def test_configuration_that_cannot_be_built_is_refused(model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_model(model(), **settings)
    assert str(error.value) == message


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError) as error:
        load_model(3)  # type: ignore[arg-type]
    assert str(error.value) == (
        "model=<int> cannot be loaded; expected an nn.Module, a PretrainedConfig, or the name of a model or a "
        "folder. Pass model='bert-base-uncased'"
    )


@pytest.mark.parametrize("given", ["configuration", "module"])
def test_attention_that_needs_kernels_is_not_estimable(given: str) -> None:
    model = _config("llama") if given == "configuration" else tiny.llama()
    with pytest.raises(NotEstimableError) as error:
        load_model(model, attn_implementation="flash_attention_3")
    assert str(error.value) == (
        "not estimable: attn_implementation='flash_attention_3' needs kernels that are not installed; expected "
        "'sdpa', 'eager' or 'flash_attention_2'. Pass attn_implementation='sdpa'"
    )


@pytest.mark.parametrize(
    "model", ["bert-base-uncased", tiny.bert_config(), tiny.bert()], ids=["name", "config", "module"]
)
def test_unknown_attention_is_refused(model: Any) -> None:
    with pytest.raises(ValueError) as error:
        load_model(model, attn_implementation="spda")
    assert str(error.value) == (
        "attn_implementation='spda' is unknown; expected one of 'eager', 'sdpa', 'flash_attention_2', or another that "
        f"transformers {transformers.__version__} has registered. Did you mean 'sdpa'? Pass attn_implementation='sdpa'"
    )


def test_registered_attention_passes() -> None:
    model = load_model(tiny.bert_config(), attn_implementation="flex_attention").model
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_batch_size_that_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        example_batch(load_model(_config("bert")).model, batch_size=value, seq_len=8)
    assert str(error.value) == (f"batch_size={value!r} is invalid; expected an integer of 1 or more. Pass batch_size=1")


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("bert", {"seq_len": 0}, "seq_len=0 is invalid; expected an integer of 1 or more. Pass seq_len=1"),
        (
            "bert",
            {"seq_len": None},
            "seq_len=None is missing for BertForSequenceClassification; expected tokens per row. Pass seq_len=128",
        ),
        (
            "bert",
            {"seq_len": 513},
            "seq_len=513 is beyond the positions of BertForSequenceClassification; expected 1 to 512. Pass seq_len=512",
        ),
        (
            "vit",
            {"seq_len": 8},
            "seq_len=8 has no meaning for ViTForImageClassification, which takes images; expected none. "
            "Pass seq_len=None",
        ),
        (
            "bert",
            {"seq_len": 8, "labels_length": 8},
            "labels_length=8 has no meaning for BertForSequenceClassification; expected None for all but "
            "encoder-decoders. Remove labels_length",
        ),
        (
            "bart",
            {"seq_len": 8, "labels_length": 1025},
            "labels_length=1025 is beyond the positions of BartForConditionalGeneration; expected 1 to 1024. "
            "Pass labels_length=1024",
        ),
    ],
)
def test_lengths_that_make_no_sense_are_refused(model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        example_batch(load_model(_config(model_type)).model, batch_size=2, **settings)
    assert str(error.value) == message


def test_head_of_ones_own_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        example_batch(nn.Linear(2, 2), batch_size=2, seq_len=8)
    assert str(error.value) == (
        "model=<Linear> has no head whose batch is known; expected one of transformers' for "
        f"{', '.join(map(repr, TASKS))}. Load the model with its head, for example: "
        "AutoModelForSequenceClassification.from_pretrained(...)"
    )


def test_base_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model=<BertModel> has no head whose batch is known; "):
        example_batch(load_model(transformers.BertModel(tiny.bert_config())).model, batch_size=2, seq_len=8)


def test_a_class_without_a_head_gets_the_usual_one_and_a_note() -> None:
    model = load_model(_config("bert", architectures=["BertModel"])).model
    assert type(model).__name__ == "BertForSequenceClassification"
    assert list(assumed_inputs(model, StepSettings())) == [
        "BertModel has no loss: estimated as BertForSequenceClassification; give task for another head"
    ]


def test_image_size_that_a_configuration_does_not_tell_is_224_and_said() -> None:
    model = load_model(transformers.ResNetConfig(depths=[1], hidden_sizes=[8], embedding_size=8)).model
    for given, side, said in ((None, 224, "pictures of 224 x 224 pixels (image_size)"), (64, 64, "")):
        settings = StepSettings(image_size=given)
        shapes = _shapes(example_batch(model, batch_size=2, seq_len=None, settings=settings))
        assert shapes["pixel_values"] == ((2, 3, side, side), FLOATS)
        assert "".join(assumed_inputs(model, settings)) == said


def test_a_configuration_with_bitsandbytes_quantisation_is_built_of_stand_ins() -> None:
    config = _config("llama", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    plain = load_model(_config("llama")).model
    loaded = load_model(config)
    linears = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    assert {type(loaded.model.get_submodule(name)).__name__ for name in linears} == {"Linear4bitStandIn"}
    assert loaded.key != load_model(_config("llama")).key
    assert config.quantization_config is not None


def test_flash_attention_2_is_built_without_its_package_and_found_in_a_module() -> None:
    loaded = load_model(_config("llama"), attn_implementation="flash_attention_2").model
    assert loaded.config._attn_implementation == "hf_memopt_fa2"
    given = load_model(_config("llama")).model
    given.config._attn_implementation = "flash_attention_2"  # as from_pretrained leaves it where the package is
    assert load_model(given).model.config._attn_implementation == "hf_memopt_fa2"
    assert given.config._attn_implementation == "flash_attention_2"
