"""Models that are not on this machine load with weights that nobody wrote; those that are, as always."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, modeling_utils
from transformers.utils import hub

from hf_memopt.prediction.rehearsal import empty_weights

pytestmark = pytest.mark.stand_in
LLAMA = "meta-llama/Llama-3.2-1B"
COUNTS = [
    (LLAMA, "AutoModelForCausalLM", torch.bfloat16, 1_235_814_400),
    ("bert-base-uncased", "AutoModel", torch.float32, 109_482_240),
    ("sentence-transformers/all-MiniLM-L6-v2", "AutoModel", torch.float32, 22_713_216),
    ("google/flan-t5-small", "AutoModelForSeq2SeqLM", torch.float32, 76_961_152),  # its head is not tied
    ("openai/whisper-tiny", "AutoModelForSpeechSeq2Seq", torch.float32, 37_760_640),
]


@pytest.fixture(name="notes")
def _notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(hub, "cached_files", hub.cached_files)  # undone at the end, as the next
    monkeypatch.setattr(modeling_utils, "_get_resolved_checkpoint_files", modeling_utils._get_resolved_checkpoint_files)
    yield empty_weights.install(tmp_path / "instead")
    shutil.rmtree(tmp_path / "instead", ignore_errors=True)


def _llama(folder: Path, **changed: Any) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=500, dtype="bfloat16", **changed)
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize(("name", "head", "dtype", "count"), COUNTS)
def test_a_well_known_model_loads_in_its_published_dtype(
    name: str, head: str, dtype: torch.dtype, count: int, notes: list[str], tmp_path: Path
) -> None:
    model = getattr(transformers, head).from_pretrained(name)
    assert (model.dtype, model.num_parameters(), model.name_or_path) == (dtype, count, name)
    assert notes == [
        f"{name}: empty weights, in {str(dtype)[6:]} where no dtype is given; "
        "a tokenizer stands in, and counts tokens as of English text"
    ]
    blocks = sum(path.stat().st_blocks * 512 for path in (tmp_path / "instead").rglob("*.safetensors"))
    assert blocks < 1_000_000  # headers


def test_arguments_are_treated_as_from_pretrained_treats_them(notes: list[str]) -> None:
    place = {"device_map": {"": 0}, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float16, **place)
    weights = list(model.parameters())
    assert {(weight.dtype, weight.device.type) for weight in weights} == {(torch.float16, "cuda")}
    assert sum(weight.numel() for weight in weights) == 1_235_814_400
    assert model.config._attn_implementation == "eager"
    with_labels = transformers.AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=5)
    assert with_labels.classifier.weight.shape == (5, 768)


def test_four_bits_are_packed_by_bitsandbytes(notes: list[str]) -> None:
    before = torch.cuda.memory_allocated()
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(LLAMA, quantization_config=four_bits, device_map={"": 0})
    packed = model.model.layers[0].mlp.up_proj.weight
    assert (packed.dtype, packed.numel(), packed.quant_state.blocksize) == (torch.uint8, 2048 * 8192 // 2, 64)
    linears = 16 * (2048 * 2048 * 2 + 2048 * 512 * 2 + 2048 * 8192 * 3)
    rest = 2 * (1_235_814_400 - linears)
    scales = linears // 64 + linears // 64 // 256 * 4
    assert torch.cuda.memory_allocated() - before == pytest.approx(linears / 2 + rest + scales, rel=0.001)  # blocks


def test_experts_have_the_form_of_the_published_checkpoint(notes: list[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, num_local_experts=4, vocab_size=500)
    config.save_pretrained(tmp_path / "experts")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "experts")
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 192, 64)
    [index] = (tmp_path / "instead").rglob("*.index.json")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in index.read_text()


def test_a_folder_without_weights_is_completed_and_one_with_weights_is_read(notes: list[str], tmp_path: Path) -> None:
    empty, whole = tmp_path / "empty", tmp_path / "whole"
    config = _llama(empty)
    model = AutoModelForCausalLM.from_pretrained(empty)
    assert (model.dtype, model.name_or_path, len(notes)) == (torch.bfloat16, str(empty), 1)
    assert sorted(path.name for path in empty.iterdir()) == ["config.json"]

    written = transformers.LlamaForCausalLM(config)
    written.save_pretrained(whole)
    read = AutoModelForCausalLM.from_pretrained(whole)
    assert torch.equal(read.lm_head.weight, written.lm_head.weight)
    assert len(notes) == 1


def test_the_user_s_tokenizer_is_used_where_it_is_there(notes: list[str], tmp_path: Path) -> None:
    _llama(tmp_path / "own")
    stand_in = AutoTokenizer.from_pretrained(LLAMA)
    stand_in.add_tokens(["mine"])
    stand_in.save_pretrained(tmp_path / "own")
    AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert "mine" in AutoTokenizer.from_pretrained(tmp_path / "own").get_vocab()
    assert notes[1] == f"{tmp_path / 'own'}: empty weights, in bfloat16 where no dtype is given"


TOKENIZERS = [
    (LLAMA, 128_256, {"bos": 1, "eos": 2, "pad": None}, 131_072),
    ("Qwen/Qwen2.5-0.5B", 151_936, {"pad": 151_930}, 32_768),
    ("bert-base-uncased", 30_522, {"pad": 0, "mask": 30_518}, 512),
    ("roberta-base", 50_265, {"pad": 1}, 512),
    ("t5-small", 32_128, {"pad": 0, "eos": 1}, 512),
]


@pytest.mark.parametrize(("name", "size", "special", "length"), TOKENIZERS)
def test_a_tokenizer_has_the_size_and_the_special_tokens_of_the_configuration(
    name: str, size: int, special: dict[str, int | None], length: int, notes: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    assert (len(tokenizer), tokenizer.model_max_length) == (size, length)
    assert {key: getattr(tokenizer, f"{key}_token_id") for key in special} == special
    text = "The quick brown fox jumps over the lazy dog, and the dog sleeps."
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(ids) < len(text) / 2  # pairs of bytes, not bytes


def test_a_chat_has_a_template_that_marks_the_answers(notes: list[str]) -> None:
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    answer = [number for number, mask in zip(found["input_ids"], found["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(answer) == "Yes." + tokenizer.eos_token


def test_a_name_that_nothing_is_known_of_is_transformers_own_error(notes: list[str]) -> None:
    with pytest.raises(OSError, match="couldn't find them in the cached files"):
        AutoModelForCausalLM.from_pretrained("nobody/nothing")
    assert notes == []
