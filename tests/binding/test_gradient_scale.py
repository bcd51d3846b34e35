"""The scale of gradients of losses that nobody knows: decided by what they return, or left alone with a notice."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from slow_cases import slow_except
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.loss import loss_utils

import tiny
from hf_memopt import attach
from two_ranks import run_pair

LOGGER = "hf_memopt.training.binding.losses.gradient_scale"


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


CELLS = [(name, shape) for name in (*MEANS, *SUMS) for shape in SHAPES if not (name == "pairs" and shape[0] == 1)]
QUICK = [cell for cell in CELLS if cell[1] in SHAPES[:2] or cell[1] in UNCLEAR.get(cell[0], ())]


def trainer_of(loss: Loss, folder: Path, shape: tuple[int, int], model: nn.Module | None = None, **given: Any) -> Any:
    """Return a trainer of one step, which keeps its gradients, one after the other, in ``gradients``."""
    sizes = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), shape, strict=True))
    settings = {"max_steps": 1, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential", **sizes, **given}
    args = tiny.arguments(folder, remove_unused_columns=False, **settings)
    model = model or Classifier()

    class Keeps(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            trainer.gradients = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])

    kind = type("Own", (OwnLoss,), {"loss": staticmethod(loss)})
    rows = [{**row, "labels": (0, 1, 1, 2, 0, 2, 1, 0)[i % 8]} for i, row in enumerate(tiny.rows(16))]
    trainer = kind(model=model, args=args, train_dataset=rows, data_collator=default_data_collator, callbacks=[Keeps()])
    return trainer


def trained(trainer: Any) -> torch.Tensor:
    torch.manual_seed(0)
    trainer.train()
    return trainer.gradients


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("gradient scale: ")]


@pytest.mark.parametrize(("name", "shape"), slow_except(QUICK, CELLS))
def test_a_loss_has_the_scale_of_what_it_returns(
    name: str, shape: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mean is divided by the accumulation steps, and nothing else; noise is that of the run without ``attach``."""
    is_divided = name in MEANS and shape not in UNCLEAR.get(name, ())
    has_norm = name in ("large", "a number in the code") and shape[0] > 1
    loss = {**MEANS, **SUMS}[name]
    stock = trained(trainer_of(loss, tmp_path, shape, Classifier(has_norm=has_norm)))
    trainer = attach(trainer_of(loss, tmp_path, shape, Classifier(has_norm=has_norm)))
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        found = trained(trainer)
    assert (found - (stock / shape[1] if is_divided else stock)).norm() <= 1e-6 * stock.norm()
    assert "compute_loss" not in vars(trainer)
    assert [change.name for change in trainer.memopt_changes] == ["model_accepts_loss_kwargs"] * is_divided
    assert len(notices(caplog)) == 1 or is_divided or name in SUMS


LEFT = (
    "It is left as it is. If it is a mean over its batch, return it divided: "
    "loss / self.args.gradient_accumulation_steps"
)
TAKEN = (
    "It is taken for a mean over its batch. If it is normalised over all accumulated batches, set: "
    "trainer.loss_is_scaled_for_ga = True"
)


def of_four_rows(t: Any, m: nn.Module, x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
    return F.cross_entropy(x.view(4, 3), y)


SHOWN: dict[str, tuple[Loss, str]] = {
    "worth 0": (MEANS["worth 0"], f"two halves of a batch have losses of 0 and 0, both together 0, {{}} {LEFT}"),
    "InfoNCE": (MEANS["InfoNCE"], f"two halves of a batch have losses of # and #, both together #, {{}} {TAKEN}"),
    "of four rows alone": (
        of_four_rows,
        f"two halves of a batch have losses of nan and nan, both together #, {{}} {TAKEN}",
    ),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_not_clear_is_said_with_the_losses_and_the_remedy_works(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss, text = SHOWN[name]
    shown = "which does not show how the loss of Classifier is normalised."
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        trained(attach(trainer_of(loss, tmp_path, (4, 2))))
    (found,) = notices(caplog)
    assert re.sub(r"\d+\.\d+", "#", found) == f"gradient scale: {text.format(shown)}"
    caplog.clear()
    if text.endswith(LEFT):

        def loss_by_steps(t: Any, *args: Any) -> torch.Tensor:
            return loss(t, *args) / t.args.gradient_accumulation_steps

        expected = trained(trainer_of(loss, tmp_path, (4, 2))) / 2
        trainer = attach(trainer_of(loss_by_steps, tmp_path, (4, 2)))
    else:
        expected = trained(trainer_of(loss, tmp_path, (4, 2)))
        trainer = attach(trainer_of(loss, tmp_path, (4, 2)))
        trainer.loss_is_scaled_for_ga = True
    torch.testing.assert_close(trained(trainer), expected)
    assert trainer.memopt_changes == ()


def test_a_count_of_the_users_own_window_is_left_alone(tmp_path: Path) -> None:
    def build() -> Any:
        trainer = trainer_of(
            lambda t, m, x, y, n: (each(x, y) * (y + 1)).sum() / t.window, tmp_path, (2, 2), max_steps=3
        )
        before = trainer.get_batch_samples

        def get_batch_samples(*args: Any) -> Any:
            batches, count = before(*args)
            trainer.window = sum((batch["labels"] + 1).sum() for batch in batches)
            return batches, count

        trainer.get_batch_samples = get_batch_samples
        return trainer

    torch.testing.assert_close(trained(attach(build())), trained(build()), rtol=0, atol=0)


def mean_cross_entropy(source: Any, target: Any, num_items: Any = None, ignore_index: int = -100, **_: Any) -> Any:
    return F.cross_entropy(source, target, ignore_index=ignore_index)


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_a_head_that_is_said_to_count_is_looked_at(
    is_exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cross entropy may be another one; without dropout of its own nothing of the look is left."""
    if is_exchanged:
        monkeypatch.setattr(loss_utils, "fixed_cross_entropy", mean_cross_entropy)
    norms = [
        heads.gradient_norms(attach(heads.make_trainer(heads.HEADS["llama-causal-lm"], tmp_path, *shape)))
        for shape in ((8, 1), (4, 2))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_nothing_of_the_look_is_left(tmp_path: Path) -> None:
    """Not in buffers, attributes, logs, generators and the random numbers of dropout."""

    class Marked(Classifier):
        def __init__(self) -> None:
            super().__init__(has_norm=True)
            self.dropout = nn.Dropout(0.3)
            self.register_buffer("seen", torch.zeros(2**19))  # 2 MiB
            self.calls = 0

        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            self.seen += 1
            self.calls += 1
            return self.dropout(super().forward(input_ids))

    def loss(t: Any, m: Any, x: torch.Tensor, y: torch.Tensor, n: Any) -> torch.Tensor:
        t.log({"calls": m.calls})
        return total(x, y) / n

    found = []
    for change in (lambda trainer: trainer, attach):
        model = Marked()
        trainer = change(trainer_of(loss, tmp_path, (4, 2), model))
        gradients = trained(trainer)
        logs = [entry["calls"] for entry in trainer.state.log_history if "calls" in entry]
        found.append((gradients, model.norm.running_mean, model.seen, model.calls, logs, torch.get_rng_state()))
    assert repr(found[0]) == repr(found[1])


def main(folder: str) -> None:
    """Write what two processes decide, and the norms of their gradients, for each loss; alone only for the first."""
    outcomes = {}
    for name, of_first in (("a mean", "a mean"), ("the count", "the count"), ("a mean", "the count"), ("InfoNCE",) * 2):
        for rows in ((4, 4), (4, 1)):
            rank = int(os.environ["RANK"])
            loss = {**MEANS, **SUMS}[of_first if rank == 0 else name]
            trainer = attach(trainer_of(loss, Path(folder), (rows[rank], 2), ddp_backend="gloo"))
            norm = float(trained(trainer).norm())
            outcomes[f"{name}, {of_first}, {rows}"] = [trainer.model_accepts_loss_kwargs, norm]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(outcomes), encoding="utf-8")


@pytest.mark.slow
def test_two_processes_decide_together(tmp_path: Path) -> None:
    """Also where the loss or the number of rows of one is another."""
    one, other = run_pair(tmp_path, __file__, str(tmp_path))
    assert one == other
    assert {name: accepts for name, (accepts, _) in one.items()} == {
        name: name.startswith("the count, the count") for name in one
    }


if __name__ == "__main__":
    main(sys.argv[1])
