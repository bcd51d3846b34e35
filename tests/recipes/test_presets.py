"""The presets hold what they are meant for, by the estimate; what they say and build is in ``test_recipe.py``."""

from __future__ import annotations

import pytest

from hf_memopt import estimate, recipe

SMALLEST_CARDS = {
    "4gb-gpu": ("GTX 1650", "RTX 3050 4GB"),
    "6gb-gpu": ("RTX 2060", "RTX 4050 Laptop"),
    "8gb-gpu": ("RTX 3050 8GB",),
    "12gb-gpu": ("RTX 3060 12GB",),
    "16gb-gpu": ("T4",),
    "24gb-gpu": ("A10",),
    "40gb-gpu": ("A100 40GB",),
    "80gb-gpu": ("H100",),
}


@pytest.mark.parametrize(("name", "card"), [(name, card) for name, cards in SMALLEST_CARDS.items() for card in cards])
def test_bert_large_at_128_tokens_fits_the_smallest_cards_of_a_preset(name, card) -> None:
    chosen = recipe(name)
    found = estimate(
        "bert-large-uncased",
        batch_size=chosen.per_device_train_batch_size,
        seq_len=128,
        recipe=chosen,
        gpu=card,
    )
    assert found.fits, found.table()
    assert found.settings.gradient_accumulation_steps * found.batch_size == 32
