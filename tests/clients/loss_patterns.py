"""Losses of a classifier's rows: each row by itself, or weighted; written in several ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import Trainer

from client import labelled
from pattern import OfInputs, OfLabels, Pattern, bert, built, correct

ALPHA = (0.2, 0.5, 0.9)


def targets(count: int, *, seed: int = 0) -> Dataset:
    """Texts with a number each."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return labelled(count, seed=seed).remove_columns("labels").add_column("labels", numbers)


def tags(count: int, *, seed: int = 0) -> Dataset:
    """Texts with any of three labels each."""
    rows = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) < 0.4
    return labelled(count, seed=seed).remove_columns("labels").add_column("labels", rows.float().tolist())


# ---- Each row by itself ---------------------------------------------------------------------------------------------


class Focal(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        entropy = F.cross_entropy(outputs.logits, labels, reduction="none")
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


class FocalAlpha(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.get("labels")
        outputs = model(**inputs)
        probabilities = outputs.logits.softmax(-1).gather(1, labels[:, None]).squeeze(1)
        weights = torch.tensor(ALPHA, device=labels.device)[labels]
        loss = -(weights * (1 - probabilities) ** 2 * probabilities.log()).mean()
        return (loss, outputs) if return_outputs else loss


class SmoothedByHand(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        logs = outputs.logits.log_softmax(-1)
        soft = torch.full_like(logs, 0.1 / 3).scatter_(1, labels[:, None], 0.9 + 0.1 / 3)
        return -(soft * logs).sum(-1).mean()


class PolyOne(OfInputs):
    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        right = (outputs.logits.softmax(-1) * F.one_hot(inputs["labels"], 3)).sum(-1)
        return (F.cross_entropy(outputs.logits, inputs["labels"], reduction="none") + 1 - right).mean()


class Margins(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return F.multi_margin_loss(outputs.logits, labels)


class LabelAwareMargins(OfLabels):
    """LDAM: a larger margin for rarer classes."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        margins = 0.5 / torch.tensor([100.0, 30.0, 5.0]) ** 0.25
        shifted = outputs.logits - F.one_hot(labels, 3) * margins
        return F.cross_entropy(2 * shifted, labels)


class GeneralizedEntropy(OfInputs):
    """For noisy labels: (1 - p^q) / q, and a part of the reversed cross-entropy."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        probabilities = outputs.logits.softmax(-1)
        right = probabilities.gather(1, inputs["labels"][:, None])
        reverse = -(probabilities * F.one_hot(inputs["labels"], 3).clamp(min=1e-4).log()).sum(-1)
        return ((1 - right**0.7) / 0.7).mean() + 0.1 * reverse.mean()


class LessConfident(OfInputs):
    """A penalty on the entropy of each row's prediction."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        entropies = torch.distributions.Categorical(logits=outputs.logits).entropy()
        return outputs.loss - 0.1 * entropies.mean()


class SumOverBatchSize(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / self.args.per_device_train_batch_size


class Asymmetric(OfLabels):
    """Any of several labels; easy negatives count less."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        positive = outputs.logits.sigmoid()
        negative = (1 - positive + 0.05).clamp(max=1)
        logs = labels * positive.clamp(min=1e-8).log() + (1 - labels) * negative.clamp(min=1e-8).log()
        with torch.no_grad():
            focus = (1 - positive * labels - negative * (1 - labels)) ** (labels + 4 * (1 - labels))
        return -(logs * focus).sum()


class PositiveWeights(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0, 9.0], device=labels.device))
        return criterion(outputs.logits, labels)


class Ordinal(OfLabels):
    """The classes in their order: a row of class k is above k thresholds."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        above = (labels[:, None] > torch.arange(2)).float()
        return F.binary_cross_entropy_with_logits(outputs.logits[:, :2], above, reduction="none").sum(1).mean()


class Huber(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return torch.nn.HuberLoss(delta=0.5)(outputs.logits.squeeze(-1), labels)


class Quantiles(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        errors = labels[:, None] - outputs.logits
        levels = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(levels * errors, (levels - 1) * errors).sum(1).mean()


class MeanAndVariance(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        mean, variance = outputs.logits[:, 0], F.softplus(outputs.logits[:, 1]) + 1e-3
        return F.gaussian_nll_loss(mean, labels, variance)


def summed_by_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A focal ``compute_loss_func`` that divides by the items of the step."""
    entropy = F.cross_entropy(outputs.logits, labels, reduction="none")
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    return ((1 - torch.exp(-entropy)) * entropy).sum() / count


# ---- Weights --------------------------------------------------------------------------------------------------------


class FixedClassWeights(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))(outputs.logits.view(-1, 3), labels)


class WeightsOfTheBatch(OfLabels):
    """Each class by the inverse of its count in the batch."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        weights = 1 / torch.bincount(labels, minlength=3).clamp(min=1)
        return F.cross_entropy(outputs.logits, labels, weight=weights)


class SampleWeights(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        weights = inputs.pop("weight").float()
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        return (loss, outputs) if return_outputs else loss


class ScaledByNovelty(Trainer):
    """Each row by its distance from the mean of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        first = outputs.hidden_states[-1][:, 0].detach()
        weights = (first - first.mean(0)).norm(dim=1).softmax(0)
        loss = (F.cross_entropy(outputs.logits, inputs["labels"], reduction="none") * weights).sum()
        return (loss, outputs.logits) if return_outputs else loss


def weighted(count: int, *, seed: int = 0) -> Dataset:
    """Texts with a class and a weight."""
    return labelled(count, seed=seed, weight=[(1.0, 9.0, 0.1, 3.0)[i % 4] for i in range(count)])


# ---- Written in other ways ------------------------------------------------------------------------------------------


@torch.jit.script
def scripted_focal(logits: torch.Tensor, labels: torch.Tensor, power: float) -> torch.Tensor:
    """A loss that torch compiles."""
    entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return torch.mean(torch.pow(1.0 - torch.exp(-entropy), power) * entropy)


class Scripted(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return scripted_focal(outputs.logits, labels, 2.0)


class OwnCrossEntropy(torch.autograd.Function):
    """A mean whose gradient is written by hand."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any) -> Any:
        probabilities = logits.softmax(-1)
        ctx.save_for_backward(probabilities, labels)
        return F.nll_loss(probabilities.log(), labels)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        probabilities, labels = ctx.saved_tensors
        return gradient * (probabilities - F.one_hot(labels, probabilities.shape[-1])) / len(labels), None


class OwnFunction(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        return OwnCrossEntropy.apply(outputs.logits, labels)


class StraightThrough(OfLabels):
    """Rounded predictions, with the gradient of those before rounding."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        soft = outputs.logits.softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 3) + soft - soft.detach()
        return F.mse_loss(hard, F.one_hot(labels, 3).float()) + outputs.logits.pow(2).mean()


PATTERNS = {
    "focal": Pattern(built(Focal, metrics=correct)),
    "focal, alpha": Pattern(built(FocalAlpha, metrics=correct), evaluates=True),
    "label smoothing by hand": Pattern(built(SmoothedByHand, metrics=correct)),
    "Poly-1": Pattern(built(PolyOne)),
    "margin": Pattern(built(Margins)),
    "margins by class, LDAM": Pattern(built(LabelAwareMargins)),
    "generalized cross-entropy": Pattern(built(GeneralizedEntropy)),
    "entropy of each row": Pattern(built(LessConfident)),
    "sum over the set batch size": Pattern(built(SumOverBatchSize)),
    "asymmetric loss, multi-label, a sum": Pattern(built(Asymmetric, data=tags, learning_rate=0.01)),
    "multi-label, pos_weight": Pattern(built(PositiveWeights, data=tags), evaluates=True),
    "ordinal": Pattern(built(Ordinal)),
    "regression, Huber": Pattern(built(Huber, model=lambda: bert(num_labels=1), data=targets)),
    "regression, quantiles": Pattern(built(Quantiles, data=targets)),
    "regression, mean and variance": Pattern(built(MeanAndVariance, data=targets)),
    "compute_loss_func, focal over items": Pattern(built(given={"compute_loss_func": summed_by_items})),
    "class weights, fixed": Pattern(built(FixedClassWeights, metrics=correct), evaluates=True),
    "class weights, of the batch": Pattern(built(WeightsOfTheBatch)),
    "weights of rows, a column": Pattern(built(SampleWeights, data=weighted, remove_unused_columns=False)),
    "weights of rows, from the mean of the batch": Pattern(built(ScaledByNovelty)),
    "loss of torch.jit.script": Pattern(built(Scripted)),
    "loss of an own autograd.Function": Pattern(built(OwnFunction)),
    "straight-through estimator": Pattern(built(StraightThrough)),
}
