"""What the package gives can be copied and sent to another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import hf_memopt
from hf_memopt.errors import MissingExtraError
from hf_memopt.prediction.recipes.planning import plan

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda value, protocol=protocol: pickle.loads(pickle.dumps(value, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}
LLAMA = LlamaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2)
pytestmark = pytest.mark.parametrize("way", WAYS)


def test_public_names(way: str) -> None:
    for name in hf_memopt.__all__:
        value = getattr(hf_memopt, name)
        copied = WAYS[way](value)
        assert copied == value, name
        if name.isupper():
            assert list(copied) == list(value)
            with pytest.raises(TypeError, match="does not support item assignment"):
                copied["new"] = 1
            assert repr(copied) == repr(value)


def test_the_error_of_a_missing_extra(way: str) -> None:
    error = MissingExtraError("peft", extra="lora", purpose="lora=16")
    error.add_note("a note")
    copied = WAYS[way](error)
    assert type(copied) is MissingExtraError
    assert (
        str(copied) == str(error) == ("lora=16 needs peft, which is not installed. Call: pip install 'hf-memopt[lora]'")
    )
    assert vars(copied) == vars(error)


def built_optimizers() -> list[Any]:
    rounded = hf_memopt.low_memory_optimizer(torch.optim.AdamW, rounding="kahan")
    released = hf_memopt.low_memory_optimizer(rounded, release=True, max_tensor_norm=1.0)
    return [hf_memopt.low_memory_optimizer(torch.optim.SGD, release=True), rounded, released, OfMine]


class OfMine(hf_memopt.low_memory_optimizer(torch.optim.AdamW, release=True)):  # type: ignore[misc]
    """A user's subclass is found by its name."""


def test_optimizer_classes_and_optimizers(way: str) -> None:
    for built in built_optimizers():
        assert WAYS[way](built) is built
        optimizer = WAYS[way](built([torch.nn.Parameter(torch.ones(2))], lr=0.5))
        assert type(optimizer) is built
        assert optimizer.param_groups[0]["lr"] == 0.5


@cache
def made_plan() -> Any:
    return plan(LLAMA, gpu="T4", seq_len=8, method="full", announce=str)


def test_a_plan(way: str) -> None:
    made = made_plan()
    copied = WAYS[way](made)
    assert str(copied) == str(made)
    assert copied.recipe == made.recipe
    assert (
        copied.simulation.estimate(copied.recipe, 8).total_bytes == made.simulation.estimate(made.recipe, 8).total_bytes
    )
