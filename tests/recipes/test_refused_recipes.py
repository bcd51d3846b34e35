"""What a recipe is refused for: the calls of ``refused_recipes.txt`` raise the errors that stand under them."""

from __future__ import annotations

import doctest
import json
from typing import Any

import tiny
from hf_memopt import Recipe, plan, preset, recipe

PLAIN = Recipe("plain", "a test")


def read(**fields: Any) -> Recipe:
    return Recipe.from_json(json.dumps({"name": "x", "purpose": "y", **fields}))


NAMES: dict[str, Any] = {
    "Recipe": Recipe,
    "plan": plan,
    "preset": preset,
    "recipe": recipe,
    "read": read,
    "CPU": recipe("cpu"),
    "PLAIN": PLAIN,
    "RELEASED": PLAIN.replace(gradient_release=True, per_device_train_batch_size=1),
    "LLAMA": tiny.llama(),
}


def test_every_call_is_refused_with_its_whole_message() -> None:
    """Lines may be broken anywhere; ``...`` stands for names that depend on the version."""
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile("refused_recipes.txt", globs=dict(NAMES), optionflags=flags, encoding="utf-8")
    assert (found.failed, found.attempted) == (0, 53)
