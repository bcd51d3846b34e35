"""Micro-batches under FSDP2, where a forward pass gathers the weights from all processes.

All processes have to run as many forward and backward passes, or those that run more would wait for ever. So they agree
on the number of micro-batches of each accumulation step: the most that any of them needs. The others cut their batches
into smaller micro-batches; where rows are fewer than that, a row is run again with weight 0.

The loss is asked in as many passes too, two rows at once and each alone, whatever a batch holds: only a sum over labels
that ``num_items_in_batch`` divides is accepted, since its parts add up without weights, which a process would have to
find out by passes of its own. ``compute_loss_func=exact_loss(model)`` makes such a sum of a mean over rows.

The price: one more wait for the other processes per accumulation step. Gradients are reduced in each micro-batch, not
in the last one alone, so that no process holds those of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_memopt.techniques.microbatching.loss_rules import LEAST_LOSS, tolerances
from hf_memopt.techniques.microbatching.probed_loss import Items, NotSplittableError, ProbedLoss
from hf_memopt.techniques.microbatching.splitting import row_count, splittable_batch_reason

__all__ = ["agree_that_losses_add_up", "groups_in_lockstep"]

UNKNOWN, ADDS_UP, REFUSED = 0, 1, 2  # the larger of two verdicts counts


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


def agree_that_losses_add_up(trainer: Any, model: nn.Module, inputs: Mapping[str, Any], items: Items) -> bool:
    """Return whether the losses of rows are known to add up; False if no batch shows it (a loss of 0, single rows).

    Raises:
        NotSplittableError: in every process, if they do not in one of them, or if its batch has no rows to take.
    """
    reason = splittable_batch_reason(inputs)
    if _most(trainer, UNKNOWN if reason is None else REFUSED) == REFUSED:
        raise NotSplittableError(trainer.model, reason or "the batch of another process cannot be split")
    both, *alone = ProbedLoss(trainer, model, items).two_rows(inputs)
    verdict = UNKNOWN
    if row_count(inputs) > 1 and abs(float(both)) > LEAST_LOSS:
        relative, _ = tolerances(trainer, both)
        adds_up = math.isclose(float(both), sum(map(float, alone)), rel_tol=relative)
        verdict = ADDS_UP if adds_up else REFUSED
    verdict = _most(trainer, verdict)
    if verdict == REFUSED:
        raise NotSplittableError(
            trainer.model,
            "under FSDP2 its loss has to be a sum that num_items_in_batch divides, and the loss of two rows is not "
            "that of each added up (compute_loss_func=exact_loss(model) makes it one)",
        )
    return verdict == ADDS_UP


def _most(trainer: Any, number: int) -> int:
    """Return the largest of the numbers of all processes."""
    numbers: torch.Tensor = trainer.accelerator.gather(torch.tensor([number], device=trainer.args.device))
    return int(numbers.max())
