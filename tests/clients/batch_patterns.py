"""Losses of a batch as a whole: rows selected by the others, sums that no row has alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    Trainer,
)

from loss_patterns import tags, targets
from pattern import OfInputs, OfLabels, Pattern, bert, built, correct

# ---- Rows selected from the batch -----------------------------------------------------------------------------------


class HardHalf(OfInputs):
    """OHEM: the half of the batch with the largest losses."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        return losses.topk(max(1, len(losses) // 2)).values.mean()


class HardHalfInTraining(Trainer):
    """The same in training, and a plain mean in evaluation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = losses.topk(max(1, len(losses) // 2)).values.mean() if model.training else losses.mean()
        return (loss, outputs) if return_outputs else loss


class AboveTheMean(OfInputs):
    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        return losses[losses >= losses.mean().detach()].mean()


class SmallLosses(OfInputs):
    """Three quarters of the batch, those whose labels are likely right."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        kept = losses.detach().argsort()[: int(0.75 * len(losses))]
        return losses[kept].mean()


class ConfidentRows(OfInputs):
    """Pseudo-labels: the model's own, where it is sure, added with their share of the batch."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        sure, guessed = outputs.logits.detach().softmax(-1).max(-1)
        mask = (sure > 0.34).float()
        return outputs.loss + (F.cross_entropy(outputs.logits, guessed, reduction="none") * mask).mean()


# ---- The batch as a set ---------------------------------------------------------------------------------------------


class Dice(OfInputs):
    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        found, asked = outputs.logits.softmax(-1), F.one_hot(inputs["labels"], 3).float()
        return 1 - ((2 * (found * asked).sum(0) + 1) / (found.sum(0) + asked.sum(0) + 1)).mean()


class Tversky(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        found = outputs.logits.sigmoid()
        true, false, missed = (found * labels).sum(), (found * (1 - labels)).sum(), ((1 - found) * labels).sum()
        return (1 - (true + 1) / (true + 0.3 * false + 0.7 * missed + 1)) ** 0.75


class Lovasz(Trainer):
    """The Lovasz extension of the Jaccard loss: errors sorted over the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels").flatten()
        outputs = model(**inputs)
        errors, order = (1 - outputs.logits.flatten() * (2 * labels - 1)).sort(descending=True)
        sorted_labels = labels[order]
        union = sorted_labels.sum() + (1 - sorted_labels).cumsum(0)
        jaccard = 1 - (sorted_labels.sum() - sorted_labels.cumsum(0)) / union
        steps = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        loss = F.relu(errors) @ steps
        return (loss, outputs) if return_outputs else loss


class PairwiseRanking(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels").float()
        outputs = model(**inputs)
        scores = outputs.logits[:, 0]
        order = torch.sign(labels[:, None] - labels[None])
        loss = F.softplus(-(scores[:, None] - scores[None]) * order)[order != 0].mean()
        return (loss, outputs) if return_outputs else loss


class ListNet(Trainer):
    """A batch is the list of the answers to one question."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels").float()
        outputs = model(**inputs)
        loss = -(labels.softmax(0) * outputs.logits[:, 0].log_softmax(0)).sum()
        return (loss, outputs) if return_outputs else loss


class PositivesAboveNegatives(OfLabels):
    """A hinge over the pairs of a positive and a negative, a stand-in for the area under the curve."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        scores = outputs.logits[:, 0]
        gaps = scores[labels == 0][:, None] - scores[labels != 0][None]
        return F.relu(1 - gaps).pow(2).mean() if gaps.numel() else scores.sum() * 0


class EntropyOfTheMean(OfInputs):
    """Predictions that are spread over the classes, over the batch."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        mean = outputs.logits.softmax(-1).mean(0)
        return outputs.loss + 0.1 * (mean * mean.log()).sum()


class Concordance(OfLabels):
    """One minus Lin's coefficient over the batch."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        found = outputs.logits.squeeze(-1)
        covariance = ((found - found.mean()) * (labels - labels.mean())).mean()
        spread = found.var(unbiased=False) + labels.var(unbiased=False) + (found.mean() - labels.mean()) ** 2
        return 1 - 2 * covariance / spread


class Correlation(OfLabels):
    def loss_of(self, outputs: Any, labels: Any) -> Any:
        pair = torch.stack([outputs.logits.squeeze(-1), labels])
        return 1 - torch.corrcoef(pair)[0, 1] + 0.1 * F.mse_loss(*pair)


PATTERNS = {
    "hard examples, OHEM": Pattern(built(HardHalf, metrics=correct)),
    "hard examples, in training only": Pattern(built(HardHalfInTraining, metrics=correct), evaluates=True),
    "hard examples, above the mean": Pattern(built(AboveTheMean)),
    "small losses, noisy labels": Pattern(built(SmallLosses)),
    "pseudo-labels where confident": Pattern(built(ConfidentRows)),
    "dice": Pattern(built(Dice)),
    "Tversky, multi-label": Pattern(built(Tversky, data=tags)),
    "Lovasz": Pattern(built(Lovasz, data=tags)),
    "ranking, pairs of the batch": Pattern(built(PairwiseRanking)),
    "ranking, ListNet": Pattern(built(ListNet)),
    "ranking, positives above negatives": Pattern(built(PositivesAboveNegatives)),
    "entropy of the mean prediction": Pattern(built(EntropyOfTheMean)),
    "regression, concordance": Pattern(built(Concordance, model=lambda: bert(num_labels=1), data=targets)),
    "regression, correlation": Pattern(built(Correlation, model=lambda: bert(num_labels=1), data=targets)),
}
