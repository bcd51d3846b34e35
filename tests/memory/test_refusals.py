"""Every call that the estimate refuses, each with its whole message: the rows of ``refusals.csv``."""

from __future__ import annotations

import csv
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.nn import Embedding4bit, Embedding8bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertModel, BitsAndBytesConfig, ViTConfig, VitsConfig

import tiny
from hf_memopt import NotEstimableError, estimate, estimate_from_arguments
from hf_memopt.gpus import find_gpu
from hf_memopt.types import StepSettings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft

TASKS = (
    *("speech-seq2seq", "seq2seq", "causal-lm", "image-text-to-text", "masked-lm", "sequence-classification"),
    *("token-classification", "question-answering", "multiple-choice", "image-classification"),
    *("zero-shot-image-classification", "semantic-segmentation", "object-detection", "ctc", "audio-classification"),
)
WORDS = {  # of the table, and what stands for them in a message
    "<tasks>": ", ".join(map(repr, TASKS)),
    "<fields>": ", ".join(item.name for item in dataclasses.fields(StepSettings)),
    "<transformers>": transformers.__version__,
}


def of(model: Any, **settings: Any) -> Any:
    """Estimate a small step of a model."""
    sizes = {} if "per_device_train_batch_size" in settings else {"batch_size": 2}
    return estimate(model, **{**sizes, "seq_len": 8, "gpu": "RTX 3090", **settings})


OVERRIDES = ("weights_dtype", "eval_batch_size", "batch_size", "offload_params")


def arguments(*, lengths: Any = 8, **attributes: Any) -> Any:
    """Estimate the step of ``TrainingArguments`` with these attributes, whether or not their class takes them."""
    args = tiny.arguments("out")
    vars(args).update(attributes)
    overrides = {name: attributes.pop(name) for name in OVERRIDES if name in attributes}
    return estimate_from_arguments(tiny.bert(), args, lengths, **overrides)


def bert(**changed: Any) -> Any:
    """Return a BERT with other attributes."""
    model = tiny.bert()
    for name, value in changed.items():
        setattr(model, name, value)
    return model


def compiled(place: str = "", *, in_place: bool = False) -> Any:
    """Return a BERT of which a part is compiled; the messages pin _orig_mod and _compiled_call_impl of torch."""
    model = tiny.bert()
    part = model.get_submodule(place)
    if in_place:
        part.compile(backend="eager")
        return model
    wrapped = torch.compile(part, backend="eager")
    if not place:
        return wrapped
    model.set_submodule(place, wrapped)
    return model


def quantized(model: Any, **options: Any) -> Any:
    """Return a model or a configuration that says it is quantised."""
    getattr(model, "config", model).quantization_config = options
    return model


def vit(**changed: Any) -> Any:
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32)
    model = transformers.ViTForImageClassification(config)
    for name, value in changed.items():
        setattr(model.config, name, value)
    return model


bart = partial(transformers.BartConfig, vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1)
_CALLED = (
    *(BertModel, BitsAndBytesConfig, VitsConfig, Embedding4bit, Embedding8bit, Linear8bitLt, LoraConfig, StepSettings),
    *(arguments, bert, compiled, estimate, estimate_from_arguments, get_peft_model, of, quantized, vit),
)
NAMES = {one.__name__: one for one in _CALLED} | {"bart": bart, "nn": nn, "tiny": tiny, "NAN": float("nan")}


ROWS = list(csv.DictReader(Path(__file__).with_name("refusals.csv").read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["call"][:70])
def test_it_is_refused(row: dict[str, str]) -> None:
    message = row["says"]
    for word, text in WORDS.items():
        message = message.replace(word, text)
    with pytest.raises((ValueError, TypeError)) as error:
        eval(row["call"], dict(NAMES))
    assert str(error.value) == message
    assert isinstance(error.value, NotEstimableError) == message.startswith("not estimable: ")


def test_an_unknown_gpu_gets_the_nearest_ones() -> None:
    with pytest.raises(ValueError) as expected:
        find_gpu("RTX 3065")
    with pytest.raises(ValueError) as error:
        of(tiny.bert_config(), gpu="RTX 3065")
    assert str(error.value) == str(expected.value)


def test_a_library_that_a_model_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ImportError(
            "\nTimmBackbone requires the timm library but it was not found in your environment. Install it"
        )

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", fails)
    with pytest.raises(NotEstimableError) as error:
        estimate(tiny.llama_config(vocab_size=77), batch_size=1, seq_len=8)
    cause = "TimmBackbone requires the timm library but it was not found in your environment"
    assert str(error.value) == f"not estimable: a library is missing ({cause})"
