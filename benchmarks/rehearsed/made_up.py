"""Data that the programs train on, generated: texts, rows of tokens, conversations, preferences, pictures, sounds."""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset

WORDS = "the of a memory that is in and to gradient weight layer batch token step loss"


def texts(count: int = 64, longest: int = 400, seed: int = 0) -> list[str]:
    """Return texts of a quarter to all of ``longest`` words."""
    draw, words = random.Random(seed), WORDS.split()
    return [" ".join(draw.choices(words, k=draw.randint(longest // 4, longest))) for _ in range(count)]


def tokens(tokenizer: Any, longest: int = 512, count: int = 64) -> Dataset:
    """Return texts as tokens, cut to ``longest``, for a language model."""
    return Dataset.from_dict(dict(tokenizer(texts(count, longest), truncation=True, max_length=longest)))


def labelled(tokenizer: Any, longest: int = 512, count: int = 64) -> Dataset:
    """Return texts as tokens with one of two classes each."""
    return tokens(tokenizer, longest, count).add_column("labels", [place % 2 for place in range(count)])


def prompts(count: int = 64, longest: int = 100, **columns: Any) -> Dataset:
    """Return prompts, with other columns."""
    return Dataset.from_dict({"prompt": texts(count, longest), **columns})


def preferences(count: int = 64, longest: int = 300) -> Dataset:
    """Return prompts with a chosen and a rejected answer."""
    return prompts(count, chosen=texts(count, longest, seed=1), rejected=texts(count, longest, seed=2))


class Pictures(torch.utils.data.Dataset[Any]):
    """Pictures of one size as tensors, with what else belongs to a row."""

    def __init__(self, size: int, **columns: Any) -> None:
        self.size, self.columns = size, columns

    def __len__(self) -> int:
        return 256

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"pixel_values": torch.zeros(3, self.size, self.size), **self.columns}
