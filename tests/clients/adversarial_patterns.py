"""Adversarial passes: words and weights moved uphill, and the loss there."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    Trainer,
)

from pattern import Pattern, bert, built

eager = functools.partial(bert, attn_implementation="eager")  # its attention can be differentiated twice
# ---- Adversarial ----------------------------------------------------------------------------------------------------


class FastGradient(Trainer):
    """FGM: the gradients of a second pass, with the word embeddings moved uphill, are added."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = self.model.get_input_embeddings().weight
        backup = weight.data.clone()
        norm = torch.norm(weight.grad)
        if norm != 0 and not torch.isnan(norm):
            weight.data.add_(0.5 * weight.grad / norm)
        self.accelerator.backward(self.compute_loss(model, self._prepare_inputs(inputs)))
        weight.data = backup
        return loss


class ProjectedGradient(Trainer):
    """PGD: three passes uphill within a ball; the last one's gradients are added to those of the clean pass."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        weight = self.model.get_input_embeddings().weight
        clean = weight.data.clone()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for turn in range(3):
            weight.data.add_(0.3 * weight.grad / (weight.grad.norm() + 1e-8))
            moved = weight.data - clean
            weight.data = clean + moved / max(1.0, moved.norm().item())
            if turn < 2:
                model.zero_grad()
            else:
                for name, parameter in model.named_parameters():
                    parameter.grad = gradients.get(name)
            self.accelerator.backward(self.compute_loss(model, inputs))
        weight.data = clean
        return loss.detach()


class FreeLargeBatch(Trainer):
    """FreeLB: a third of each of three passes, with a disturbance of the embedded words that goes uphill."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        ids = inputs.pop("input_ids")
        delta = torch.zeros(*ids.shape, 32)
        total = torch.zeros(())
        for _ in range(3):
            delta.requires_grad_()
            embedded = self.model.get_input_embeddings()(ids) + delta
            loss = model(inputs_embeds=embedded, **inputs).loss / 3
            self.accelerator.backward(loss)
            total += loss.detach()
            step = delta.grad / (delta.grad.flatten(1).norm(dim=1)[:, None, None] + 1e-8)
            delta = (delta + 0.2 * step).detach()
        return total


class WeightPerturbation(Trainer):
    """AWP: the gradients of a second pass, with moved weights, take the place of the first's."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        backup = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and "weight" in name:
                backup[name] = parameter.data.clone()
                scale = 0.01 * parameter.data.norm() / (parameter.grad.norm() + 1e-6)
                parameter.data.add_(scale * parameter.grad)
        model.zero_grad()
        self.accelerator.backward(self.compute_loss(model, inputs))
        for name, parameter in model.named_parameters():
            if name in backup:
                parameter.data = backup[name]
        return loss.detach()


class SharpnessAware(Trainer):
    """SAM: gradients at the top of the hill next to the weights."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        moved = []
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    move = 0.05 * parameter.grad / (norm + 1e-12)
                    parameter.add_(move)
                    moved.append((parameter, move))
        model.zero_grad()
        super().training_step(model, inputs, num_items_in_batch)
        with torch.no_grad():
            for parameter, move in moved:
                parameter.sub_(move)
        return loss


class VirtualAdversarial(Trainer):
    """VAT: the divergence from predictions with embedded words that one power iteration has disturbed."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "labels")}
        embedded = self.model.get_input_embeddings()(inputs["input_ids"])
        if not model.training:
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        clean = outputs.logits.detach().softmax(-1)
        delta = torch.sin(torch.arange(embedded.numel()).float()).view_as(embedded).requires_grad_()
        first = model(inputs_embeds=embedded.detach() + delta, **rest).logits.log_softmax(-1)
        (uphill,) = torch.autograd.grad(F.kl_div(first, clean, reduction="batchmean"), delta)
        moved = embedded + 0.5 * F.normalize(uphill, dim=-1)
        second = model(inputs_embeds=moved, **rest).logits.log_softmax(-1)
        loss = outputs.loss + F.kl_div(second, clean, reduction="batchmean")
        return (loss, outputs) if return_outputs else loss


class SmoothAround(Trainer):
    """SMART: as close as can be to the predictions with a little noise on the embedded words, both ways."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        embedded = self.model.get_input_embeddings()(inputs["input_ids"])
        noise = 0.1 * torch.sin(torch.arange(embedded.numel()).float()).view_as(embedded)
        noisy = model(inputs_embeds=embedded + noise, attention_mask=inputs["attention_mask"]).logits
        one, other = outputs.logits.log_softmax(-1), noisy.log_softmax(-1)
        both = [F.kl_div(a, b.exp().detach(), reduction="batchmean") for a, b in ((one, other), (other, one))]
        loss = outputs.loss + sum(both)
        return (loss, outputs) if return_outputs else loss


class GradientPenalty(Trainer):
    """The norm of the loss' own gradient by the embedded words, which is differentiated again."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        ids = inputs.pop("input_ids")
        embedded = self.model.get_input_embeddings()(ids)
        loss = model(inputs_embeds=embedded, **inputs).loss
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + 10 * gradient.flatten(1).norm(dim=1).mean()


class TwoPasses(Trainer):
    """R-Drop: the same batch twice, and the divergence of the two predictions."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        one, other = model(**inputs), model(**inputs)
        p, q = one.logits.log_softmax(-1), other.logits.log_softmax(-1)
        apart = F.kl_div(p, q, log_target=True, reduction="sum") + F.kl_div(q, p, log_target=True, reduction="sum")
        loss = (one.loss + other.loss) / 2 + apart / 2
        return (loss, one) if return_outputs else loss


PATTERNS = {
    "FGM": Pattern(built(FastGradient)),
    "PGD": Pattern(built(ProjectedGradient)),
    "FreeLB": Pattern(built(FreeLargeBatch)),
    "AWP": Pattern(built(WeightPerturbation)),
    "SAM, two passes of the step": Pattern(built(SharpnessAware)),
    "VAT": Pattern(built(VirtualAdversarial)),
    "SMART, noise on embedded words": Pattern(built(SmoothAround)),
    "gradient penalty, create_graph": Pattern(built(GradientPenalty, model=eager)),
    "R-Drop": Pattern(built(TwoPasses), evaluates=True),
}
