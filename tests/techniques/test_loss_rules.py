"""What a loss weighs rows by: found by rows that differ, refused before a cut that would train something else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt.binding.attach import attach
from hf_memopt.techniques.evaluation.guard import EvaluationGuardCallback
from hf_memopt.techniques.microbatching import step as microbatched_step
from hf_memopt.techniques.microbatching.loss_rules import LossWeights
from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback
from hf_memopt.techniques.microbatching.probed_loss import ProbedLoss
from hf_memopt.techniques.microbatching.row_counts import row_shares, spread
from scarcity import Pad, Scarcity, mixed_rows, token_rows

FLOAT32 = 2**-22  # gradients of rows added in another order, over steps of 0.1
ADVICE = (
    "expected rows that do not depend on each other. Take MicrobatchCallback out of callbacks= and lower "
    "per_device_train_batch_size."
)
BATCHES, ROWS = 4, 4


class OwnLoss(Trainer):
    """A trainer whose loss takes a column of the batch that the model does not."""

    loss: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        taken = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        outputs = model(**taken)
        loss = type(self).loss(outputs["logits"], inputs)
        return (loss, outputs) if return_outputs else loss


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


class WeightedMean(OwnLoss):
    """A mean weighted by a column."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return (each(logits, inputs["labels"]) * inputs["weight"]).sum() / inputs["weight"].sum()


class MaskedTokens(OwnLoss):
    """A mean over the tokens of a mask that is not the labels'."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["loss_mask"]
        losses = each(logits.flatten(0, 1), inputs["labels"].clamp(min=0).flatten()).view_as(mask)
        return (losses * mask).sum() / mask.sum()


class MeanOverBoxes(OwnLoss):
    """A mean over objects, of which each row has a list."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        losses = [
            each(row.expand(len(boxes), -1), boxes).sum() for row, boxes in zip(logits, inputs["boxes"], strict=True)
        ]
        return torch.stack(losses).sum() / sum(map(len, inputs["boxes"]))


class TwoMeans(OwnLoss):
    """A mean over rows, and one over those rows that have a second label."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return functional.cross_entropy(logits, inputs["labels"]) + functional.cross_entropy(logits, inputs["second"])


class WeightedClasses(OwnLoss):
    """A mean weighted by class, which differs from a mean over rows for class 2 alone."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return functional.cross_entropy(logits, inputs["labels"], weight=torch.tensor([1.0, 1.0, 5.0]))


class InBatchNegatives(OwnLoss):
    """Each row against the others."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class RandomMask(OwnLoss):
    """A mask drawn anew at each pass, in evaluation mode too, as masked autoencoders do."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return (each(logits, inputs["labels"]) * torch.rand(len(logits))).mean()


class Penalty(OwnLoss):
    """A term over the whole batch."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        return functional.cross_entropy(logits, inputs["labels"]) + logits.mean(0).square().sum()


class Pairs(OwnLoss):
    """Chosen rows first, rejected ones after them."""

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        chosen, rejected = logits[:, 0].chunk(2)
        return -functional.logsigmoid(chosen - rejected).mean()


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad what has columns; keep lists of tensors as they are."""
    boxes = [row["boxes"] for row in rows if "boxes" in row]
    rest = Pad()([{name: value for name, value in row.items() if name != "boxes"} for row in rows])
    return {**rest, "boxes": boxes} if boxes else rest


def rows_with(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    rows = mixed_rows(BATCHES * ROWS)
    return [{**row, **{name: values[i] for name, values in columns.items()}} for i, row in enumerate(rows)]


def masked(counts: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for row, count in zip(tiny.rows(BATCHES * ROWS), counts, strict=True):
        labels = [token % 3 for token in row["input_ids"]]
        rows.append({**row, "labels": labels, "loss_mask": [1.0] * count + [0.0] * (12 - count)})
    return rows


def tokens_bert() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return transformers.BertForTokenClassification(tiny.bert_config())


def make(
    trainer_class: type[Trainer],
    rows: Any,
    folder: Path,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    **settings: Any,
) -> Trainer:
    args = tiny.arguments(
        folder,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_strategy="steps",
        logging_steps=1,
        **settings,
    )
    model = model or (tokens_bert() if trainer_class is MaskedTokens else tiny.bert())
    if issubclass(trainer_class, OwnLoss):
        vars(model)["accepts_loss_kwargs"] = False  # stock then counts no labels
    trainer = trainer_class(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    return attach(trainer, *callbacks)


EQUAL_FIRST = [1.0] * 4
LATER = [1.0, 9.0, 0.1, 3.0] * 3
FEW_FIRST = [5] * 4 + [2, 11, 5, 8, 5, 2, 8, 5, 11, 2, 8, 8]
BOXES = [2] * 4 + [1, 5, 1, 4, 2, 6, 1, 1, 3, 1, 1, 6]


@pytest.mark.parametrize(
    ("trainer_class", "rows", "rule"),
    [
        pytest.param(WeightedMean, rows_with(weight=EQUAL_FIRST + LATER), "sum of weight", id="weights"),
        pytest.param(WeightedMean, rows_with(weight=LATER + EQUAL_FIRST), "sum of weight", id="weights-at-once"),
        pytest.param(MaskedTokens, masked(FEW_FIRST), "sum of loss_mask", id="mask"),
        pytest.param(MeanOverBoxes, rows_with(boxes=[torch.arange(n) % 3 for n in BOXES]), "boxes", id="boxes"),
    ],
)
def test_a_mean_over_another_column_is_exact_though_the_first_batch_does_not_show_it(
    trainer_class: type[Trainer], rows: Any, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first batch the counts of all rows are equal: by it alone the mean is one over rows."""
    whole = make(trainer_class, rows, tmp_path)
    built: list[LossWeights] = []
    monkeypatch.setattr(microbatched_step, "LossWeights", lambda: built.append(LossWeights()) or built[-1])
    split = make(trainer_class, rows, tmp_path, MicrobatchCallback(max_examples=2))
    whole.train()
    split.train()
    assert tiny.largest_difference(whole.model, split.model) <= FLOAT32
    assert built[-1].rule == rule


def test_losses_alone_would_not_tell(tmp_path: Path) -> None:
    """With a head of zeros every row has the same loss, whatever weighs it; only the gradients differ."""
    trainer = make(WeightedMean, rows_with(weight=LATER + EQUAL_FIRST), tmp_path)
    nn.init.zeros_(trainer.model.classifier.weight)
    nn.init.zeros_(trainer.model.classifier.bias)
    weights = LossWeights()
    weights.ask(trainer, trainer.model, collate(trainer.train_dataset[:ROWS]), None)
    assert weights.rule == "sum of weight"


@pytest.mark.parametrize(
    ("trainer_class", "rows", "reason"),
    [
        pytest.param(
            TwoMeans,
            rows_with(second=[i % 3 if i < 4 or i % 2 else -100 for i in range(16)]),
            "means over different counts",
            id="second-label",
        ),
        pytest.param(
            WeightedClasses, rows_with(labels=[0, 1, 0, 1, 2, 1, 0, 2] * 2), "as weights of classes do", id="rare-class"
        ),
    ],
)
def test_a_loss_that_fits_no_rule_is_refused_before_the_first_cut_that_would_be_wrong(
    trainer_class: type[Trainer], rows: Any, reason: str, tmp_path: Path
) -> None:
    """The first batch cannot show it, and its cut is right; the second would not be."""
    whole = make(trainer_class, rows, tmp_path, max_steps=1)
    split = make(trainer_class, rows, tmp_path, MicrobatchCallback(max_examples=2))
    whole.train()
    with pytest.raises(ValueError, match=reason):
        split.train()
    assert split.state.global_step == 1
    assert tiny.largest_difference(whole.model, split.model) <= FLOAT32


def refusal(trainer_class: type[Trainer], folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        make(trainer_class, rows_with(labels=[0, 1, 2, 1] * 4), folder, MicrobatchCallback()).train()
    start = "model=BertForSequenceClassification cannot be trained in micro-batches: "
    message = str(error.value)
    assert message.startswith(start)
    assert message.endswith(f"; {ADVICE}")
    return message.removeprefix(start).removesuffix(f"; {ADVICE}")


def test_each_refusal_has_its_own_reason(tmp_path: Path) -> None:
    assert refusal(RandomMask, tmp_path) == (
        "its loss is random in evaluation mode too (masks or noise), so parts cannot be compared with the whole"
    )
    figures = refusal(InBatchNegatives, tmp_path)
    assert figures.startswith("the loss of 3 rows at once is 1.")
    assert figures.endswith(" and that of each alone 0, as with in-batch negatives")
    assert refusal(WeightedClasses, tmp_path) == (
        "it weighs rows by 0.143 : 0.714 : 0.143, which nothing in the batch gives, as weights of classes do"
    )
    assert refusal(Penalty, tmp_path).endswith(
        ") gives, as with a penalty over the whole batch or means over different counts"
    )
    assert refusal(Pairs, tmp_path) == (
        "its rows belong together, as pairs do: the loss of one row alone fails (ValueError: not enough values to "
        "unpack (expected 2, got 1))"
    )


def test_a_refusal_survives_out_of_memory_while_its_reason_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    twice = ProbedLoss.twice

    def fail(self: ProbedLoss, probe: Any) -> Any:
        monkeypatch.setattr(self.trainer, "compute_loss", full)
        return twice(self, probe)

    monkeypatch.setattr(ProbedLoss, "twice", fail)
    assert refusal(Penalty, tmp_path).endswith("over the whole batch or means over different counts")


class MakesItsBatches(Trainer):
    """Gets a list of prompts in its step, as trainers do that generate."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return super().training_step(model, Pad()(inputs), num_items_in_batch)


def test_a_step_that_makes_its_own_batches_is_refused(tmp_path: Path) -> None:
    trainer = make(MakesItsBatches, mixed_rows(8), tmp_path, MicrobatchCallback())
    trainer.data_collator = list
    with pytest.raises(ValueError) as error:
        trainer.train()
    assert str(error.value) == (
        "model=BertForSequenceClassification cannot be trained in micro-batches: MakesItsBatches makes its batches "
        f"from a list within the step, so there are no rows to take; {ADVICE}"
    )


# ---- Memory ---------------------------------------------------------------------------------------------------------


class Rows(Scarcity):
    """Run out of memory above a number of rows in every pass, those of a probe too."""

    def _before_forward(self, model: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        self.count += 1
        if len(inputs["input_ids"]) > self.limit:
            self.fail()


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("task", ["train", "evaluate"])
@pytest.mark.slow
def test_a_probe_that_does_not_fit_ends_no_run(limit: int, task: str, tmp_path: Path) -> None:
    found = []
    for callbacks in ((), (MicrobatchCallback(), EvaluationGuardCallback())):
        trainer = make(Trainer, mixed_rows(16), tmp_path, *callbacks)
        scarcity = Rows(limit=limit if callbacks else 100)
        scarcity.watch(trainer.model)
        found.append((trainer, getattr(trainer, task)()))
        assert (scarcity.errors > 0) == bool(callbacks)
    (whole, expected), (split, result) = found
    assert tiny.largest_difference(whole.model, split.model) <= FLOAT32
    if task == "evaluate":
        assert result["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)


def test_where_not_even_one_row_can_be_asked_stock_is_believed(tmp_path: Path) -> None:
    rows = [{**row, "labels": row["input_ids"]} for row in mixed_rows(16)]
    trainer = make(Trainer, rows, tmp_path, model=tiny.llama())
    Rows(limit=0).watch(trainer.model)
    assert LossWeights().of_rows(trainer, trainer.model, collate(rows[:ROWS]), torch.tensor(20)) is None


def test_single_rows_show_whether_losses_add_up_and_the_rest_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for build, expected in ((tiny.bert, "a mean over labels"), (tiny.llama, "a sum")):
        rows = [{**row, "labels": row["input_ids"]} if build is tiny.llama else row for row in mixed_rows(16)]
        trainer = make(Trainer, rows, tmp_path, model=build())
        Rows(limit=1).watch(trainer.model)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_memopt"):
            of_rows = LossWeights().of_rows(trainer, trainer.model, collate(rows[:ROWS]), torch.tensor(20))
        assert (of_rows is None) == (build is tiny.llama)
        assert [record.getMessage() for record in caplog.records] == [
            f"only single rows fit into memory, which do not show how the losses of {type(trainer.model).__name__} add "
            f"up; taken for {expected}"
        ]


def test_no_more_is_asked_once_everything_that_varies_is_excluded(tmp_path: Path) -> None:
    rows = token_rows(16)
    trainer = make(Trainer, rows, tmp_path, model=tokens_bert())
    passes: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *_: passes.append(len(passes)))
    weights = LossWeights()
    weights.of_rows(trainer, trainer.model, collate(rows[:ROWS]), None)
    asked = len(passes)
    assert asked == 4  # three rows at once, and each alone
    for start in range(ROWS, len(rows), ROWS):
        weights.of_rows(trainer, trainer.model, collate(rows[start : start + ROWS]), None)
    assert len(passes) == asked


class MeasuredAgainstItself(OwnLoss):
    """A term over the batch that is 0 as long as the weights are those of the beginning, as with a reference policy."""

    moved = 0.0

    @staticmethod
    def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        own = functional.cross_entropy(logits, inputs["labels"])
        return own + logits.mean(0).square().sum() * MeasuredAgainstItself.moved


def test_a_rule_is_asked_again_as_the_weights_move(tmp_path: Path) -> None:
    trainer = make(MeasuredAgainstItself, rows_with(labels=[0, 1, 2, 1] * 4), tmp_path)
    weights, inputs = LossWeights(), collate(trainer.train_dataset[:ROWS])
    asked: list[int] = []
    passes: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *_: passes.append(1))
    for step in range(40):
        trainer.state.global_step = step
        before = len(passes)
        weights.of_rows(trainer, trainer.model, inputs, None)
        asked += [step] * (len(passes) > before)
    assert asked == [0, 1, 3, 7, 15, 31]
    MeasuredAgainstItself.moved, trainer.state.global_step = 1.0, 63
    try:
        with pytest.raises(ValueError, match="a penalty over the whole batch"):
            weights.of_rows(trainer, trainer.model, inputs, None)
    finally:
        MeasuredAgainstItself.moved = 0.0


# ---- Numbers --------------------------------------------------------------------------------------------------------


@given(
    weights=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any),
    counts=st.lists(st.integers(-9, 9), min_size=6, max_size=6),
    factor=st.floats(0.01, 100),
)
def test_the_spread_is_zero_exactly_where_two_means_are_one(
    weights: list[int], counts: list[int], factor: float
) -> None:
    shares = row_shares("own", {"own": np.array(weights, dtype=float), "rows": np.ones(len(weights))})
    assert shares.sum() == pytest.approx(1.0)
    assert not spread(shares * factor, shares).any()
    values = np.array(counts[: len(weights)], dtype=float)
    pairs = [(i, j) for i in range(len(values)) for j in range(i)]
    is_parallel = all(abs(values[i] * shares[j] - values[j] * shares[i]) < 1e-9 for i, j in pairs)
    found = spread(values, shares)
    assert ((found >= 0) & (found <= 1)).all()
    if not is_parallel:
        assert found.any()


def test_counts_that_are_no_weights_give_no_shares() -> None:
    counts = {"own": np.array([1.0, -1.0]), "rows": np.ones(2)}
    assert np.isnan(row_shares("own", counts)).all()
    assert row_shares("unknown", counts).tolist() == [0.5, 0.5]
    assert row_shares("sum", counts).tolist() == [1.0, 1.0]
