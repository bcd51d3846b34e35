"""What the tracker answers to code that asks for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_memopt import NotEstimableError
from hf_memopt.prediction.memory.cuda import CudaSemantics
from hf_memopt.prediction.memory.recording.step import recording
from hf_memopt.prediction.memory.tracking import StorageTracker


def asking(module: str) -> tuple[Callable[..., bool], Callable[..., bool]]:
    """Return two questions about two tensors, asked by the code of a module."""
    names: dict[str, Any] = {"__name__": module, "torch": torch}
    exec("def every(x, y):\n    return bool((x == y).all())\ndef equal(x, y):\n    return torch.equal(x, y)\n", names)
    return names["every"], names["equal"]


@pytest.mark.parametrize("module", ["transformers.masking_utils", "transformers.modeling_attn_mask_utils"])
@pytest.mark.parametrize("padding", [True, False])
def test_questions_about_a_mask_have_one_answer_and_others_none(padding: bool, module: str) -> None:
    """With padding no mask is all ones; real tensors answer for themselves.

    An early exit, or a layer dropped by a coin on the GPU: the tracker cannot know the side it falls on.
    """
    ones, other = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    with recording(StorageTracker(padding=padding), CudaSemantics()):
        for ask in asking(module):
            assert ask(ones, other) is not padding
            assert ask(torch.ones(2), torch.ones(2))
        assert torch.tensor(5).item() == 5
        for line, ask in zip((2, 4), asking("a.model"), strict=True):
            with pytest.raises(NotEstimableError) as error:
                ask(ones, other)
            assert str(error.value).startswith(f"not estimable: a.model, line {line}, lets values on the GPU decide")


# ---- In place
