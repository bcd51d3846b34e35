"""Second derivatives: losses of a language model whose own gradient is differentiated again."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Trainer

from language_patterns import causal, llama

eager = functools.partial(llama, attn_implementation="eager")  # its attention can be differentiated twice


class OfLoss(Trainer):
    """Adds what ``more`` returns, in training: it gets model, inputs and the model's output."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = self.more(model, inputs, outputs) if model.training else outputs.loss
        return (loss, outputs) if return_outputs else loss

    def more(self, model: Any, inputs: Any, outputs: Any) -> torch.Tensor:
        raise NotImplementedError


def shifted(outputs: Any, labels: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the next words, and the logits that it reads."""
    logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), **settings), logits


def slope(loss: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a gradient, in a graph."""
    return sum(one.pow(2).sum() for one in torch.autograd.grad(loss, inputs, create_graph=True))


class LogitsPenalty(OfLoss):
    """The gradient of the loss by the logits that it reads."""

    def more(self, model: Any, inputs: Any, outputs: Any) -> torch.Tensor:
        loss, logits = shifted(outputs, inputs["labels"])
        return loss + 10 * slope(loss, logits)


class WeightsPenalty(OfLoss):
    """The norm of the gradient that the step is about to take, of the model's own loss."""

    def more(self, model: Any, inputs: Any, outputs: Any) -> torch.Tensor:
        return outputs.loss + 0.1 * slope(outputs.loss, *model.parameters()).sqrt()


class CappedPenalty(OfLoss):
    """The gradient by the head's weight, through bounded logits and smoothed labels."""

    def more(self, model: Any, inputs: Any, outputs: Any) -> torch.Tensor:
        outputs.logits = 3 * torch.tanh(outputs.logits.float() / 3)
        loss, _ = shifted(outputs, inputs["labels"], label_smoothing=0.1)
        return loss + slope(loss, model.lm_head.weight)


class Curvature(OfLoss):
    """The product of the Hessian by the logits with a vector, which is differentiated once more."""

    def more(self, model: Any, inputs: Any, outputs: Any) -> torch.Tensor:
        loss, logits = shifted(outputs, inputs["labels"], reduction="sum")
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        along = torch.sin(torch.arange(first.shape[-1]))
        (second,) = torch.autograd.grad((first * along).sum(), logits, create_graph=True)
        return outputs.loss + second.pow(2).mean()


class LookAhead(OfLoss):
    """MAML: the loss with the head as it is after one step of its own, which is differentiated as well."""

    def more(self, model: Any, inputs: Any, outputs: Any) -> torch.Tensor:
        weight = model.lm_head.weight
        (gradient,) = torch.autograd.grad(outputs.loss, weight, create_graph=True)
        ahead = {"lm_head.weight": weight - 0.5 * gradient}
        return torch.func.functional_call(model, ahead, kwargs=dict(inputs)).loss


class MovedWords(Trainer):
    """The loss where the embedded words go uphill; the way uphill is differentiated, too."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
        loss = model(inputs_embeds=embedded, **inputs).loss
        (uphill,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + model(inputs_embeds=embedded + uphill, **inputs).loss


class KeptGraph(Trainer):
    """``backward(create_graph=True)`` in a step of its own, and a second one through the gradients."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        trained = list(model.parameters())
        gradients = torch.autograd.grad(loss, trained, create_graph=True)
        self.accelerator.backward(loss + 0.01 * sum(gradient.pow(2).sum() for gradient in gradients))
        return loss.detach()


PATTERNS = {
    "second derivative, by the logits": causal(LogitsPenalty, model=eager),
    "second derivative, by the weights": causal(WeightsPenalty, model=eager),
    "second derivative, through capped logits": causal(CappedPenalty, model=eager),
    "second derivative, curvature of the logits": causal(Curvature, model=eager),
    "second derivative, a step of the head ahead": causal(LookAhead, model=eager),
    "second derivative, words moved uphill": causal(MovedWords, model=eager),
    "second derivative, in a step of its own": causal(KeptGraph, model=eager),
}
