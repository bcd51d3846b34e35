"""A recipe gives the reason of what it chose, and of nothing else."""

from __future__ import annotations

import tiny
from hf_memopt import custom_gpu, plan
from hf_memopt.technique_list import TECHNIQUES


def test_what_is_not_used_gives_no_reason() -> None:
    found = plan(tiny.bert_config(), gpu=custom_gpu("4GiB", "8.6"), task="sequence-classification", seq_len=32)
    recipe = found.recipe
    assert recipe.reasons
    unused = [one for one in TECHNIQUES.values() if one.why and not one.pays_for and one.title not in found.chosen.name]
    assert unused
    assert not {one.why for one in unused} & set(recipe.reasons.values())
