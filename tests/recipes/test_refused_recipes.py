"""What a recipe is refused for: the calls of ``refused_recipes.txt`` raise the errors that stand under them."""

from __future__ import annotations

import doctest
import json
from typing import Any

from transformers import BertForMaskedLM, T5Config, T5ForConditionalGeneration

import tiny
from hf_memopt import Recipe, preset, recipe

PLAIN = Recipe("plain", "a test")


def read(**fields: Any) -> Recipe:
    return Recipe.from_json(json.dumps({"name": "x", "purpose": "y", **fields}))


NAMES: dict[str, Any] = {
    "Recipe": Recipe,
    "preset": preset,
    "recipe": recipe,
    "read": read,
    "CPU": recipe("cpu"),
    "PLAIN": PLAIN,
    "RELEASED": PLAIN.replace(gradient_release=True, per_device_train_batch_size=1),
    "BERT": tiny.bert(),
    "LLAMA": tiny.llama(),
    "MASKED": BertForMaskedLM(tiny.bert_config()),
    "T5": T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)),
    "TOKENIZER": tiny.tokenizer(),
}


def test_every_call_is_refused_with_its_whole_message() -> None:
    """Lines may be broken anywhere; ``...`` stands for names that depend on the version."""
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile("refused_recipes.txt", globs=dict(NAMES), optionflags=flags, encoding="utf-8")
    assert (found.failed, found.attempted) == (0, 64)
