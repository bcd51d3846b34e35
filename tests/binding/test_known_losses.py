"""Losses known by a table: what is known, how rows weigh, and that parts give loss and gradients of the whole."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import auto_heads
import pytest
import torch
from torch import nn
from transformers import Trainer

import tiny
from hf_memopt.binding.known_losses import KnownLoss, head_counts_items, known_loss
from hf_memopt.techniques.microbatching.splitting import splittable_reason

PARTS = ([0, 1], [2, 3], [4])
LOSS, GRADIENT = 1e-5, 2e-5  # relative: stock computes most losses in float32, whatever the model's dtype
ITEMS = torch.tensor(17)


def gradients(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    zeros = (torch.zeros_like(weight) for weight in weights)
    return torch.cat([(zero if part is None else part).flatten() for part, zero in zip(found, zeros, strict=True)])


def errors(trainer: Any, known: KnownLoss, batch: dict[str, Any], items: torch.Tensor | None) -> tuple[float, float]:
    """Return the relative errors of the loss and the gradient of parts against those of the whole batch."""

    def read(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        part = {name: value[rows] for name, value in batch.items()}
        loss = trainer.compute_loss(trainer.model, part, num_items_in_batch=items)
        return loss.detach().double(), gradients(loss, trainer.model)

    weights = known.row_weights(batch)
    whole_loss, whole = read(list(range(auto_heads.ROWS)))
    loss, gradient = torch.zeros_like(whole_loss), torch.zeros_like(whole)
    for rows in PARTS:
        weight = 1.0 if weights is None else sum(weights[row] for row in rows)
        part_loss, part = read(rows)
        loss, gradient = loss + weight * part_loss, gradient + weight * part
    of_loss = (loss - whole_loss).abs() / whole_loss.abs().clamp(min=1e-3)
    return float(of_loss), float((gradient - whole).norm() / whole.norm().clamp(min=1e-12))


def outcome(task: str, kind: str, name: str, folder: Path) -> str:
    """Return what came of a head: "known", why it is not, or what is wrong."""
    try:
        model = auto_heads.build(task, kind, name)
        batch = auto_heads.batch(task, model)
        trainer = Trainer(model, tiny.arguments(folder))
        whole = [trainer.compute_loss(model, {key: part.clone() for key, part in batch.items()}) for _ in range(2)]
        is_finite = bool(gradients(whole[0], model).isfinite().all())
    except Exception as error:  # a config with other names for its sizes, a batch that the head does not take
        return f"not built: {type(error).__name__}: {error}".partition("\n")[0]
    if whole[0] != whole[1] or not is_finite:
        return f"not built: its {'loss is random' if is_finite else 'gradient is NaN'}"
    known = known_loss(trainer, None)
    if isinstance(known, str):
        return f"unknown: {known}"
    if (reason := splittable_reason(model)) is not None:
        return f"rows depend on each other: {reason}"
    for items in (None, ITEMS):
        trainer.model_accepts_loss_kwargs = items is not None
        known = known_loss(trainer, items)
        assert isinstance(known, KnownLoss)
        if (reason := known.reason_against(batch)) is not None:
            return f"WRONG: {reason}"
        of_loss, of_gradient = errors(trainer, known, dict(batch), items)
        if not (of_loss <= LOSS and of_gradient <= GRADIENT):
            return f"WRONG: {known.over}, items {items}: loss {of_loss:.1e}, gradient {of_gradient:.1e}"
        if items is not None and (counts := head_counts_items(model)) is not None:
            loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
            half = trainer.compute_loss(model, dict(batch), num_items_in_batch=2 * items)
            if counts != torch.isclose(loss, 2 * half, rtol=1e-4):
                return f"WRONG: head_counts_items is {counts}"
    return "known"


@pytest.mark.slow
@pytest.mark.parametrize("task", auto_heads.TASKS)
def test_every_known_head_is_what_the_table_says(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models made with sizes that nobody uses
        logging.disable(logging.WARNING)
        try:
            for kind, name in auto_heads.heads(task):
                result = outcome(task, kind, name, tmp_path)
                found[result.partition(":")[0]].append(f"{name} {result.partition(':')[2]}")
        finally:
            logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(f"\n{task}: " + ", ".join(f"{len(names)} {result}" for result, names in sorted(found.items())))
        for result in sorted(set(found) - {"known"}):
            print(*(f"    {result}: {name}" for name in found[result]), sep="\n")
    assert not found["WRONG"]
    assert found["known"]
