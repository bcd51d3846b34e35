"""Values of meta tensors that follow from the batch: known where every argument is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_memopt.prediction.memory.recording.step import recording
from hf_memopt.prediction.memory.tracking import StorageTracker


def _ids() -> torch.Tensor:
    tensor: Any = torch.empty((2, 3), dtype=torch.int64, device="meta")
    tensor.known_values = torch.tensor([[5, 0, 7], [5, 9, 0]])
    found: torch.Tensor = tensor
    return found


@pytest.mark.parametrize(
    "asks",
    [
        lambda ids, hidden: (ids == 5).sum().item(),
        lambda ids, hidden: ids.max(dim=1).values.tolist(),
        lambda ids, hidden: (ids != 0).nonzero().shape,
        lambda ids, hidden: hidden[ids != 0].shape,
        lambda ids, hidden: ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100).cpu().tolist(),
        lambda ids, hidden: torch.repeat_interleave(ids[0], ids[0]).shape,
        lambda ids, hidden: bool((ids.clone().add_(torch.arange(3, device=ids.device)) > 9).any()),
    ],
)
def test_what_follows_from_the_batch_is_as_on_the_host(asks: Callable[[Any, Any], Any]) -> None:
    ids, tracker = _ids(), StorageTracker()
    tracker.know([ids])
    with recording(tracker):
        found = asks(ids, torch.empty(2, 3, 4, device="meta"))
    assert found == asks(ids.known_values, torch.empty(2, 3, 4))  # type: ignore[attr-defined]
