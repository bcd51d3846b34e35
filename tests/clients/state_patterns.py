"""Trainings that remember: balances, counters, logs; callbacks and hooks that act on gradients and weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback

from contrastive_patterns import supervised_contrast
from pattern import OfInputs, Pattern, bert, built, telling

# ---- Balances and counters ------------------------------------------------------------------------------------------


class RunningMean(Trainer):
    """A loss divided by the running mean of the losses so far."""

    running = 1.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        if model.training:
            self.running = 0.9 * self.running + 0.1 * loss.item()
            loss = loss / max(self.running, 1e-3)
        return (loss, outputs) if return_outputs else loss


class LearnedSigmas(nn.Module):
    """Two tasks weighted by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.base = bert()
        self.sigmas = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.base(input_ids=input_ids, attention_mask=attention_mask).logits
        losses = (F.cross_entropy(logits, labels), F.mse_loss(logits, F.one_hot(labels, 3).float()))
        weighted = [torch.exp(-sigma) * loss + sigma for sigma, loss in zip(self.sigmas, losses, strict=True)]
        return {"loss": sum(weighted), "logits": logits}


class DynamicWeights(Trainer):
    """DWA: two tasks weighted by how fast their losses fell from one step to the next."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.history: list[list[float]] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        losses = torch.stack([outputs.loss, F.mse_loss(outputs.logits, F.one_hot(inputs["labels"], 3).float())])
        weights = torch.ones(2)
        if len(self.history) >= 2:
            weights = 2 * (torch.tensor(self.history[-1]) / torch.tensor(self.history[-2])).softmax(0)
        if model.training:
            self.history.append(losses.tolist())
        loss = (weights * losses).sum()
        return (loss, outputs) if return_outputs else loss


class Counting(Trainer):
    """Counts its calls, and lets a second term in by their number."""

    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            self.calls += 1
        loss = outputs.loss + min(1.0, self.calls / 4) * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class ContrastFromStepTwo(Trainer):
    """A contrast between the rows after a warm-up without it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=self.state.global_step >= 2)
        loss = outputs.loss
        if self.state.global_step >= 2:
            loss = loss + 0.5 * supervised_contrast(outputs.hidden_states[-1][:, 0], inputs["labels"])
        return (loss, {"logits": outputs.logits}) if return_outputs else loss


class RunningPrior(Trainer):
    """Logits adjusted by how often each class was seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = torch.ones(3)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        if model.training:
            self.counts = self.counts + torch.bincount(labels, minlength=3)
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits + (self.counts / self.counts.sum()).log(), labels)
        return (loss, outputs) if return_outputs else loss


class Multiplier(Trainer):
    """A bound on the mean confidence, by a multiplier that rises while it is not kept."""

    multiplier = 0.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        excess = outputs.logits.softmax(-1).amax(-1).mean() - 0.4
        loss = outputs.loss + self.multiplier * excess
        if model.training:
            self.multiplier = max(0.0, self.multiplier + 0.5 * excess.item())
        return (loss, outputs) if return_outputs else loss


class Replay(Trainer):
    """One stored batch is trained beside the present one."""

    stored: Any = None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        present = {name: value.clone() for name, value in inputs.items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.stored is not None:
            loss = (loss + super().training_step(model, self.stored, num_items_in_batch)) / 2
        self.stored = present
        return loss


class LogsItsLoss(Trainer):
    """Notes two parts of the loss in each call."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        squares = outputs.logits.pow(2).mean()
        if model.training:
            self.log({"entropy_part": outputs.loss.item(), "squares_part": squares.item()})
        loss = outputs.loss + 0.1 * squares
        return (loss, outputs) if return_outputs else loss


class GathersForLog(Trainer):
    """Keeps parts of the loss until stock logs, as TRL's trainers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        self.kept.append(outputs.logits.detach().std().item())
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.kept:
            logs["spread"] = sum(self.kept) / len(self.kept)
            self.kept.clear()
        super().log(logs, *args, **kwargs)


# ---- Callbacks and hooks --------------------------------------------------------------------------------------------


class ClipByValue(TrainerCallback):
    """Bounds each entry of the gradients before the optimizer's step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)


class AveragedWeights(TrainerCallback):
    """An exponential average of the weights, which takes their place at the end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.slow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, value in model.named_parameters():
            self.slow[name].lerp_(value.detach(), 0.1)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, value in model.named_parameters():
            value.data.copy_(self.slow[name])


class StochasticAverage(TrainerCallback):
    """SWA of torch."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.averaged = torch.optim.swa_utils.AveragedModel(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.averaged.update_parameters(model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.load_state_dict(self.averaged.module.state_dict())


class Unfreezing(TrainerCallback):
    """One layer more in each step, from the top."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.bert.requires_grad_(False)
        for layer in model.bert.encoder.layer[max(0, 2 - state.global_step) :]:
            layer.requires_grad_(True)


class WeightOfALoss(TrainerCallback):
    """A cosine that the trainer's loss reads."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.config.second_weight = 0.5 * (1 + math.cos(math.pi * state.global_step / 4))


class ReadsAWeight(OfInputs):
    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        return outputs.loss + self.model.config.second_weight * outputs.logits.pow(2).mean()


class NormsOfGradients(TrainerCallback):
    """Sums up the norms of the classifier's gradients."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        state.total_norm = getattr(state, "total_norm", 0.0) + model.classifier.weight.grad.norm().item()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        state.log_history[-1]["total_norm"] = getattr(state, "total_norm", 0.0)


class ClampingHooks(Trainer):
    """Bounds each entry of a gradient where it arrives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class CenteringHooks(Trainer):
    """Gradients of matrices without their mean, which is linear."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.register_hook(lambda gradient: gradient - gradient.mean(1, keepdim=True))


class HookOnLogits(Trainer):
    """The gradients of the logits, scaled by their largest in the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            outputs.logits.register_hook(lambda gradient: gradient / gradient.abs().max())
        return (outputs.loss, outputs) if return_outputs else outputs.loss


PATTERNS = {
    "loss by its running mean": Pattern(built(RunningMean), drive=telling("running")),
    "uncertainty weights, learned": Pattern(built(model=LearnedSigmas)),
    "dynamic weights of two losses": Pattern(built(DynamicWeights), drive=telling("history")),
    "counter that weighs a term": Pattern(built(Counting), drive=telling("calls")),
    "contrast from step 2 on": Pattern(built(ContrastFromStepTwo)),
    "running prior of classes": Pattern(built(RunningPrior), drive=telling("counts")),
    "multiplier of a constraint": Pattern(built(Multiplier), drive=telling("multiplier")),
    "replay of the last batch": Pattern(built(Replay)),
    "self.log in compute_loss": Pattern(built(LogsItsLoss)),
    "means kept for the log": Pattern(built(GathersForLog)),
    "callback, clip by value": Pattern(built(callbacks=[ClipByValue])),
    "callback, average of weights": Pattern(built(callbacks=[AveragedWeights])),
    "callback, SWA": Pattern(built(callbacks=[StochasticAverage])),
    "callback, gradual unfreezing": Pattern(built(callbacks=[Unfreezing])),
    "callback, weight of a loss": Pattern(built(ReadsAWeight, callbacks=[WeightOfALoss])),
    "callback, norms of gradients": Pattern(built(callbacks=[NormsOfGradients])),
    "hooks that clamp gradients": Pattern(built(ClampingHooks)),
    "hooks that center gradients": Pattern(built(CenteringHooks)),
    "hook on the logits' gradient": Pattern(built(HookOnLogits)),
}
