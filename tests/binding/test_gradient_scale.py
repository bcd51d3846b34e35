"""The scale of gradients of losses that nobody knows: decided by what they return, or left alone with a notice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, default_data_collator

import tiny
from hf_memopt import attach

LOGGER = "hf_memopt.binding.losses.gradient_scale"


class Classifier(nn.Module):
    """Logits of three classes; with a batch norm if it is asked for."""

    def __init__(self, *, has_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(100, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.has_norm = has_norm

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        hidden = self.words(input_ids).mean(1)
        return self.head(self.norm(hidden) if self.has_norm else hidden)


Loss = Callable[[Any, nn.Module, torch.Tensor, torch.Tensor, Any], torch.Tensor]


class OwnLoss(Trainer):
    """Its loss is ``loss(trainer, model, logits, labels, num_items_in_batch)``."""

    loss: Loss

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs)
        loss = type(self).loss(self, model, logits, labels, num_items_in_batch)
        return (loss, logits) if return_outputs else loss


def info_nce(logits: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(logits, dim=-1)
    return 10 * unit @ unit.roll(1, 0).T


def noise(logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    target = F.one_hot(labels, 3).float()
    return F.mse_loss(logits + 0.5 * torch.randn_like(logits), target, reduction=reduction)


def moving(t: Any, m: nn.Module, x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
    loss = F.cross_entropy(x, y)
    t.average = 0.9 * getattr(t, "average", 1.0) + 0.1 * float(loss.detach())
    return loss / t.average


def penalised(t: Any, m: nn.Module, x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
    loss = F.cross_entropy(x, y)
    (gradient,) = torch.autograd.grad(loss, m.head.weight, create_graph=True)
    return loss + gradient.square().sum()


def contrastive(t: Any, m: nn.Module, x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
    unit = F.normalize(x, dim=-1)
    others = ~torch.eye(len(unit), dtype=torch.bool)
    likeness, same = unit @ unit.T / 0.2, (y[:, None] == y) & others
    logs = likeness - likeness.masked_fill(~others, -1e9).logsumexp(1, keepdim=True)
    return -(logs * same).sum() / same.sum().clamp(min=1)


def gathered(t: Any, m: nn.Module, x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
    shifted = (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1)
    return F.cross_entropy(shifted, y)


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def total(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def rewards(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, -1)[:, 0] * (labels.float() - 3)


MEANS: dict[str, Loss] = {
    "a mean": lambda t, m, x, y, n: F.cross_entropy(x, y),
    "class weights": lambda t, m, x, y, n: F.cross_entropy(x, y, torch.tensor([1.0, 5.0, 0.2])),
    "the hardest half": lambda t, m, x, y, n: each(x, y).topk(max(1, len(y) // 2)).values.mean(),
    "a moving average": moving,
    "weight decay": lambda t, m, x, y, n: F.cross_entropy(x, y) + 0.01 * sum(w.square().sum() for w in m.parameters()),
    "a gradient penalty": penalised,
    "negative": lambda t, m, x, y, n: rewards(x, y).mean(),
    "by the step": lambda t, m, x, y, n: F.cross_entropy(x, y) * (1 + t.state.global_step),
    "large": lambda t, m, x, y, n: 1e6 * F.cross_entropy(x, y),
    "of constant value": lambda t, m, x, y, n: F.cross_entropy(x, y) / F.cross_entropy(x, y).detach(),
    "a mean of two": lambda t, m, x, y, n: (F.cross_entropy(x, y) + x.square().mean()) / 2,
    "the loss of the model": lambda t, m, x, y, n: F.cross_entropy(x / 2 * 2, y),
    "standardised": gathered,
    "InfoNCE": lambda t, m, x, y, n: F.cross_entropy(info_nce(x), torch.arange(len(x))),
    "noise": lambda t, m, x, y, n: noise(x, y, "mean"),
    "worth 0": lambda t, m, x, y, n: F.cross_entropy(x, y) - F.cross_entropy(x, y).detach(),
    "contrastive": contrastive,
    "pairs": lambda t, m, x, y, n: -F.logsigmoid(torch.sub(*x[:, 0].chunk(2))).mean(),
}
SUMS: dict[str, Loss] = {
    "the count": lambda t, m, x, y, n: total(x, y) / n,
    "the count as a number": lambda t, m, x, y, n: total(x, y) / int(n),
    "a number in the code": lambda t, m, x, y, n: total(x, y) / 8,
    "the product of the arguments": lambda t, m, x, y, n: (
        total(x, y) / (t.args.train_batch_size * t.args.gradient_accumulation_steps)
    ),
    "a count of weights": lambda t, m, x, y, n: (each(x, y) * (y + 1)).sum() / 20,
    "a mean by the steps": lambda t, m, x, y, n: F.cross_entropy(x, y) / t.args.gradient_accumulation_steps,
    "a mean by the window": lambda t, m, x, y, n: F.cross_entropy(x, y) * (1 / t.current_gradient_accumulation_steps),
    "with weight decay": lambda t, m, x, y, n: (
        total(x, y) / n + 0.01 * sum(weight.square().sum() for weight in m.parameters())
    ),
    "beside a mean": lambda t, m, x, y, n: total(x, y) / n + 0.1 * x.square().mean(),
    "negative rewards": lambda t, m, x, y, n: rewards(x, y).sum() / 8,
    "InfoNCE, a sum": lambda t, m, x, y, n: F.cross_entropy(info_nce(x), torch.arange(len(x)), reduction="sum") / 8,
    "noise, a sum": lambda t, m, x, y, n: noise(x, y, "sum") / 8,
    "worth 0, a sum": lambda t, m, x, y, n: total(x, y) - total(x, y).detach(),
}
SHAPES = [(4, 2), (1, 2), (3, 2), (2, 4)]  # per device x accumulation
# Means that show nothing, since they are worth 0, random, or made of one row. They are left alone, with a notice.
UNCLEAR: dict[str, list[tuple[int, int]]] = {
    "worth 0": SHAPES,
    "contrastive": SHAPES[1:],
    "InfoNCE": [(1, 2)],
}


def gradients(
    loss: Loss, folder: Path, shape: tuple[int, int], *, is_attached: bool, has_norm: bool = False
) -> torch.Tensor:
    """Return the gradients of one step, one after the other."""
    kind = type("Own", (OwnLoss,), {"loss": staticmethod(loss)})
    sizes = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), shape, strict=True))
    args = tiny.arguments(
        folder,
        max_steps=1,
        remove_unused_columns=False,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        **sizes,
    )
    model = Classifier(has_norm=has_norm)
    found: list[torch.Tensor] = []

    class Keeps(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            found.extend(x.grad.flatten().clone() for x in model.parameters() if x.grad is not None)

    rows = [{**row, "labels": (0, 1, 1, 2, 0, 2, 1, 0)[i % 8]} for i, row in enumerate(tiny.rows(16))]
    trainer = kind(model=model, args=args, train_dataset=rows, data_collator=default_data_collator, callbacks=[Keeps()])
    if is_attached:
        attach(trainer)
    torch.manual_seed(0)
    trainer.train()
    assert "compute_loss" not in vars(trainer)
    return torch.cat(found)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_a_loss_has_the_scale_of_what_it_returns(
    name: str, shape: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mean is divided by the accumulation steps, and nothing else."""
    loss, is_divided = MEANS.get(name) or SUMS[name], name in MEANS and shape not in UNCLEAR.get(name, ())
    if name == "pairs" and shape[0] == 1:
        pytest.skip("one row is no pair")
    for has_norm in (False, True)[: 1 + (name in ("a mean", "a number in the code") and shape[0] > 1)]:
        caplog.clear()
        stock = gradients(loss, tmp_path, shape, is_attached=False, has_norm=has_norm)
        with caplog.at_level(logging.WARNING, logger=LOGGER):
            found = gradients(loss, tmp_path, shape, is_attached=True, has_norm=has_norm)
        expected = stock / shape[1] if is_divided else stock
        print(name, shape, float(found.norm() / stock.norm()), caplog.messages)
        assert (found - expected).norm() <= 1e-6 * stock.norm()
        notices = [message for message in caplog.messages if message.startswith("gradient scale: ")]
        if name in MEANS and not is_divided:
            assert len(notices) == 1
