"""Teachers, references and penalties: a loss by other weights than those that are trained."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    Trainer,
)

from contrastive_patterns import numbered
from pattern import OfInputs, Pattern, bert, built, telling


def with_numbers(kind: type[Trainer]) -> Any:
    """Return what builds a trainer whose examples have a number."""
    return built(kind, data=numbered, remove_unused_columns=False)


# ---- Other models ---------------------------------------------------------------------------------------------------


class WithTeacher(Trainer):
    """A trainer with a larger, frozen model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = bert(seed=1, intermediate_size=128, attn_implementation="eager").eval().requires_grad_(False)


class DistilledLogits(WithTeacher):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            asked = self.teacher(**inputs).logits
        soft = F.kl_div((outputs.logits / 2).log_softmax(-1), (asked / 2).softmax(-1), reduction="batchmean")
        loss = 0.5 * outputs.loss + 0.5 * 4 * soft
        return (loss, outputs) if return_outputs else loss


class DistilledHidden(WithTeacher):
    """The hidden states of all layers, over the tokens that are no padding."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            asked = self.teacher(**inputs, output_hidden_states=True)
        mask = inputs["attention_mask"][..., None].bool().expand_as(outputs.hidden_states[0])
        loss = outputs.loss
        for one, other in zip(outputs.hidden_states[1:], asked.hidden_states[1:], strict=True):
            loss = loss + 0.1 * F.mse_loss(one.masked_select(mask), other.masked_select(mask))
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


class DistilledAttention(WithTeacher):
    """The attention maps of the last layer."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_attentions=True)
        with torch.no_grad():
            asked = self.teacher(**inputs, output_attentions=True)
        loss = outputs.loss + F.mse_loss(outputs.attentions[-1], asked.attentions[-1])
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


class RelationsDistilled(WithTeacher):
    """The distances between the rows of the batch, as the teacher sees them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            asked = F.normalize(self.teacher(**inputs).logits, dim=-1)
        found = F.normalize(outputs.logits, dim=-1)
        loss = outputs.loss + F.mse_loss(found @ found.T, asked @ asked.T)
        return (loss, outputs) if return_outputs else loss


class MeanTeacher(Trainer):
    """A slow average of the weights, which moves in each call in training."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
        if model.training:
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        outputs = model(**inputs)
        with torch.no_grad():
            asked = self.teacher(**inputs).logits
        loss = outputs.loss + F.mse_loss(outputs.logits, asked)
        return (loss, outputs) if return_outputs else loss


class NearReference(OfInputs):
    """The divergence from the model as it was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference = copy.deepcopy(self.model).eval()

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        with torch.no_grad():
            asked = self.reference(**inputs).logits.log_softmax(-1)
        found = outputs.logits.log_softmax(-1)
        return outputs.loss + F.kl_div(found, asked, log_target=True, reduction="none").sum(-1).mean()


class TemporalEnsemble(Trainer):
    """Each example's predictions so far, by its number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guesses = torch.full((16, 3), 1 / 3)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        number = inputs.pop("number")
        outputs = model(**inputs)
        found = outputs.logits.softmax(-1)
        loss = outputs.loss + F.mse_loss(found, self.guesses[number])
        if model.training:
            self.guesses = self.guesses.index_copy(0, number, 0.6 * self.guesses[number] + 0.4 * found.detach())
        return (loss, outputs) if return_outputs else loss


# ---- Penalties on weights -------------------------------------------------------------------------------------------


class SquaredWeights(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        return (loss, outputs) if return_outputs else loss


class TinyPenalty(Trainer):
    """A penalty that is lost in the rounding of a loss and not in that of a gradient."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-6 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        return (loss, outputs) if return_outputs else loss


class NearStart(Trainer):
    """L2-SP: the distance from the weights of the start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        for name, parameter in model.named_parameters():
            if name.startswith("bert."):
                loss = loss + 0.5 * (parameter - self.start[name]).pow(2).sum()
        return (loss, outputs) if return_outputs else loss


class ElasticWeights(NearStart):
    """EWC: the same, weighted by a Fisher information of an earlier task."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        for name, parameter in model.named_parameters():
            loss = loss + (self.start[name].abs() * (parameter - self.start[name]).pow(2)).sum()
        return (loss, outputs) if return_outputs else loss


class Orthogonal(OfInputs):
    """Rows of the classifier that stand at right angles."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        weight = self.model.classifier.weight
        return outputs.loss + 0.1 * (weight @ weight.T - torch.eye(3)).pow(2).sum()


PATTERNS = {
    "distillation, logits": Pattern(built(DistilledLogits), evaluates=True),
    "distillation, hidden states": Pattern(built(DistilledHidden)),
    "distillation, attention maps": Pattern(built(DistilledAttention, model=lambda: bert(attn_implementation="eager"))),
    "distillation, relations in the batch": Pattern(built(RelationsDistilled)),
    "mean teacher, moved in compute_loss": Pattern(built(MeanTeacher)),
    "KL to a reference": Pattern(built(NearReference)),
    "temporal ensemble": Pattern(with_numbers(TemporalEnsemble), drive=telling("guesses")),
    "L2 in compute_loss": Pattern(built(SquaredWeights)),
    "L2 in compute_loss, tiny": Pattern(built(TinyPenalty)),
    "L2-SP": Pattern(built(NearStart)),
    "EWC": Pattern(built(ElasticWeights)),
    "orthogonal classifier": Pattern(built(Orthogonal)),
}
