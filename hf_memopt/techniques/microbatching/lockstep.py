"""Micro-batches under FSDP2, where a forward pass gathers the weights from all processes.

All processes have to run as many forward and backward passes, or those that run more would wait for ever. So they agree
on the number of micro-batches of each accumulation step: the most that any of them needs. The others cut their batches
into smaller micro-batches; where rows are fewer than that, a row is run again with weight 0. Only a sum over labels
that ``num_items_in_batch`` divides is cut, since its parts add up without weights; ``compute_loss_func=exact_loss(
model)`` makes such a sum of a mean over rows.

The price: two more waits for the other processes per accumulation step. Gradients are reduced in each micro-batch, not
in the last one alone, so that no process holds those of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_memopt.techniques.microbatching.splitting import NotSplittableError

__all__ = ["groups_in_lockstep", "refuse_together"]


def refuse_together(trainer: Any, reason: str | None) -> None:
    """Raise NotSplittableError in every process if one of them has a reason."""
    if _most(trainer, int(reason is not None)):
        raise NotSplittableError(trainer.model, reason or "the batch of another process cannot be split")


def groups_in_lockstep(trainer: Any, groups: Sequence[list[int]]) -> tuple[list[list[int]], int]:
    """Cut the micro-batches of this process further, to as many as the process with the most of them has.

    Returns:
        The rows of each micro-batch, and how many more passes this process has to run, since it has too few rows.
    """
    wanted, found = _most(trainer, len(groups)), list(groups)
    while len(found) < wanted and max(map(len, found)) > 1:
        index = max(range(len(found)), key=lambda index: len(found[index]))
        largest = found[index]
        found[index : index + 1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return found, wanted - len(found)


def _most(trainer: Any, number: int) -> int:
    """Return the largest of the numbers of all processes."""
    numbers: torch.Tensor = trainer.accelerator.gather(torch.tensor([number], device=trainer.args.device))
    return int(numbers.max())
