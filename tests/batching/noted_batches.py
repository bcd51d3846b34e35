"""A Trainer on a tiny BERT that notes which examples each of its batches holds."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

import tiny
from hf_memopt import BucketedCollator


def make_trainer(
    output_dir: Any, view: Any, batch_size: int | None, **settings: Any
) -> tuple[Trainer, list[list[int]]]:
    """Return a trainer and the list that its forward passes fill; an example's first token is 5 + its number."""
    model, seen = tiny.bert(), []
    model.register_forward_pre_hook(
        lambda module, _, kwargs: seen.append((kwargs["input_ids"][:, 0] - 5).tolist()) if module.training else None,
        with_kwargs=True,
    )
    given = {"per_device_train_batch_size": batch_size or 1, "optim": "adamw_torch", "learning_rate": 1e-3, **settings}
    args = tiny.arguments(output_dir, **given)
    return Trainer(model, args, train_dataset=view, data_collator=BucketedCollator(tiny.tokenizer())), seen


def note_shapes(model: Any) -> list[tuple[int, ...]]:
    """Return the list that the shapes of a model's ids go to."""
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen
