"""Suggestions for misspelt names: what begins alike, then a typing error, and none rather than a wrong one."""

from __future__ import annotations

import pytest

from hf_memopt.errors import did_you_mean, nearest
from hf_memopt.prediction.memory.models import known_models
from hf_memopt.prediction.memory.optimizers.formulas import FAMILIES

MODELS, OPTIMIZERS = tuple(known_models()), tuple(FAMILIES)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("adamw9", OPTIMIZERS, "adamw_torch"),
        ("adamw", OPTIMIZERS, "adamw_torch"),
        ("adamw8bit", OPTIMIZERS, "adamw_8bit"),
        ("AdamW_Torch_Fuse", OPTIMIZERS, "adamw_torch_fused"),
        ("adafctor", OPTIMIZERS, "adafactor"),
        ("muon", OPTIMIZERS, None),
        ("lamb", OPTIMIZERS, None),
        ("gpt-2", MODELS, "gpt2"),
        ("bert-larg", MODELS, "bert-large-uncased"),
        ("bret-base-uncased", MODELS, "bert-base-uncased"),
        ("llama3.2-1b", MODELS, "Llama-3.2-1B"),
        ("lama-3.2-1b", MODELS, "Llama-3.2-1B"),
        ("Qwen2.5-1.5", MODELS, "Qwen2.5-1.5B"),
        ("whisper-smal", MODELS, "whisper-small"),
        ("dinov3-base", MODELS, None),
        ("gpt-oss-safeguard-20b", MODELS, None),
        ("Qwen2-Audio-7B", MODELS, None),
        ("DeepSeek-OCR", MODELS, None),
        ("paraphrase-mpnet-base-v2", MODELS, None),
        ("hubert-base-ls960", MODELS, None),
        ("detr-resnet-50", MODELS, None),
        ("mymodel", MODELS, None),
        ("missing.jsonl", ("run.json", "train.py"), None),
        ("tain.jsonl", ("run.json", "train.jsonl"), "train.jsonl"),
        ("RX 5701", ("RTX 5070",), None),
        ("MX450", ("MI250",), None),
        ("bf61", ("fp16", "bf16"), "bf16"),
        ("paln", ("presets", "plan"), "plan"),
        ("x", ("x1", "y"), None),
        ("", ("x",), None),
        (None, ("x",), None),
        ("x", (None, 1), None),
    ],
)
def test_what_is_suggested(name: object, known: tuple[object, ...], meant: str | None) -> None:
    assert nearest(name, known) == meant
    assert did_you_mean(name, known) == (f" Did you mean {meant!r}?" if meant else "")
