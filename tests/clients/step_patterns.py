"""Own training steps: several backwards, gradients changed by hand, steps that are left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertModel, Trainer

import tiny
from pattern import Pattern, built, telling

# ---- Several backward passes ----------------------------------------------------------------------------------------


class PenaltyAdded(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss = loss + 1e-3 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        self.accelerator.backward(loss)
        return loss.detach()


class PenaltyAfter(Trainer):
    """The step of stock, then a backward pass of a penalty alone."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        penalty = 1e-3 * sum(parameter.pow(2).sum() for parameter in model.parameters())
        self.accelerator.backward(penalty)
        return loss + penalty.detach()


class TwoBackwards(Trainer):
    """Two losses of one forward pass, one after the other."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            outputs = model(**inputs)
            second = outputs.logits.pow(2).mean(0).sum()
        self.accelerator.backward(outputs.loss, retain_graph=True)
        self.accelerator.backward(0.1 * second)
        return (outputs.loss + 0.1 * second).detach()


class AccumulatedByHand(Trainer):
    """Halves of the batch, one after the other."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = torch.zeros(())
        for half in range(2):
            part = {name: value.chunk(2)[half] for name, value in inputs.items()}
            loss = self.compute_loss(model, part) / 2
            self.accelerator.backward(loss)
            total += loss.detach()
        return total


class GradientsByHand(Trainer):
    """``torch.autograd.grad``, and gradients written where they belong."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = None if gradient is None else gradient - gradient.mean()
        return loss.detach()


class ProjectedConflicts(Trainer):
    """PCGrad: of two tasks' gradients, what goes against the other is taken out."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        outputs = model(**inputs)
        losses = (outputs.loss, F.mse_loss(outputs.logits, F.one_hot(inputs["labels"], 3).float()))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
        one, other = (torch.cat([g.flatten() for g in gradients if g is not None]) for gradients in found)
        against = min(0.0, (one @ other).item())
        for parameter, first, second in zip(parameters, *found, strict=True):
            if first is not None and second is not None:
                first_left = first - against / (other @ other) * second
                parameter.grad = first_left + second - against / (one @ one) * first
        return (losses[0] + losses[1]).detach()


class BalancedNorms(Trainer):
    """GradNorm: weights of two tasks by the norms of their gradients at the last shared layer."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        second = F.mse_loss(outputs.logits.softmax(-1), F.one_hot(inputs["labels"], 3).float())
        weights = torch.ones(2)
        if model.training:
            shared = self.model.bert.encoder.layer[-1].output.dense.weight
            norms = [torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in (outputs.loss, second)]
            weights = 2 * (1 / torch.stack(norms)).softmax(0).detach()
        loss = weights[0] * outputs.loss + weights[1] * second
        return (loss, outputs) if return_outputs else loss


class Alternating(nn.Module):
    """A classifier, and a judge of where its vectors come from."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel(tiny.bert_config(initializer_range=0.2))
        self.classifier, self.judge = nn.Linear(32, 3), nn.Linear(32, 2)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        pooled = self.encoder(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        logits = self.classifier(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "pooled": pooled}


class AgainstAJudge(Trainer):
    """As a GAN: the judge learns one pass, and the encoder against it another one."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        domain = inputs["labels"] % 2
        for parameter in self.model.judge.parameters():
            parameter.requires_grad_(True)
        judged = self.model.judge(model(**inputs)["pooled"].detach())
        self.accelerator.backward(F.cross_entropy(judged, domain))
        for parameter in self.model.judge.parameters():
            parameter.requires_grad_(False)
        outputs = model(**inputs)
        loss = outputs["loss"] - 0.1 * F.cross_entropy(self.model.judge(outputs["pooled"]), domain)
        self.accelerator.backward(loss)
        return loss.detach()


# ---- Gradients and steps changed ------------------------------------------------------------------------------------


class NoisyGradients(Trainer):
    """Noise on every gradient, from a generator of one's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise = torch.Generator().manual_seed(7)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(1e-2 * torch.randn(parameter.shape, generator=self.noise))
        return loss


class LargeLossesSkipped(Trainer):
    """A batch whose loss is above the mean of those before it counts for nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[float] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.seen and loss.item() > sum(self.seen) / len(self.seen):
            model.zero_grad()
        self.seen.append(loss.item())
        return loss


class LossTimesNothing(Trainer):
    """A loss above a bound is multiplied by 0, so that the graph stays whole."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training and loss.item() > 1.45:
            loss = loss * 0.0
        return (loss, outputs) if return_outputs else loss


class ErrorsSwallowed(Trainer):
    """A batch that fails is left out, whatever the reason."""

    skipped = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        try:
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
        except RuntimeError:
            self.skipped += 1
            model.zero_grad()
            return torch.tensor(0.0)
        return loss.detach()


class ErrorsSwallowedAround(Trainer):
    """The same around the step of stock."""

    skipped = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().training_step(*args, **kwargs)
        except RuntimeError:
            self.skipped += 1
            self.model.zero_grad()
            return torch.tensor(0.0)


class ScaledReport(Trainer):
    """What is logged is another number than what is trained."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return 100 * super().training_step(model, inputs, num_items_in_batch)


class LogsItsSteps(Trainer):
    """The norm of the encoder's gradients after each step of stock."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        norms = [p.grad.norm().item() for p in self.model.bert.encoder.parameters() if p.grad is not None]
        self.log({"encoder_norm": sum(norms) / len(norms)})
        return loss


@contextlib.contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Let a module's weights be constants for a while."""
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


class AlternatelyFrozen(Trainer):
    """The encoder in even steps, everything in odd ones."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.state.global_step % 2:
            with frozen(self.model.bert.embeddings.position_embeddings):
                return super().training_step(model, inputs, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch)


class LookAhead(Trainer):
    """The loss once more after a step by hand, as first-order MAML does."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        model.zero_grad()
        self.accelerator.backward(self.compute_loss(model, inputs))
        model.load_state_dict(weights)
        return loss.detach()


PATTERNS = {
    "penalty added in training_step": Pattern(built(PenaltyAdded)),
    "penalty by a backward of its own": Pattern(built(PenaltyAfter)),
    "two backwards of one pass": Pattern(built(TwoBackwards)),
    "accumulated by hand": Pattern(built(AccumulatedByHand, per_device_train_batch_size=8), fits=3),
    "gradients by torch.autograd.grad": Pattern(built(GradientsByHand)),
    "PCGrad": Pattern(built(ProjectedConflicts)),
    "GradNorm": Pattern(built(BalancedNorms)),
    "GAN, a judge in turn": Pattern(built(AgainstAJudge, model=Alternating)),
    "noise on gradients": Pattern(built(NoisyGradients)),
    "large losses skipped": Pattern(built(LargeLossesSkipped), drive=telling("seen")),
    "large losses times 0": Pattern(built(LossTimesNothing)),
    "errors swallowed around backward": Pattern(built(ErrorsSwallowed), drive=telling("skipped")),
    "errors swallowed around the step": Pattern(built(ErrorsSwallowedAround), drive=telling("skipped")),
    "another loss reported": Pattern(built(ScaledReport)),
    "gradients logged after the step": Pattern(built(LogsItsSteps)),
    "frozen in every other step": Pattern(built(AlternatelyFrozen)),
    "look-ahead, two passes and weights put back": Pattern(built(LookAhead)),
}
